"""See it live: which level changed when, how surprised it was, and how far it moved.

    timeline = nestling.description.Timeline()
    watch = timeline.watch({"fast": fast_parameters, "slow": slow_parameters})
    for step, batch in enumerate(batches, 1):
        ...
        optimizer.step()
        watch(step)                       # notices by itself who changed
    timeline.draw("timeline.svg")

Any loop can record: `record` takes one `nestling.levels.LevelUpdate`, `extend` many of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nestling.description.svg import COLOURS, INK, QUIET, document, fit, text
from nestling.levels import LevelUpdate

WIDTH, LEFT, RIGHT, ROW, HEAD = 1180, 190, 150, 86, 84


class Timeline:
    """The updates of all levels, in the order in which they happened."""

    def __init__(self) -> None:
        self.updates: list[LevelUpdate] = []
        self.end = 0

    def record(self, update: LevelUpdate) -> None:
        """Note that a level changed. Measures of several sequences are kept as their mean."""
        position, level, *measures = update
        means = (float(torch.as_tensor(measure).double().mean()) for measure in measures)
        self.updates.append(LevelUpdate(position, level, *means))
        self.end = max(self.end, position)

    def extend(self, updates: Iterable[LevelUpdate]) -> None:
        """Note many updates, in the order in which they happened."""
        for update in updates:
            self.record(update)

    def watch(self, levels: Mapping[str, Iterable[Tensor]]) -> Callable[[int], list[str]]:
        """A function to call after every step: it notices which levels changed, and names them.

        It measures the norm of the level's gradients at that moment, how far this step moved its
        parameters, and how far they are from where they were first seen (two copies are kept).
        """
        watched = {name: list(tensors) for name, tensors in levels.items()}
        first = {name: [t.detach().clone() for t in own] for name, own in watched.items()}
        before = dict(first)

        def look(position: int) -> list[str]:
            changed = []
            for name, own in watched.items():
                moved = _apart(own, before[name])
                if moved:
                    norm = _norm(t.grad for t in own if t.grad is not None)
                    far = _apart(own, first[name])
                    self.record(LevelUpdate(position, name, math.nan, norm, moved, far))
                    before[name] = [t.detach().clone() for t in own]
                    changed.append(name)
            self.end = max(self.end, position)
            return changed

        return look

    @property
    def levels(self) -> list[str]:
        """The levels by how often they changed, the fastest first."""
        counts: dict[str, int] = {}
        for update in self.updates:
            counts[update.level] = counts.get(update.level, 0) + 1
        return sorted(counts, key=lambda name: -counts[name])

    def of(self, level: str) -> list[LevelUpdate]:
        """One level's updates."""
        return [update for update in self.updates if update.level == level]

    def frequency(self, level: str) -> float:
        """Updates per position, counted (Definition 2)."""
        return len(self.of(level)) / self.end if self.end else 0.0

    def to_json(self) -> str:
        """All updates as JSON; what nobody measured, or is not finite, is null."""

        def known(value: Any) -> Any:
            return value if isinstance(value, str) or math.isfinite(value) else None

        rows = [{k: known(v) for k, v in u._asdict().items()} for u in self.updates]
        return json.dumps(rows, allow_nan=False)

    def draw(self, path: str | Path) -> Path:
        """Write the picture as SVG: a row per level, a bar per update, a line for its way."""
        path = Path(path)
        if path.suffix != ".svg":
            raise ValueError(f"path must end in .svg, got {str(path)!r}")
        path.write_text(self.picture(), encoding="utf-8")
        return path

    def picture(self, numbers: Mapping[str, str] | None = None) -> str:
        """The timeline as SVG.

        numbers: what stands at the end of each level's row, by the level's name, in place of the
            length of its path.
        """
        legend = "a bar is an update, its height the surprise; the line is its path so far"
        parts = [text(24, 34, "Who changed when", 19, bold=True), text(24, 56, legend, 12, QUIET)]
        for place, level in enumerate(self.levels):
            colour = COLOURS[place % len(COLOURS)]
            parts += self._row(level, HEAD + ROW * place, colour, (numbers or {}).get(level))
        bottom = HEAD + ROW * len(self.levels)
        parts += [
            text(LEFT, bottom + 8, "1", 12, QUIET, at="middle"),
            text(WIDTH - RIGHT, bottom + 8, str(self.end), 12, QUIET, at="middle"),
            text((WIDTH + LEFT - RIGHT) / 2, bottom + 8, "position", 12, QUIET, at="middle"),
        ]
        return document(WIDTH, bottom + 26, parts, "Who changed when")

    def _row(self, level: str, y: float, colour: str, number: str | None) -> list[str]:
        updates = self.of(level)
        what, surprises = _surprises(updates)
        room, base = ROW - 26, y + ROW - 22
        most = max((s for s in surprises if math.isfinite(s)), default=0) or 1.0
        steps = _steps(updates)
        total = sum(steps)
        names = fit(level, LEFT - 40, 14)
        parts = [
            text(24, y + 20 + 16 * i, line, 14, colour, bold=True) for i, line in enumerate(names)
        ]
        count = f"{len(updates)} update{'s' if len(updates) != 1 else ''}"
        parts.append(text(24, y + 22 + 16 * len(names), count, 12, INK))
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}" stroke="#c9d0d8"/>'
        )
        bars, line, way = [], [f"{LEFT},{base}"], 0.0
        stroke = max(min(700 / max(self.end, 1), 8.0), 0.8)
        for update, surprise in _thinned(list(zip(updates, surprises, strict=True))):
            share = surprise / most if math.isfinite(surprise) else 1.0
            tall = 3 + (room - 3) * share
            bars.append(f"M {self._x(update.position):.1f} {base} v {-tall:.1f}")
        for update, step in zip(updates, steps, strict=True):
            way += step
            line.append(f"{self._x(update.position):.1f},{base - room * way / (total or 1.0):.1f}")
        parts.append(
            f'<path d="{" ".join(bars)}" stroke="{colour}" stroke-width="{stroke}"'
            f' opacity="0.45"><title>{escape(level)}</title></path>'
        )
        points = " ".join(_thinned(line))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
        )
        parts.append(text(WIDTH - RIGHT + 12, y + 20, number or f"path {total:.3g}", 12, INK))
        parts.append(text(WIDTH - RIGHT + 12, y + 38, f"{what} \u2264 {most:.3g}", 12, QUIET))
        if lost := sum(not math.isfinite(s + u.step) for s, u in zip(surprises, updates)):
            parts.append(text(WIDTH - RIGHT + 12, y + 56, f"{lost} not finite", 12, "#b91c1c"))
        return parts

    def _x(self, position: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (position - 1) / max(self.end - 1, 1)


def _steps(updates: list[LevelUpdate]) -> list[float]:
    """How far each update went; a level that only receives moves by what it was given."""
    steps, before = [], 0.0
    for update in updates:
        here = update.distance if math.isfinite(update.distance) else before
        step = update.step if math.isfinite(update.step) else 0.0
        steps.append(step or abs(here - before))
        before = here
    return steps


def _surprises(updates: list[LevelUpdate]) -> tuple[str, list[float]]:
    """How surprised a level was at each update: its loss, or its gradient's norm where unknown."""
    losses = [update.loss for update in updates]
    if all(math.isnan(loss) for loss in losses):
        return "gradient", [update.grad_norm for update in updates]
    return "loss", losses


def _apart(now: Iterable[Tensor], then: Iterable[Tensor]) -> float:
    return _norm(a.detach() - b for a, b in zip(now, then, strict=True))


def _norm(tensors: Iterable[Tensor]) -> float:
    squares = [t.detach().double().square().sum() for t in tensors]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def _thinned(things: list, most: int = 2000) -> list:
    """At most about `most` of them, evenly, the last one included."""
    stride = max(len(things) // most, 1)
    kept = things[::stride]
    return kept if not things or kept[-1] is things[-1] else [*kept, things[-1]]
