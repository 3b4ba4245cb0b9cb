"""What passes between the segments of `kernel`: tapes, a desk and gradients.

Legend: b = sequences x heads, C tokens of a segment, N memories, d head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nestling.scan.self_modifying.rule import Inputs, SelfRule

__all__ = ["FLAT", "Desk", "Grads", "Piles", "Shelf", "Tape", "restore", "slim"]


class Tape(NamedTuple):
    """What the backward pass needs of a segment beside its inputs and start weights."""

    kv: Tensor  # [b, 2C, d]: k, then v
    scales: tuple[Tensor | None, Tensor | None, Tensor | None]  # of k, v, q: [b, C, 1]
    q: Tensor  # [b, C, d]
    sig: Tensor  # [b, C, 2]: sigmoids of rate and retention
    eta: Tensor  # [b, C, 1]
    gap: Tensor  # [b, C, C]: D
    before: Tensor  # [b, C, 1]: g_{t-1}
    tail: Tensor  # [b, C, 1]: g_C / g_t
    whole: Tensor  # [b, 1, 1]: g_C
    inverse: Tensor | None  # [b, C, C]: of I + eta D (K K^T)
    own: Tensor | None  # [b, C, N, d]: vhat
    own_scale: Tensor | None  # [b, C, N, 1]
    u: Tensor  # [b, C, N, d]
    short: Tensor | None  # [b, C, N, 1]: how much clipping shortened u; 1 where it did not
    w: Tensor  # [b, C, N d]
    y: Tensor  # [b, C, d]

    def flat(self) -> list[Tensor | None]:
        """All tensors in a row; `Tape.of` brings them back."""
        return [self.kv, *self.scales, *self[2:]]

    @staticmethod
    def of(parts: list[Tensor]) -> Tape:
        """The inverse of `flat`."""
        return Tape(parts[0], (parts[1], parts[2], parts[3]), *parts[4:])


FLAT = (Tape._fields[0], "scale of k", "scale of v", "scale of q", *Tape._fields[2:])
"""The tensors of a flat tape."""


def slim(rule: SelfRule, flat: list[Tensor | None]) -> list[Tensor | None]:
    """A flat tape without what stands elsewhere too: given queries, reads, errors that are the
    values as they are."""
    known = {"y"} | ({"q"} if rule.slot("q") is None else set())
    if rule.objective == "dot" and rule.clip >= 1:
        known |= {"u"}
    return [None if name in known else part for name, part in zip(FLAT, flat, strict=True)]


def restore(
    flat: list[Tensor | None], part: Inputs, y: Tensor, values: Tensor
) -> list[Tensor | None]:
    """The inverse of `slim`: from the segment's inputs, reads and values [b, C, N, d]."""
    instead = {"q": part.q, "y": y, "u": values}
    both = zip(FLAT, flat, strict=True)
    return [instead.get(name) if known is None else known for name, known in both]


Shelf = Callable[..., Tensor]
"""Where a segment's tape goes: a name of `FLAT` (or "after", the weights) and a shape -> tensor."""


class Desk:
    """What segments share: constants, and tensors for what one needs only for a moment.

    A fresh tensor comes from memory that no cache holds; writing it takes several times as long as
    the arithmetic. So intermediate results go to the same place in every segment, and tapes too
    unless there is a shelf for them.
    """

    def __init__(self, size: int, like: Tensor, shelf: Shelf | None = None) -> None:
        self.eye = torch.eye(size, device=like.device, dtype=like.dtype)  # [C, C]
        self.lower = torch.full_like(self.eye, -torch.inf).triu_()
        """[C, C]: 0 below the diagonal, -inf elsewhere."""
        self._shelf = shelf
        self._places: dict[str, Tensor] = {}

    def place(self, name: str, *shape: int) -> Tensor:
        """The tensor of this name; whatever was in it is gone at the next use."""
        found = self._places.get(name)
        if found is None or found.shape != shape:
            found = self._places[name] = self.eye.new_empty(shape)
        return found

    def keep(self, name: str, *shape: int) -> Tensor:
        """A tensor for a part of the tape, or for the weights after a segment."""
        if self._shelf is not None:
            return self._shelf(name, *shape)
        return self.eye.new_empty(shape) if name == "after" else self.place(f"tape {name}", *shape)


class Piles:
    """A shelf with one tensor [S, ...] for each name; the weights after a segment end its row."""

    def __init__(self, segments: int, like: Tensor) -> None:
        self.segments, self.like, self.row = segments, like, 0
        self.piles: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        if name not in self.piles:
            self.piles[name] = self.like.new_empty(self.segments, *shape)
        place = self.piles[name][self.row]
        self.row += name == "after"
        return place

    def put(self, row: int, name: str, part: Tensor | None) -> None:
        """Copy a part, if there is one, to a row, unless it was made there."""
        if part is None:
            return
        if name not in self.piles:
            self.piles[name] = self.like.new_empty(self.segments, *part.shape)
        if self.piles[name][row].data_ptr() != part.data_ptr():
            self.piles[name][row] = part

    def get(self, name: str) -> Tensor:
        """All rows of a name; empty where there are none."""
        return self.piles.get(name, self.like.new_empty(0))


class Grads(NamedTuple):
    """Gradients of one segment; `begun` is None where the chunk starts with the segment, `start`
    where it is the same as begun. All of them may lie on the desk."""

    stack: Tensor  # [b, N d, d]
    begun: Tensor | None  # [b, N d, d]
    start: Tensor | None  # [b, N d, d]
    x: Tensor  # [b, C, d]
    readout: Tensor  # [b, 2, d]
    gates: Tensor  # [b, C, 2]
    k: Tensor | None
    v: Tensor | None
    q: Tensor | None
