"""Reading a token stream of any length in constant memory.

The state after one piece is the start of the next, so any split gives the same outputs. (Softmax
attention without a window keeps every token, as it must: its state grows.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nestling.losses import stream_losses
from nestling.models.cache import MemoryCache


class StreamOutput(NamedTuple):
    """The result of reading one piece."""

    logits: Tensor  # [B, T, V] for the token after each
    losses: Tensor  # [B, T] each token's loss, given all before it; nan for the very first
    state: MemoryCache  # after the piece; the next piece changes it


def stream(
    model: Any,
    tokens: Iterable[Tensor | Sequence[int] | int],
    state: MemoryCache | None = None,
    *,
    piece: int = 512,
) -> Iterator[StreamOutput]:
    """Feed a stream through the model piece by piece; yields logits and losses of every piece.

    `tokens` gives pieces of tokens ([T] or [B, T], any sizes) or single tokens, which are gathered
    into pieces of `piece`. The first token of a piece is judged by the last logits of the piece
    before; a stream that starts from a saved `state` has none for its first token: its loss is nan.
    """
    if isinstance(tokens, str | bytes):
        raise TypeError(
            f"stream takes tokens, not {type(tokens).__name__}: encode the text first, as in"
            " model.stream(tokenizer(text).input_ids)"
        )
    if piece < 1:
        raise ValueError(f"piece must be at least 1 token; got {piece}")
    return _stream(model, tokens, state, piece)


@torch.no_grad()
def _stream(
    model: Any,
    tokens: Iterable[Tensor | Sequence[int] | int],
    state: MemoryCache | None,
    piece: int,
) -> Iterator[StreamOutput]:
    cache = MemoryCache(len(model.model.layers)) if state is None else state
    last: Tensor | None = None
    for ids in _pieces(tokens, piece, model.device):
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
        losses = stream_losses(logits, ids, last)
        last = logits[:, -1].clone()
        yield StreamOutput(logits, losses, cache)


def _pieces(
    tokens: Iterable[Tensor | Sequence[int] | int], piece: int, device: torch.device
) -> Iterator[Tensor]:
    """[B, T] pieces of a stream; single tokens are gathered."""
    single: list[int] = []
    for item in tokens:
        if isinstance(item, int):
            single.append(item)
            if len(single) == piece:
                yield _as_batch(single, device)
                single = []
        elif single:
            raise TypeError("a stream gives either single tokens or pieces, not both")
        elif (ids := _as_batch(item, device)).shape[1]:
            yield ids
    if single:
        yield _as_batch(single, device)


def _as_batch(item: Tensor | Sequence[int], device: torch.device) -> Tensor:
    ids = torch.as_tensor(item, dtype=torch.long, device=device)
    if ids.dim() == 1:
        ids = ids.unsqueeze(0)
    if ids.dim() != 2:
        raise ValueError(f"a piece must be [T] or [B, T] tokens; got shape {tuple(ids.shape)}")
    return ids
