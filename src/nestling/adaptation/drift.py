"""How far the levels have moved, when that is too far, and states to return to."""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nestling.continuum import Continuum, ContinuumState
from nestling.continuum.assignment import cut, weight_of
from nestling.levels import LevelUpdate
from nestling.tree import tree_leaves

__all__ = [
    "Alarm",
    "Change",
    "Drift",
    "DriftWarning",
    "Limits",
    "Snapshots",
    "base_norms",
    "changes",
    "find_alarm",
    "tree_bytes",
    "warn_rollback",
]


class Change(NamedTuple):
    """One update of one level: when, how surprised, how steep, and how far from the base since.

    `drift` is the norm of the level's difference over the norm of the base weights it sits on.
    """

    position: int
    level: str
    surprise: float
    gradient: float
    drift: float


class Drift(NamedTuple):
    """Where a level stands: its updates, its last surprise and gradient, and its drift."""

    level: str
    chunk: int | float
    updates: int
    surprise: float
    gradient: float
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
    """A level drifted past a limit, and the memory was rolled back."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a level has gone too far; what is not a finite number always has.

    drift: norm of the difference over the norm of the base weights it sits on.
    gradient: norm of a chunk's mean gradient.
    surprise: mean loss of a chunk, in nats per token.
    """

    drift: float = 1.0
    gradient: float = math.inf
    surprise: float = math.inf

    def __post_init__(self) -> None:
        for name in ("drift", "gradient", "surprise"):
            value = getattr(self, name)
            if not value > 0.0:
                raise ValueError(f"limits: {name} must be a number above 0; got {value!r}")


def base_norms(continuum: Continuum) -> dict[str, float]:
    """The norm of the base weights each level sits on."""
    norms = {}
    for level, parts in zip(continuum.levels, continuum.parts, strict=True):
        squares = 0.0
        for own in parts:
            weight, transposed = weight_of(continuum.model, continuum.slots[own.slot].name)
            part = cut(weight.detach().mT if transposed else weight.detach(), own.part)
            squares += float(part.float().square().sum())
        norms[level.name] = math.sqrt(squares)
    return norms


def changes(updates: Iterable[LevelUpdate], norms: dict[str, float]) -> list[Change]:
    """The engine's records of one memory as plain numbers."""
    return [
        Change(
            update.position,
            update.level,
            float(update.loss[0]),
            float(update.grad_norm[0]),
            float(update.distance[0]) / max(norms[update.level], 1e-30),
        )
        for update in updates
    ]


def find_alarm(made: Sequence[Change], limits: Limits) -> Alarm | None:
    """The first measure past its limit."""
    for change in made:
        for measure in ("surprise", "gradient", "drift"):
            value, limit = getattr(change, measure), getattr(limits, measure)
            if not math.isfinite(value):
                return Alarm(change.position, change.level, measure, value, math.inf)
            if value > limit:
                return Alarm(change.position, change.level, measure, value, limit)
    return None


class Snapshots:
    """A bounded number of states to go back to; unnamed ones make room for newer ones.

    A state is plain data that is never changed in place, so a snapshot costs memory only for the
    levels that have changed since.
    """

    def __init__(self, most: int) -> None:
        if isinstance(most, bool) or most < 1:
            raise ValueError(f"snapshots must be at least 1; got {most!r}")
        self.most = most
        self._kept: OrderedDict[str, tuple[ContinuumState, bool]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def names(self) -> list[str]:
        """The oldest first."""
        return list(self._kept)

    def add(self, state: ContinuumState, name: str | None = None) -> str:
        """Keep a state; returns its name. Named ones are never dropped by themselves."""
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


def warn_rollback(alarm: Alarm, position: int) -> None:
    """Say what happened and where the memory stands now."""
    warnings.warn(
        f"{alarm}; rolled back to position {position}, and the text since then is not learned",
        DriftWarning,
        stacklevel=4,
    )
