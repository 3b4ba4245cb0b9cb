"""Language modelling: the loss of a stream, and how it falls with the position."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nestling.checks import require
from nestling.losses import windowed_losses

__all__ = ["StreamLoss", "loss_by_position", "token_losses"]


class StreamLoss(NamedTuple):
    """The mean loss in nats per token, its perplexity, and (start, stop, loss) per bin."""

    tokens: int
    loss: float
    perplexity: float
    bins: list[tuple[int, int, float]]


@torch.no_grad()
def token_losses(
    model: Any,
    ids: Sequence[int] | Tensor,
    *,
    piece: int = 512,
    window: int | None = None,
    state: Any = None,
) -> Tensor:
    """Each token's loss given all before it, read as one stream: [T - 1].

    A model that offers `stream` (ours) reads piece by piece, its memory carrying on from `state`.
    With `window`, and for any other model, only the last tokens are seen: windows of that length
    (by default the model's context), each after the first starting half a window back.
    """
    tokens = torch.as_tensor(ids, dtype=torch.long).flatten()
    if len(tokens) < 2:
        raise ValueError(f"a stream needs at least 2 tokens; got {len(tokens)}")
    if hasattr(model, "stream") and window is None:
        pieces = [out.losses[0] for out in model.stream(tokens.split(piece), state)]
        return torch.cat(pieces)[1:].float().cpu()
    if state is not None:
        raise ValueError("a model that reads windows has no state to carry on from")
    context = getattr(model.config, "max_position_embeddings", None) or 1024
    tokens = tokens.to(model.device)
    return windowed_losses(lambda ids: model(ids).logits, tokens, window or int(context)).cpu()


def loss_by_position(
    model: Any, ids: Sequence[int] | Tensor, *, bins: int = 8, window: int | None = None
) -> StreamLoss:
    """Read a text as one stream and average its loss over equal bins of positions."""
    require(bins >= 1, "bins", bins, "at least 1")
    losses = token_losses(model, ids, window=window)
    edges = [round(i * len(losses) / bins) for i in range(bins + 1)]
    spans = [(a, b) for a, b in itertools.pairwise(edges) if b > a]
    mean = float(losses.mean())
    return StreamLoss(
        tokens=len(losses) + 1,
        loss=mean,
        perplexity=math.exp(min(mean, 700.0)),
        bins=[(a, b, float(losses[a:b].mean())) for a, b in spans],
    )
