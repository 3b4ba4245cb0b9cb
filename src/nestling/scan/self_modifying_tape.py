"""What passes between the segments of `self_modifying_matrix`: tapes, constants and gradients.

Legend: b = sequences x heads, C tokens of a segment, N memories, d head width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["TAPE", "Grads", "Shapes", "Tape", "shapes"]


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


TAPE = len(Tape._fields) + 2
"""Tensors of a flat tape."""


class Shapes(NamedTuple):
    """Constants of a segment."""

    lower: Tensor  # [C, C]: 0 below the diagonal, -inf elsewhere
    eye: Tensor  # [C, C]


def shapes(size: int, like: Tensor) -> Shapes:
    """The constants of segments up to `size` tokens."""
    lower = torch.full((size, size), -torch.inf, device=like.device, dtype=like.dtype).triu_()
    return Shapes(lower, torch.eye(size, device=like.device, dtype=like.dtype))


class Grads(NamedTuple):
    """Gradients of one segment; `begun` is None where the chunk starts with the segment, `start`
    where it is the same as begun."""

    stack: Tensor  # [b, N d, d]
    begun: Tensor | None  # [b, N d, d]
    start: Tensor | None  # [b, N d, d]
    x: Tensor  # [b, C, d]
    readout: Tensor  # [b, 2, d]
    gates: Tensor  # [b, C, 2]
    k: Tensor | None
    v: Tensor | None
    q: Tensor | None
