"""The only clock: a level changes when the position is a multiple of its chunk (Def. 2, Eq. 71)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["Level", "LevelUpdate", "boundaries", "due", "multiple"]


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


@dataclass(frozen=True, kw_only=True)
class Level:
    """One time scale: `chunk` items (tokens or steps) between two updates; `inf` never changes.

    Frequency (Def. 2) is derived, updates per item: `1 / chunk`.
    """

    name: str
    chunk: int | float

    def __post_init__(self) -> None:
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
        return due(position, self.chunk)


class LevelUpdate(NamedTuple):
    """What one level did at one position: the one record for training, learning and pictures.

    The four measures are numbers, or tensors [B] with one entry per sequence; nan where nobody
    measured.
    """

    position: int  # items seen when the level changed
    level: str
    loss: Any  # mean loss of the chunk's items, before the update (the surprise)
    grad_norm: Any  # norm of the chunk's gradient, as the rule saw it
    step: Any  # norm of the change this update made
    distance: Any  # norm of the level's difference from its initial weights, after the update
