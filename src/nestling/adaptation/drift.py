"""How far the levels have moved, how far they may, and states to return to."""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch

from nestling.checks import require, whole_number
from nestling.continuum import Continuum, ContinuumState, Fast
from nestling.continuum import fast as differences
from nestling.continuum.fast import cut, weight_of
from nestling.continuum.stream import Confine, Levels
from nestling.levels import LevelUpdate
from nestling.tree import tree_leaves


class Drift(NamedTuple):
    """Where a level stands: its updates, its last loss and gradient norm, and its drift.

    `drift` is the norm of the level's difference over the norm of the base weights it sits on.
    """

    level: str
    chunk: int | float
    updates: int
    loss: float
    grad_norm: float
    drift: float


class Alarm(NamedTuple):
    """A level passed a limit: what was measured, and where."""

    position: int
    level: str
    measure: str
    value: float
    limit: float

    def __str__(self) -> str:
        beyond = f"> {self.limit:.4g}" if math.isfinite(self.limit) else "is not finite"
        return (
            f"level {self.level!r} at position {self.position}: {self.measure} {self.value:.4g}"
            f" {beyond}"
        )


class DriftWarning(UserWarning):
    """A text went past a limit and was refused: the memory goes on from before it."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How far a memory may go; what is not a finite number is always refused.

    drift: norm of a level's difference over the norm of the base weights it sits on. A level goes
        on learning at its limit: the difference is scaled back to it.
    step: the same for the change one update makes: a larger step is shortened.
    grad_norm: norm of a chunk's mean gradient. loss: mean loss of a chunk, in nats per token.
    forget: how much one text may raise the loss of held-out text, in nats per token: of what the
        user's earlier texts taught, and of the model's own text.

    Past one of the last three, the text is refused: the memory goes on from before it.
    """

    drift: float = 1.0
    step: float = 0.1
    grad_norm: float = math.inf
    loss: float = math.inf
    forget: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            require(value > 0.0, f"limits: {field.name}", value, "a number above 0")


def base_norms(continuum: Continuum) -> dict[str, float]:
    """The norm of the base weights each level sits on."""
    norms = {}
    for level, parts in zip(continuum.levels, continuum.parts, strict=True):
        squares = 0.0
        for own in parts:
            weight, transposed = weight_of(continuum.model, continuum.slots[own.slot].name)
            part = cut(weight.detach().mT if transposed else weight.detach(), own.part)
            squares += float(part.float().square().sum())
        norms[level.name] = max(math.sqrt(squares), 1e-30)
    return norms


def as_numbers(updates: Iterable[LevelUpdate]) -> list[LevelUpdate]:
    """The engine's records of one memory, [1] tensors, as plain numbers."""
    return [
        LevelUpdate(update.position, update.level, *(_number(each) for each in update[2:]))
        for update in updates
    ]


def _number(measure: Any) -> float:
    return float(measure.detach() if isinstance(measure, torch.Tensor) else measure)


def find_alarm(updates: Sequence[LevelUpdate], limits: Limits) -> Alarm | None:
    """The first measure that is not finite or past its limit."""
    for update in updates:
        for measure in ("loss", "grad_norm", "step", "distance"):
            value, limit = getattr(update, measure), getattr(limits, measure, math.inf)
            if not math.isfinite(value):
                return Alarm(update.position, update.level, measure, value, math.inf)
            if measure in ("loss", "grad_norm") and value > limit:
                return Alarm(update.position, update.level, measure, value, limit)
    return None


def trust_region(continuum: Continuum, norms: dict[str, float], limits: Limits) -> Confine | None:
    """A function that keeps every update of one memory within `limits.step` and `limits.drift`."""
    if math.isinf(limits.step) and math.isinf(limits.drift):
        return None
    numbers = {level.name: number for number, level in enumerate(continuum.levels)}

    def confine(
        before: Levels, after: Levels, updates: list[LevelUpdate]
    ) -> tuple[Levels, list[LevelUpdate]]:
        levels, made = list(after), []
        for update in updates:
            number, base = numbers[update.level], norms[update.level]
            fast, step = levels[number].fast, _number(update.step)
            if math.isfinite(step) and step > limits.step * base:
                share = limits.step * base / step
                rank = continuum.levels[number].rank
                both = zip(before[number].fast, fast, strict=True)
                fast = tuple(_between(old, new, share, rank) for old, new in both)
                update = update._replace(step=update.step * share, distance=update.step * 0)
                update = update._replace(distance=update.distance + joint_norm(fast))
            far = _number(update.distance)
            if math.isfinite(far) and far > limits.drift * base:
                share = limits.drift * base / far
                fast = tuple(differences.scale(part, share) for part in fast)
                update = update._replace(distance=update.distance * share)
            if fast is not levels[number].fast:
                levels[number] = levels[number]._replace(fast=fast)
            made.append(update)
        return tuple(levels), made

    return confine


def joint_norm(fast: Iterable[Fast]) -> float:
    """The norm of a level's differences together."""
    squares = (torch.as_tensor(differences.norm2(part)).detach() for part in fast)
    return math.sqrt(sum(float(each.sum()) for each in squares))


def _between(old: Fast, new: Fast, share: float, rank: int | None) -> Fast:
    """`old + share (new - old)`, in the level's own form."""
    mixed = differences.add(differences.scale(old, 1.0 - share), differences.scale(new, share))
    if rank is None or mixed is None:
        return mixed
    return differences.truncate(mixed, rank)[0]


class Snapshots:
    """A bounded number of states to go back to; unnamed ones make room for newer ones.

    A state is plain data that is never changed in place, so a snapshot costs memory only for the
    levels that have changed since.
    """

    def __init__(self, most: int) -> None:
        whole_number("snapshots", most)
        self.most = most
        self._kept: OrderedDict[str, tuple[ContinuumState, bool]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def names(self) -> list[str]:
        """The names of the kept states, the oldest first."""
        return list(self._kept)

    def add(self, state: ContinuumState, name: str | None = None) -> str:
        """Keep a state; returns its name. Named ones are never dropped by themselves."""
        if name is not None and (not name or name.startswith("@")):
            raise ValueError(
                "a snapshot's name must not be empty or begin with @, as unnamed ones do; got"
                f" {name!r}"
            )
        label = f"@{state.position}" if name is None else name
        self._kept.pop(label, None)
        unnamed = [key for key, (_, named) in self._kept.items() if not named]
        if len(self._kept) >= self.most:
            if unnamed:
                del self._kept[unnamed[0]]
            elif name is None:
                return label  # full of named ones: there is still something to go back to
            else:
                raise ValueError(
                    f"there are already {self.most} named snapshots ({', '.join(self._kept)});"
                    " drop one, or give adapt a larger number of snapshots"
                )
        self._kept[label] = (state, name is not None)
        return label

    def drop(self, name: str) -> None:
        """Forget a snapshot."""
        self.get(name, None)
        del self._kept[name]

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()

    def get(self, which: int | str, now: ContinuumState | None) -> ContinuumState:
        """The state of that name, or the n-th last that differs from `now`."""
        if isinstance(which, str):
            if which not in self._kept:
                raise ValueError(
                    f"no snapshot {which!r}; there are {', '.join(self._kept) or 'none'}"
                )
            return self._kept[which][0]
        others = [s for s, _ in self._kept.values() if now is None or s.levels is not now.levels]
        if isinstance(which, bool) or not 1 <= which <= len(others):
            raise ValueError(
                f"rollback takes a name or a number from 1 to {len(others)}; got {which!r}"
            )
        return others[-which]

    def states(self) -> list[ContinuumState]:
        """All kept states."""
        return [state for state, _ in self._kept.values()]


def tree_bytes(*trees: object) -> int:
    """Bytes of all tensors in some trees; what they share counts once."""
    seen: dict[int, int] = {}
    for tree in trees:
        for _, leaf in tree_leaves(tree):
            storage = leaf.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


def warn_refused(alarm: Alarm, text: str | None, position: int) -> None:
    """Say what happened and where the memory stands now."""
    what = "the text since then" if text is None else f"the text {text!r}"
    warnings.warn(
        f"{alarm}; rolled back to position {position}, and {what} is not learned",
        DriftWarning,
        stacklevel=4,
    )
