"""Sequence models as memories, in their plainest form (Eq. 5, 14-18, 61-65, 67-69).

A sequence model is a memory written and read token by token: which rule writes is the model. These
are short references; `nestling.scan` runs the same recurrences fast, `nestling.memories` as layers.
The Omega rule (Eq. 68) learns not from the last pair alone, but from a window of past pairs.
Shapes: T tokens of width D; keys and queries [..., T, Di], values [..., T, Do].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nestling.checks import require
from nestling.objectives import Matrix, Objective, dot, l2, oja
from nestling.paper.exhibits.gd import argmin, descent, proximity
from nestling.rules.core import Gates, Rule, State, Write, apply, pairs


class Context(NamedTuple):
    """The keys and values a memory learns from, and the queries it is asked."""

    keys: Tensor  # [..., T, Di]
    values: Tensor  # [..., T, Do]
    queries: Tensor  # [..., T, Di]


def project_context(x: Tensor, w_k: Tensor, w_v: Tensor, w_q: Tensor) -> Context:
    """`k = W_k x, v = W_v x, q = W_q x`: the context flow of a memory (Eq. 14, 61)."""
    return Context(x @ w_k.mT, x @ w_v.mT, x @ w_q.mT)


def write_and_read(
    rule: Rule,
    memory: Tensor,
    context: Context,
    *,
    rate: float | Tensor = 1.0,
    retain: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor]:
    """Write each pair by the rule, then read `y_t = M_t q_t` (Eq. 15-16): reads and last memory.

    `rate` and `retain` are numbers, or tensors [T].
    """
    reads, state = [], rule.init(memory)
    for t in range(context.keys.shape[-2]):
        k, v = context.keys[..., t : t + 1, :], context.values[..., t : t + 1, :]
        gates = Gates(
            rate[t] if isinstance(rate, Tensor) else rate,
            retain[t] if isinstance(retain, Tensor) else retain,
            t + 1,
        )
        memory, state = apply(rule, memory, Write(-v.mT @ k, k, v), state, gates)
        reads.append(context.queries[..., t : t + 1, :] @ memory.mT)
    return torch.cat(reads, dim=-2) if reads else context.values, memory


hebbian = descent(dot)
"""Linear attention; with retention RetNet, RWKV, lightning attention."""

delta_net = descent(l2)
"""DeltaNet: what the memory answers is taken out before the value is written."""

oja_net = descent(oja)
"""OjaNet: the memory forgets along the value instead of along the key."""


def linear_attention_proximal(memory: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`argmin -<M k, v> + |M - M_t|^2 / 2` (Eq. 17), solved; k [Di], v [Do]."""
    return argmin(lambda m: dot.measure(m @ k, v) + proximity(m, memory, 1.0), memory)


def fast_weights(
    memory: Tensor,
    context: Context,
    feature: Callable[[Tensor], Tensor],
    *,
    retain: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor]:
    """`M_t = alpha_t M_{t-1} + v_t phi(k_t)^T`, read `M_t phi(q_t)` (Eq. 5): reads, last memory."""
    mapped = Context(feature(context.keys), context.values, feature(context.queries))
    return write_and_read(hebbian, memory, mapped, retain=retain)


def kernel_loss(answer: Tensor, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """`sum_i exp(q . k_i / sqrt(d)) |v_i - m|^2`: what attention's answer minimises (Eq. 62)."""
    similarity = torch.exp(keys @ query / math.sqrt(query.shape[-1]))  # [T]
    return (similarity * (values - answer).square().sum(-1)).sum()


def softmax_attention(context: Context, *, window: int | None = None) -> Tensor:
    """Causal softmax attention, the Nadaraya-Watson answer of a memory that keeps its pairs.

    It needs no training and forgets nothing (Eq. 62), or all but the last `window` pairs (Eq. 63).
    """
    keys, values, queries = context
    allowed = window is None or window >= 1
    require(allowed, "softmax_attention: window", window, "at least 1, or None for all")
    time = torch.arange(keys.shape[-2], device=keys.device)
    age = time.unsqueeze(-1) - time  # [T, T]
    visible = age >= 0 if window is None else (age >= 0) & (age < window)
    scores = queries @ keys.mT / math.sqrt(keys.shape[-1])
    scores = scores.masked_fill(~visible, -math.inf)
    return torch.softmax(scores, dim=-1) @ values


def adatransformer(
    context: Context, project_again: Callable[[Tensor], Context], memory: Tensor
) -> Tensor:
    """AdaTransformer block: attention, then a linear memory written in context (Eq. 69).

    The Transformer's MLP weight is moved one level up: it starts at a trained `memory` and takes
    `M_t = M_{t-1} + v_t k_t^T` from the keys and values of the attention's outputs.
    """
    reads, _ = write_and_read(hebbian, memory, project_again(softmax_attention(context)))
    return reads


class WindowState(NamedTuple):
    """The last pairs, oldest first; zeros, which teach nothing, before the first."""

    keys: Tensor  # [..., c, Di]
    values: Tensor  # [..., c, Do]


def omega_step(
    weight: Tensor,
    window: WindowState,
    objective: Objective = l2,
    *,
    rate: float | Tensor,
    retain: float | Tensor = 1.0,
) -> Tensor:
    """`alpha M - eta sum_{i in window} grad L(M; k_i, v_i)`, all at the same M (Eq. 68)."""
    (grad,) = objective.gradient(Matrix(weight), window.keys, window.values)
    return retain * weight - rate * grad


def omega(objective: Objective = l2, *, window: int = 4) -> Rule:
    """Descend an objective summed over the last `window` pairs of the writes (Eq. 68).

    `window=1` is `descent(objective)`, with `l2` DeltaNet. Keys are the write's `x`, values `u`.
    """
    require(window >= 1, "omega: window", window, "at least 1")

    def init(weight: Tensor) -> WindowState:
        *batch, rows, columns = weight.shape
        return WindowState(
            weight.new_zeros(*batch, window, columns), weight.new_zeros(*batch, window, rows)
        )

    def step(write: Write, state: State, weight: Tensor, gates: Gates) -> tuple[Write, State]:
        x, u = pairs(write, "omega")
        keys = torch.cat([state.keys, x], dim=-2)[..., -window:, :]
        values = torch.cat([state.values, u], dim=-2)[..., -window:, :]
        (grad,) = objective.gradient(Matrix(weight), keys, values)
        return write._replace(grad=grad), WindowState(keys, values)

    return Rule(init, step, needs_pairs=True)
