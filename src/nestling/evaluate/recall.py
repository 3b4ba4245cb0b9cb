"""Multi-query associative recall (MQAR): bind many keys to values, then answer for every key.

A sequence is `k1 v1 k2 v2 ... kP vP` with distinct keys, then each key once more in random order;
the target at such a query is its value. Keys are the first half of the vocabulary, values the
second, both drawn anew for every sequence, so nothing but the context can tell the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["IGNORE", "Recall", "accuracy", "mqar"]

IGNORE = -100


@dataclass(frozen=True, kw_only=True)
class Recall:
    """Sequences and their targets; -100 where nothing is asked."""

    tokens: Tensor  # [N, 3P] long
    targets: Tensor  # [N, 3P] long


def mqar(count: int, *, pairs: int, vocabulary: int, seed: int) -> Recall:
    """`count` sequences of `pairs` bindings and as many questions."""
    half = vocabulary // 2
    if not 1 <= pairs <= half:
        raise ValueError(
            f"pairs must be between 1 and {half}, half of vocabulary={vocabulary}; got {pairs}"
        )
    random = torch.Generator().manual_seed(seed)
    keys = torch.rand(count, half, generator=random).argsort(1)[:, :pairs]  # [N, P]
    values = torch.randint(half, 2 * half, (count, pairs), generator=random)
    order = torch.rand(count, pairs, generator=random).argsort(1)
    bindings = torch.stack([keys, values], dim=2).flatten(1)  # [N, 2P]
    tokens = torch.cat([bindings, keys.gather(1, order)], dim=1)
    silent = torch.full((count, 2 * pairs), IGNORE)
    return Recall(tokens=tokens, targets=torch.cat([silent, values.gather(1, order)], dim=1))


def accuracy(predictions: Tensor, targets: Tensor) -> float:
    """Share of questions answered rightly."""
    asked = targets != IGNORE
    return (predictions[asked] == targets[asked]).double().mean().item()
