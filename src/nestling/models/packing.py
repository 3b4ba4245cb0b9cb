"""Several documents in one row, told apart by `position_ids` that restart at 0.

A memory must not carry one document into the next, so packed rows are laid out as one document per
row, read, and put back:

    rows       a a a b b | c d d d d          position_ids  0 1 2 0 1 | 0 0 1 2 3
    documents  a a a . | b b . . | c . . . | d d d d        (. is masked and leaves no trace)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_WANTED = "position_ids must go up by one from token to token, or restart at 0 with a new document"


class Documents(NamedTuple):
    """Where the tokens of packed rows go: N documents of at most L tokens."""

    number: Tensor  # [B, T] the document of each token
    column: Tensor  # [B, T] its place in the document
    mask: Tensor  # [N, L] bool: which places hold a real token

    @property
    def last(self) -> Tensor:
        """The last document of each row: [B]."""
        return self.number[:, -1]


def documents(position_ids: Tensor | None, mask: Tensor | None, rows: int) -> Documents | None:
    """The documents in `rows` rows of tokens; None where every row holds one.

    position_ids: [B, T] or [1, T]. mask: [B, T] bool, None when all tokens are real. A compiled
    model cannot lay out rows by what is in them, so it stops at a restart with an error.
    """
    if position_ids is None or position_ids.shape[-1] == 1:
        return None
    if position_ids.dim() != 2 or position_ids.shape[0] not in (1, rows):
        raise ValueError(
            f"position_ids must be [batch, tokens]; got {tuple(position_ids.shape)} for {rows} rows"
        )
    positions = position_ids.expand(rows, -1)  # [B, T]
    steps = positions[:, 1:] - positions[:, :-1]
    odd = steps != 1
    if mask is not None:
        odd = odd & mask[:, 1:] & mask[:, :-1]
    if torch.compiler.is_compiling():
        torch._assert_async(~odd.any(), "a compiled model cannot read packed rows: " + _WANTED)
        return None
    if positions.is_meta or not bool(odd.any()):
        return None
    if bool((positions[:, 1:][odd] != 0).any()):
        wrong = positions[:, 1:][odd].max().item()
        raise ValueError(f"{_WANTED}; got a restart or a jump to {wrong}")
    return _layout(odd, mask)


def _layout(restart: Tensor, mask: Tensor | None) -> Documents:
    """The layout of rows whose column t + 1 begins a document where restart[:, t]: [B, T - 1]."""
    first = restart.new_ones(restart.shape[0], 1)
    begins = torch.cat([first, restart], dim=1)  # [B, T]
    number = begins.flatten().cumsum(0).view_as(begins) - 1
    places = torch.arange(begins.shape[1], device=begins.device).expand_as(begins)
    column = places - torch.where(begins, places, 0).cummax(1).values
    size = (int(number[-1, -1]) + 1, int(column.max()) + 1)
    real = torch.zeros(size, dtype=torch.bool, device=begins.device)
    real[number, column] = True if mask is None else mask
    return Documents(number, column, real)


def as_documents(x: Tensor, layout: Documents, fill: int = 0) -> Tensor:
    """Packed rows [B, T, ...] as documents [N, L, ...], `fill` where a document has ended."""
    out = x.new_full((*layout.mask.shape, *x.shape[2:]), fill)
    return out.index_put((layout.number, layout.column), x)


def as_rows(y: Tensor, layout: Documents) -> Tensor:
    """Documents [N, L, D] back in packed rows [B, T, D]."""
    return y[layout.number, layout.column]
