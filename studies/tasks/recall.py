"""Multi-query associative recall (MQAR): bind many keys to values, then answer for every key.

A sequence is `k1 v1 k2 v2 ... kP vP` with distinct keys, then each key once more in random order;
the target at such a query is its value. Keys are the first half of the vocabulary, values the
second, both drawn anew for every sequence, so nothing but the context can tell the answer.

With a `length` the queries are scattered over the rest of the sequence, at even places, among
tokens drawn from the whole vocabulary (as in Zoology's generator, Arora et al. 2023, unless told
otherwise; its places crowd towards the front, these are uniform). Noise looks like keys and values,
and some of it like new bindings: only what stands in front counts.
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

    tokens: Tensor  # [N, T] long
    targets: Tensor  # [N, T] long


def mqar(
    count: int, *, pairs: int, vocabulary: int, seed: int, length: int | None = None
) -> Recall:
    """`count` sequences of `pairs` bindings and as many questions: 3 * pairs tokens, or `length`
    tokens with noise between the questions."""
    half = vocabulary // 2
    if not 1 <= pairs <= half:
        raise ValueError(
            f"pairs must be between 1 and {half}, half of vocabulary={vocabulary}; got {pairs}"
        )
    if length is not None and (length < 4 * pairs or length % 2):
        raise ValueError(
            f"length must be even and at least {4 * pairs}, four times pairs={pairs}; got {length}"
        )
    random = torch.Generator().manual_seed(seed)
    keys = torch.rand(count, half, generator=random).argsort(1)[:, :pairs]  # [N, P]
    values = torch.randint(half, 2 * half, (count, pairs), generator=random)
    bindings = torch.stack([keys, values], dim=2).flatten(1)  # [N, 2P]
    rest = pairs if length is None else length - 2 * pairs
    places = pairs if length is None else rest // 2
    where = torch.rand(count, places, generator=random).argsort(1)[:, :pairs]  # of each key
    if length is None:
        asked, wanted = keys.gather(1, where), values.gather(1, where)
    else:
        noise = torch.randint(2 * half, (count, rest), generator=random)
        asked = noise.scatter(1, 2 * where, keys)
        wanted = torch.full_like(noise, IGNORE).scatter(1, 2 * where, values)
    silent = torch.full((count, 2 * pairs), IGNORE)
    return Recall(
        tokens=torch.cat([bindings, asked], dim=1), targets=torch.cat([silent, wanted], dim=1)
    )


def accuracy(predictions: Tensor, targets: Tensor) -> float:
    """Share of questions answered rightly."""
    asked = targets != IGNORE
    return (predictions[asked] == targets[asked]).double().mean().item()
