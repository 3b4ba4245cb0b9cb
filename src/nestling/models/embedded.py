"""Recover token ids from rows of the embedding table: `inputs_embeds` then teach as tokens do."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROWS = 4096  # of the table at once: their numbers take eight bytes an entry


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.no_grad()
def tokens_of(embeds: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """The token of every embedding, and whether there is one: [B, T, D] -> [B, T] int64, bool.

    table: the model's input embeddings, [V, D]. An embedding is a token when it is that token's row
    to the bit, and no other's; anything else (a soft prompt, a picture's features) is none, and has
    the number 0.
    """
    table = table.full_tensor() if hasattr(table, "full_tensor") else table  # FSDP2 shards it
    shape = embeds.shape[:-1]
    if embeds.is_meta or embeds.dtype != table.dtype or embeds.shape[-1] != table.shape[1]:
        nothing = torch.zeros(shape, dtype=torch.int64, device=embeds.device)
        return nothing, nothing.bool()
    asked = embeds.detach().reshape(-1, table.shape[1]).to(table.device)  # [N, D]
    codes, order = _codes(table).sort()
    mine = _codes(asked)
    place = torch.searchsorted(codes, mine).clamp_max(len(codes) - 1)
    found = order[place]  # [N]
    same = (_bits(table[found]) == _bits(asked)).all(1)
    twice = (place + 1 < len(codes)) & (codes[(place + 1).clamp_max(len(codes) - 1)] == mine)
    known = same & ~twice
    ids = torch.where(known, found, 0)
    return ids.reshape(shape).to(embeds.device), known.reshape(shape).to(embeds.device)


def _bits(rows: Tensor) -> Tensor:
    """[N, D] numbers as the integers that have the same bits."""
    return rows.detach().contiguous().view(_BITS[rows.element_size()])


def _codes(rows: Tensor) -> Tensor:
    """A number for each row, [N] int64, equal for equal rows (integers are summed exactly)."""
    generator = torch.Generator().manual_seed(0)
    limit = 2**62
    weights = torch.randint(-limit, limit, (rows.shape[1],), generator=generator).to(rows.device)
    parts = [(_bits(part) * weights).sum(1) for part in rows.split(_ROWS)]
    return torch.cat(parts) if parts else weights[:0]
