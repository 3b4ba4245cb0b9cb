"""One user's memory over a shared pretrained model: it reads, learns, and can be taken back."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nestling.adaptation import memory_files
from nestling.adaptation.consolidate import check_move, move, moving
from nestling.adaptation.texts import as_ids, check_range, encode, pieces
from nestling.adaptation.watch import (
    Alarm,
    Change,
    Drift,
    Limits,
    Snapshots,
    base_norms,
    changes,
    find_alarm,
    tree_bytes,
    warn_rollback,
)
from nestling.continuum import Continuum, ContinuumState, MemoryLevel
from nestling.continuum import fast as differences
from nestling.continuum.assignment import cut, weight_of
from nestling.continuum.reading import Reading
from nestling.losses import windowed_losses

__all__ = ["Learner", "Report"]

PIECE = 512
"""Tokens between two looks at the limits, at least (a whole number of the fastest chunks)."""

Progress = Callable[[int, "Report"], None]


@dataclass
class Report:
    """What one call of `learn` did."""

    tokens: int = 0
    pairs: int = 0
    loss: float = math.nan
    """Mean loss of the stream as it was read, each token judged before it was learned."""
    seconds: float = 0.0
    changes: list[Change] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)

    def add(self, losses: Tensor, tokens: int) -> None:
        """Count one piece."""
        known = losses[~losses.isnan()].double()
        total = (0.0 if self.pairs == 0 else self.loss * self.pairs) + float(known.sum())
        self.tokens, self.pairs = self.tokens + tokens, self.pairs + len(known)
        self.loss = total / self.pairs if self.pairs else math.nan


class Learner:
    """A pretrained model with a memory of its own; made by `nestling.adapt`.

    The base model is shared and never changed (except by `merge`). All that is learned lives in
    `state`, plain data; so any number of learners may use one model, also in several threads.
    """

    def __init__(
        self,
        continuum: Continuum,
        *,
        settings: dict[str, Any],
        tokenizer: Any = None,
        limits: Limits | None = None,
        snapshots: int = 3,
        move_share: float | None = None,
        on_alarm: Callable[[Alarm], None] | None = None,
    ) -> None:
        if move_share is not None:
            check_move(continuum)
        self.continuum, self.tokenizer, self.settings = continuum, tokenizer, settings
        self.limits = Limits() if limits is None else limits
        self.on_alarm = on_alarm
        self.state: ContinuumState = continuum.init()
        self.history: deque[Change] = deque(maxlen=4096)
        self.notes: Any = None  # what was saved beside the memory
        self._snapshots = Snapshots(snapshots)
        self._move_share = move_share
        self._norms = base_norms(continuum)
        self._last: dict[str, Change] = {}

    # What it is

    @property
    def model(self) -> Any:
        """The shared base model."""
        return self.continuum.model

    @property
    def config(self) -> Any:
        """The base model's configuration."""
        return self.model.config

    @property
    def device(self) -> torch.device:
        """Where the model and the memory are."""
        return self.state.start.device

    @property
    def levels(self) -> tuple[MemoryLevel, ...]:
        """The levels of the memory, as they were given."""
        return self.continuum.levels

    @property
    def position(self) -> int:
        """How many (input, target) pairs the memory has consumed: its clock."""
        return self.state.position

    @property
    def drift(self) -> tuple[Drift, ...]:
        """Where each level stands."""
        standing = []
        for number, level in enumerate(self.levels):
            last, state = self._last.get(level.name), self.state.levels[number]
            far = self._far(self.state, number)
            surprise, gradient = (last.surprise, last.gradient) if last else (math.nan, math.nan)
            updates = int(state.updates[0])
            standing.append(Drift(level.name, level.chunk, updates, surprise, gradient, far))
        return tuple(standing)

    def size(self) -> dict[str, int]:
        """Bytes: each level's fast weights, unfinished chunks and rule states, running context,
        and what the snapshots hold beyond that."""
        levels = self.state.levels
        sizes = {
            level.name: tree_bytes(state.fast, state.start)
            for level, state in zip(self.levels, levels, strict=True)
        }
        learned = tree_bytes(*(part for s in levels for part in (s.fast, s.start)))
        total = tree_bytes(self.state)
        kept = tree_bytes(self.state, *self._snapshots.states())
        working = tree_bytes(levels) - learned
        context = total - tree_bytes(levels)
        return {**sizes, "working": working, "context": context, "snapshots": kept - total}

    def __repr__(self) -> str:
        sizes = self.size()
        lines = [f"Learner over {type(self.model).__name__} at position {self.position:,}"]
        for level, drift in zip(self.levels, self.drift, strict=True):
            lines.append(
                f"  {level.name:<10} chunk {level.chunk!s:>7}  rate {level.rate:<8g}"
                f" {drift.updates:>6} updates  drift {drift.drift:.2e}  {_mb(sizes[level.name])}"
            )
        rest = ", ".join(f"{name} {_mb(sizes[name])}" for name in ("working", "context"))
        return "\n".join([*lines, f"  {rest}, snapshots {_mb(sizes['snapshots'])}"])

    # Reading

    @contextlib.contextmanager
    def reading(self) -> Iterator[Any]:
        """Within this block, in this thread, the base model answers with what was learned."""
        with Reading(self.continuum.engine.live(self.state.levels), 1):
            yield self.model

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, **options: Any) -> Any:
        """The model's own output, read with what was learned; nothing is learned from it."""
        with self.reading() as model:
            return model(input_ids, **options)

    @torch.no_grad()
    def generate(self, prompt: Tensor | str, **options: Any) -> Any:
        """Continue a prompt: text gives text, ids [B, T] give ids, as the model's `generate`."""
        text = isinstance(prompt, str)
        ids = (
            encode(prompt, self.tokenizer, begin=True)[None] if isinstance(prompt, str) else prompt
        )
        ids = ids.to(self.device)
        options = {"attention_mask": torch.ones_like(ids), **options}
        with self.reading() as model:
            made = model.generate(ids, **options)
        return self.tokenizer.decode(made[0], skip_special_tokens=True) if text else made

    @torch.no_grad()
    def score(self, source: Tensor | str | list[int], *, window: int | None = None) -> float:
        """Mean next-token loss of a text or of ids as a text of its own; nothing is learned.

        Longer texts are read in windows (the context, at most 1,024), each after the first
        starting half a window back.
        """
        ids = self._ids(source)
        if len(ids) < 2:
            raise ValueError(f"score needs at least 2 tokens; got {len(ids)}")
        context = window or min(self.continuum.context or 1024, 1024)
        losses = windowed_losses(lambda part: self(part).logits, ids.to(self.device), context)
        return float(losses.double().mean())

    # Learning

    def learn(self, source: Any, *, progress: Progress | None = None) -> Report:
        """Read text, token ids, or an iterator of either, and learn from it (Eq. 71).

        The stream goes on where the last call ended, so it may be cut into calls anywhere;
        `new_text` begins another. `progress(tokens, report)` is called as it goes.
        """
        report, begun = Report(), time.perf_counter()
        self._snapshots.add(self.state)
        waiting = torch.zeros(0, dtype=torch.long)
        for piece in pieces(source, self.tokenizer, begin=self._fresh):
            waiting = torch.cat([waiting, check_range(piece.cpu(), self.config.vocab_size)])
            while len(waiting) >= (many := self._until_cut()):
                self._learn_piece(waiting[:many], report)
                waiting = waiting[many:]
                report.seconds = time.perf_counter() - begun
                if progress is not None:
                    progress(report.tokens, report)
        if len(waiting):
            self._learn_piece(waiting, report)
        report.seconds = time.perf_counter() - begun
        if progress is not None:
            progress(report.tokens, report)
        return report

    def new_text(self) -> None:
        """What comes next has nothing to do with what was read; the memory stays."""
        self.state = self.continuum.new_context(self.state)

    @property
    def _fresh(self) -> bool:
        return self.state.tokens.shape[1] == 0 and self.state.cache is None

    def _until_cut(self) -> int:
        """Tokens until the next absolute position where limits and consolidation are looked at."""
        chunks = [int(level.chunk) for level in self.levels if level.active] or [PIECE]
        step = min(chunks) * max(1, PIECE // min(chunks))
        read = int(self.state.start[0]) + self.state.tokens.shape[1]
        steps = [step]
        if self._move_share is not None:
            steps += [int(self.levels[n].chunk) for n in moving(self.continuum)]
        return min(each - (read - 1) % each if read else each + 1 for each in steps)

    def _learn_piece(self, ids: Tensor, report: Report) -> None:
        out = self.continuum(ids[None].to(self.device), self.state, keep_logits=False)
        made, state = changes(out.updates, self._norms), out.state
        if self._move_share is not None:
            state = move(self.continuum, state, self._move_share)
            made += self._received(state, made)
        alarm = find_alarm(made, self.limits)
        report.add(out.losses[0], len(ids))
        if alarm is not None:
            report.alarms.append(alarm)
            self.state = self.continuum.new_context(self._snapshots.get(1, out.state))
            warn_rollback(alarm, self.position)
            if self.on_alarm is not None:
                self.on_alarm(alarm)
            return
        self.state = state
        report.changes += made
        self.history.extend(made)
        self._last |= {change.level: change for change in made}
        slowest = max((level for level in self.levels if level.active), key=_chunk, default=None)
        if slowest is not None and any(change.level == slowest.name for change in made):
            self._snapshots.add(self.state)

    def _received(self, state: ContinuumState, made: list[Change]) -> list[Change]:
        """Levels of rate 0 that were due: they changed by what has moved into them."""
        due = [
            number
            for number in moving(self.continuum)[1:]
            if not self.levels[number].active and self.levels[number].due(state.position)
        ]
        last = made[-1].surprise if made else 0.0
        return [
            Change(state.position, self.levels[n].name, last, 0.0, self._far(state, n)) for n in due
        ]

    def _far(self, state: ContinuumState, number: int) -> float:
        """A level's drift: the norm of its difference over that of the weights it sits on."""
        fast = state.levels[number].fast
        squares = sum(float(torch.as_tensor(differences.norm2(part)).sum()) for part in fast)
        return math.sqrt(squares) / max(self._norms[self.levels[number].name], 1e-30)

    # Going back, and further

    @property
    def snapshots(self) -> list[str]:
        """Names of the states that can be returned to, the oldest first."""
        return self._snapshots.names

    def snapshot(self, name: str) -> None:
        """Keep the present state under a name; it is not dropped by itself."""
        self._snapshots.add(self.state, name)

    def drop(self, name: str) -> None:
        """Forget a snapshot."""
        self._snapshots.drop(name)

    def rollback(self, which: int | str = 1) -> None:
        """Return to a snapshot by name, or to the n-th last that differs from now, bit for bit."""
        self.state = self._snapshots.get(which, self.state)
        self._last = {}

    def reset(self, level: str | None = None) -> None:
        """Forget everything, or (by name) what one level has learned."""
        if level is None:
            self.state = self.continuum.init()
            self._snapshots.clear()
            self.history.clear()
            self._last = {}
            return
        number = self._number(level)
        fresh = self.continuum.init().levels[number]
        levels = self.state.levels
        state = self.state._replace(levels=(*levels[:number], fresh, *levels[number + 1 :]))
        self.state = self.continuum.new_context(state)

    @torch.no_grad()
    def merge(self, level: str | None = None) -> None:
        """Write what a level (or, without a name, every level) learned into the base weights.

        This changes the model for everyone who uses it. The level starts anew; snapshots and
        memories saved for the old weights do not fit any more and are dropped or refused.
        """
        chosen = range(len(self.levels)) if level is None else [self._number(level)]
        for number in chosen:
            parts = self.continuum.parts[number]
            for own, fast in zip(parts, self.state.levels[number].fast, strict=True):
                if fast is not None:
                    weight, transposed = weight_of(self.model, self.continuum.slots[own.slot].name)
                    place = cut(weight.data.mT if transposed else weight.data, own.part)
                    full = differences.dense(fast)[0]
                    place.copy_(place.to(full.dtype) + full)
            self.reset(self.levels[number].name)
        self._snapshots.clear()
        self._norms = base_norms(self.continuum)

    def save(self, folder: str | Path, *, context: bool = False, notes: Any = None) -> None:
        """Write the memory to a folder; whatever happens, it holds the old or the new one.

        context: also what was read last, so that learning goes on bit for bit; without it, what
            comes after loading is a new text. notes: anything JSON can hold.
        """
        state = self.state if context else self.continuum.new_context(self.state)
        self.notes = notes
        memory_files.save(Path(folder), self, state, notes)

    def load(self, folder: str | Path) -> Any:
        """Take over a saved memory, and return its notes; nothing changes unless all is right."""
        saved = memory_files.load(Path(folder), self)
        self.state, self.notes = saved.state, saved.notes
        self._snapshots.clear()
        self.history = deque(saved.history, maxlen=self.history.maxlen)
        self._last = {change.level: change for change in self.history}
        return saved.notes

    def _number(self, name: str) -> int:
        names = [level.name for level in self.levels]
        if name not in names:
            raise ValueError(f"no level {name!r}; the levels are {', '.join(names)}")
        return names.index(name)

    def _ids(self, source: Any) -> Tensor:
        ids = encode(source, self.tokenizer, begin=True) if isinstance(source, str) else source
        return check_range(as_ids(ids), self.config.vocab_size)


def _chunk(level: MemoryLevel) -> int | float:
    return level.chunk


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
