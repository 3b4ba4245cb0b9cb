"""See it live: which level changed when, how surprised it was, and how far it drifted.

    timeline = nestling.description.Timeline()
    watch = timeline.watch({"fast": fast_parameters, "slow": slow_parameters})
    for step, batch in enumerate(batches, 1):
        ...
        optimizer.step()
        watch(step)                       # notices by itself who changed
    timeline.draw("timeline.svg")

Any loop can record: `record` takes one update, `extend` those of a `NestedSystem`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from html import escape
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from nestling.description.svg import INK, QUIET, document, fit, text
from nestling.paper.system import Tick

__all__ = ["Moment", "Timeline"]

WIDTH, LEFT, RIGHT, ROW, HEAD = 1180, 190, 150, 86, 84
COLOURS = ("#c2410c", "#b45309", "#4d7c0f", "#0f766e", "#0369a1", "#4338ca", "#7e22ce", "#9d174d")


class Moment(NamedTuple):
    """One update: at which position, which level, its surprise, and how far it moved."""

    position: int
    level: str
    surprise: float
    drift: float


class Timeline:
    """The updates of all levels, in the order in which they happened."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self.end = 0

    def record(self, position: int, level: str, *, surprise: float, drift: float) -> None:
        """Note that a level changed at this position."""
        self.moments.append(Moment(position, level, float(surprise), float(drift)))
        self.end = max(self.end, position)

    def extend(self, ticks: Iterable[Tick]) -> None:
        """Note all updates of a `NestedSystem`'s run."""
        for tick in ticks:
            for update in tick.updates:
                self.record(
                    update.position, update.name, surprise=update.surprise, drift=update.drift
                )

    def watch(self, levels: Mapping[str, Iterable[Tensor]]) -> Callable[[int], list[str]]:
        """A function to call after every step: it notices which levels changed, and names them.

        The surprise of a level is the norm of its parameters' gradients at that moment. A copy of
        the parameters is kept to measure the drift.
        """
        watched = {name: list(tensors) for name, tensors in levels.items()}
        before = {name: [t.detach().clone() for t in own] for name, own in watched.items()}

        def look(position: int) -> list[str]:
            changed = []
            for name, own in watched.items():
                drift = _norm(t.detach() - old for t, old in zip(own, before[name], strict=True))
                if drift:
                    grads = (t.grad for t in own if t.grad is not None)
                    self.record(position, name, surprise=_norm(grads), drift=drift)
                    before[name] = [t.detach().clone() for t in own]
                    changed.append(name)
            self.end = max(self.end, position)
            return changed

        return look

    @property
    def levels(self) -> list[str]:
        """The levels by how often they changed, the fastest first."""
        counts: dict[str, int] = {}
        for moment in self.moments:
            counts[moment.level] = counts.get(moment.level, 0) + 1
        return sorted(counts, key=lambda name: -counts[name])

    def of(self, level: str) -> list[Moment]:
        """One level's updates."""
        return [moment for moment in self.moments if moment.level == level]

    def frequency(self, level: str) -> float:
        """Updates per position, counted (Definition 2)."""
        return len(self.of(level)) / self.end if self.end else 0.0

    def to_json(self) -> str:
        """All moments as JSON."""
        return json.dumps([moment._asdict() for moment in self.moments])

    def draw(self, path: str | Path) -> Path:
        """Write the picture as SVG: a row per level, a bar per update, a line for its drift."""
        path = Path(path)
        if path.suffix != ".svg":
            raise ValueError(f"path must end in .svg, got {str(path)!r}")
        path.write_text(self.picture(), encoding="utf-8")
        return path

    def picture(self) -> str:
        """The timeline as SVG."""
        legend = "a bar is an update, its height the surprise; the line is the way gone so far"
        parts = [text(24, 34, "Who changed when", 19, bold=True), text(24, 56, legend, 12, QUIET)]
        for place, level in enumerate(self.levels):
            parts += self._row(level, HEAD + ROW * place, COLOURS[place % len(COLOURS)])
        bottom = HEAD + ROW * len(self.levels)
        parts += [
            text(LEFT, bottom + 8, "1", 12, QUIET, at="middle"),
            text(WIDTH - RIGHT, bottom + 8, str(self.end), 12, QUIET, at="middle"),
            text((WIDTH + LEFT - RIGHT) / 2, bottom + 8, "position", 12, QUIET, at="middle"),
        ]
        return document(WIDTH, bottom + 26, parts, "Who changed when")

    def _row(self, level: str, y: float, colour: str) -> list[str]:
        moments = self.of(level)
        room, base = ROW - 26, y + ROW - 22
        most = max((m.surprise for m in moments if math.isfinite(m.surprise)), default=0) or 1.0
        total = sum(m.drift for m in moments if math.isfinite(m.drift)) or 1.0
        names = fit(level, LEFT - 40, 14)
        parts = [
            text(24, y + 20 + 16 * i, line, 14, colour, bold=True) for i, line in enumerate(names)
        ]
        parts.append(text(24, y + 22 + 16 * len(names), f"{len(moments)} updates", 12, INK))
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}" stroke="#c9d0d8"/>'
        )
        bars, line, way = [], [f"{LEFT},{base}"], 0.0
        for moment in _thinned(moments):
            x = self._x(moment.position)
            share = moment.surprise / most if math.isfinite(moment.surprise) else 1.0
            tall = 3 + (room - 3) * share
            bars.append(f"M {x:.1f} {base} v {-tall:.1f}")
        for moment in moments:
            way += moment.drift if math.isfinite(moment.drift) else 0.0
            line.append(f"{self._x(moment.position):.1f},{base - room * way / total:.1f}")
        parts.append(
            f'<path d="{" ".join(bars)}" stroke="{colour}" stroke-width="{self._stroke()}"'
            f' opacity="0.45"><title>{escape(level)}</title></path>'
        )
        points = " ".join(_thinned(line))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
        )
        parts.append(text(WIDTH - RIGHT + 12, y + 20, f"drift {total:.3g}", 12, INK))
        parts.append(text(WIDTH - RIGHT + 12, y + 38, f"surprise \u2264 {most:.3g}", 12, QUIET))
        if lost := sum(not math.isfinite(m.surprise + m.drift) for m in moments):
            parts.append(text(WIDTH - RIGHT + 12, y + 56, f"{lost} not finite", 12, "#b91c1c"))
        return parts

    def _x(self, position: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (position - 1) / max(self.end - 1, 1)

    def _stroke(self) -> float:
        return max(min(700 / max(self.end, 1), 8.0), 0.8)


def _norm(tensors: Iterable[Tensor]) -> float:
    squares = [t.detach().double().square().sum() for t in tensors]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def _thinned(things: list, most: int = 2000) -> list:
    """At most about `most` of them, evenly, the last one included."""
    stride = max(len(things) // most, 1)
    kept = things[::stride]
    return kept if not things or kept[-1] is things[-1] else [*kept, things[-1]]
