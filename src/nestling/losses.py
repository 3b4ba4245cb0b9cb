"""The loss of tokens: of given pairs, of a piece of a stream, and of a text read in windows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

IGNORE = -100  # a target that nothing has to predict; its loss is 0


def pair_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of every target, in float32 at least: [..., V], [...] -> [...]."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    flat = functional.cross_entropy(
        exact.reshape(-1, exact.shape[-1]),
        targets.reshape(-1),
        ignore_index=IGNORE,
        reduction="none",
    )
    return flat.view(targets.shape)


def first_loss(ids: Tensor, last: Tensor | None, like: Tensor | None = None) -> Tensor:
    """The loss of a piece's first token under the logits before it, [B, T], [B, V] -> [B, 1].

    It is nan where there are none (`last=None`), in the precision losses under `like` would have.
    """
    if last is not None:
        return pair_losses(last.unsqueeze(1), ids[:, :1])
    dtype = torch.float32 if like is None else torch.promote_types(like.dtype, torch.float32)
    return torch.full(ids[:, :1].shape, torch.nan, dtype=dtype, device=ids.device)


def stream_losses(logits: Tensor, ids: Tensor, last: Tensor | None = None) -> Tensor:
    """Each token's loss under the logits of the token before it: [B, T, V], [B, T] -> [B, T].

    `last` are the logits before the piece, [B, V]; without them the first loss is nan.
    """
    first = first_loss(ids, last, logits)
    return torch.cat([first, pair_losses(logits[:, :-1], ids[:, 1:])], dim=1)


def windowed_losses(forward: Callable[[Tensor], Tensor], ids: Tensor, context: int) -> Tensor:
    """The losses of a text's tokens after the first, read in windows: [T] -> [T - 1].

    `forward` takes [1, n] tokens to [1, n, V] logits; a window holds at most `context` tokens, and
    each after the first starts half a window back.
    """
    if context < 2:
        raise ValueError(f"a window needs at least 2 tokens; got {context}")
    losses: list[Tensor] = []
    done = 1
    while done < len(ids):
        start = max(0, done - context // 2)
        window = ids[start : start + context]
        losses.append(pair_losses(forward(window[None])[0, :-1], window[1:])[done - start - 1 :])
        done = start + len(window)
    return torch.cat(losses) if losses else torch.zeros(0, device=ids.device)
