"""Levels: when one changes (the only clock, Eq. 71), which is faster (Def. 2), what it did."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

Name = TypeVar("Name", bound=Hashable)


def due(position: int, chunk: int | float) -> bool:
    """True when a level with this chunk changes after `position` items: `i = 0 (mod C)`, Eq. 71."""
    return position > 0 and chunk != math.inf and position % int(chunk) == 0


def boundaries(start: int, stop: int, chunk: int | float) -> range:
    """All positions in `(start, stop]` at which a level with this chunk is due, in order."""
    if chunk == math.inf:
        return range(0)
    step = int(chunk)
    return range((start // step + 1) * step, stop + 1, step)


def multiple(chunk: int | float, of: int | float) -> bool:
    """True when a level with this chunk is due only when one with chunk `of` is."""
    return math.inf not in (chunk, of) and int(chunk) % int(of) == 0


def rank(needs: Mapping[Name, Iterable[Name]]) -> dict[Name, int]:
    """How many components must be computed one after another before each: 0 needs no other.

    This orders components that change equally often (Definition 2). A component that needs itself
    through others has no place in any order: ValueError.
    """
    ranks: dict[Name, int] = {}

    def visit(name: Name, path: tuple[Name, ...]) -> int:
        if name in path:
            loop = " -> ".join(str(n) for n in (*path[path.index(name) :], name))
            raise ValueError(
                f"problems of equal frequency need each other's state at the same item ({loop});"
                " Definition 2 gives them no order: read one of them with previous=True"
            )
        if name not in ranks:
            below = [visit(need, (*path, name)) for need in needs[name]]
            ranks[name] = 1 + max(below, default=-1)
        return ranks[name]

    for name in needs:
        visit(name, ())
    return ranks


@dataclass(frozen=True, kw_only=True)
class Level:
    """One time scale: `chunk` items (tokens or steps) between two updates; `inf` never changes.

    Frequency (Def. 2) is derived, updates per item: `1 / chunk`.

    early: smaller chunks at first, as (until, chunk) pairs: `early=((64, 8), (256, 32))` is due
        every 8 items up to position 64, every 32 up to 256, and every `chunk` from there on.
    """

    name: str
    chunk: int | float
    early: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        before = 0
        for until, chunk in self.early:
            if not (isinstance(until, int) and isinstance(chunk, int) and until > before):
                raise ValueError(
                    f"Level {self.name!r}: early is a list of (until, chunk) in growing order; got"
                    f" {self.early!r}"
                )
            if chunk < 1 or not multiple(until, chunk):
                raise ValueError(
                    f"Level {self.name!r}: early: {until} must be a multiple of its chunk {chunk}"
                )
            before = until
        whole = isinstance(self.chunk, int) and not isinstance(self.chunk, bool)
        if not (self.chunk == math.inf or (whole and self.chunk >= 1)):
            raise ValueError(
                f"Level {self.name!r}: chunk must be a whole number of at least 1, or math.inf for"
                f" a level that never changes; got {self.chunk!r}"
            )

    @property
    def frequency(self) -> float:
        """Updates per item (Definition 2)."""
        return 0.0 if self.chunk == math.inf else 1.0 / self.chunk

    def due(self, position: int) -> bool:
        """True when this level changes after `position` items (Eq. 71)."""
        for until, chunk in self.early:
            if position <= until:
                return due(position, chunk)
        return due(position, self.chunk)

    def next_due(self, position: int) -> int | None:
        """The first position after `position` at which this level is due; None if there is none."""
        for until, chunk in self.early:
            if position < until:
                return boundaries(position, until, chunk)[0]
        ahead = boundaries(position, position + int(self.chunk), self.chunk) if self.finite else ()
        return ahead[0] if ahead else None

    @property
    def finite(self) -> bool:
        """False for a level that never changes."""
        return self.chunk != math.inf


class LevelUpdate(NamedTuple):
    """One change of one level: the record that training, learning and pictures share.

    The four measures are numbers, or tensors [B] with one entry per sequence; nan where nobody
    measured.
    """

    position: int  # items seen when the level changed
    level: str
    loss: Any  # mean loss of the chunk's items, before the update (the surprise)
    grad_norm: Any  # norm of the chunk's gradient, as the rule saw it
    step: Any  # norm of the change this update made
    distance: Any  # norm of the level's difference from its initial weights, after the update
