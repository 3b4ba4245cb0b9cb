"""Self-modifying Titans token by token, as Eq. 83-88 read: the reference for the fast scan.

One sequence and head is one item of the batch `b`; `rule` has the rest of the legend. `step` is the
model: everything is taken at the weights `at`, which are the current ones in Eq. 83-88 and those at
the start of each memory's chunk in Eq. 90.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from nestling.norm import unit
from nestling.scan.self_modifying.rule import Inputs, SelfRule, Weights, clip, with_initial

__all__ = [
    "answer",
    "errors",
    "gates",
    "learn",
    "project",
    "recall",
    "self_modifying_naive",
    "step",
]


def answer(weights: Weights, slot: int, x: Tensor) -> Tensor:
    """Ask memory number `slot` about `x` [b, d]: `W x`, or `x + W1 silu(W2 x)` (Eq. 89, 91).

    Reads are answers to q: Eq. 78, 80.
    """
    z = torch.einsum("bij,bj->bi", weights.first[:, slot], x)
    if weights.second is None:
        return z
    return x + torch.einsum("bij,bj->bi", weights.second[:, slot], silu(z))


def recall(weights: Weights, slot: int, x: Tensor, initial: Weights | None = None) -> Tensor:
    """Read memory number `slot`: its answer (Eq. 83). Where the weights are
    differences from `initial` without its skip path, which is the initial matrix, or the x of a
    2-layer memory (deviation 22)."""
    if initial is None or weights.second is None:
        return answer(weights, slot, x)
    return answer(with_initial(weights, initial), slot, x) - x


def project(rule: SelfRule, at: Weights, name: str, token: Inputs) -> Tensor:
    """k, v or q of one token: `M_name(x)` normalised (Eq. 79, 83, 86), or static (Eq. 76), or the
    sum of both (deviation 22)."""
    slot = rule.slot(name)
    static: Tensor | None = getattr(token, name)
    if slot is not None:
        own = answer(at, slot, token.x)
        return unit(own if static is None else static + own)
    if static is None:
        raise ValueError(f"{name} is no memory of this rule, so Inputs.{name} must be given")
    return static


def gates(rule: SelfRule, at: Weights, token: Inputs) -> tuple[Tensor, Tensor]:
    """Rate and retention [b] of one token: `M_eta(x)`, `M_alpha(x)` (Eq. 79, 83, 86), or x itself
    (Eq. 76), read out and bounded (deviation 7)."""
    raw = []
    for i, name in enumerate(("eta", "alpha")):
        slot = rule.slot(name)
        seen = token.x if slot is None else answer(at, slot, token.x)
        raw.append((token.readout[:, i] * seen).sum(-1) + token.bias[:, i])
        if token.gates is not None:
            raw[i] = raw[i] + token.gates[:, i]
    return rule.rate_and_retain(torch.stack(raw, -1), token.valid)


def errors(
    rule: SelfRule,
    at: Weights,
    slot: int,
    k: Tensor,
    v: Tensor,
    initial: Weights | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Input and clipped error signal of every layer of one memory, for the pair `k -> vhat`.

    `vhat = M(v)` is the memory's own (Eq. 84, 87), or `v` for all (Eq. 81). The error is minus the
    gradient of the objective (Eq. 85) at the layer's output: dot `-<M(k), vhat>` (Eq. 92), or l2
    `|M(k) - vhat|^2 / 2` (Eq. 93); one pair for a matrix, two for a 2-layer memory (deviation 6).
    """
    target = unit(answer(with_initial(at, initial), slot, v)) if rule.own_values else v
    error = target - recall(at, slot, k, initial) if rule.squared else target
    error = clip(error, rule.clip)
    at = with_initial(at, initial)
    if at.second is None:
        return [(k, error)]
    z = torch.einsum("bij,bj->bi", at.first[:, slot], k)
    s = torch.sigmoid(z)
    inner = torch.einsum("bij,bi->bj", at.second[:, slot], error) * (s * (1 + z * (1 - s)))
    return [(k, clip(inner, rule.clip)), (clip(silu(z), 1.0), error)]


def learn(
    rule: SelfRule,
    weight: Tensor,
    moved: Tensor | None,
    pair: tuple[Tensor, Tensor],
    rate: Tensor,
    retain: Tensor,
    token: Inputs,
) -> tuple[Tensor, Tensor | None]:
    """One layer's update, `W <- W (alpha I - eta x x^T) + eta u x^T` (Eq. 88), or without the
    `x x^T` term (`erase=False`: Eq. 77, 82).

    With momentum the write goes through `Z <- theta Z + eta u x^T` (deviation 18).
    """
    x, u = pair  # [b, j], [b, i]
    eta, alpha = rate[:, None, None], retain[:, None, None]
    write = eta * u[:, :, None] * x[:, None, :]
    if moved is not None and token.theta is not None:
        going = token.theta[:, None, None] * moved + write
        real = torch.ones_like(rate, dtype=torch.bool) if token.valid is None else token.valid
        moved = torch.where(real[:, None, None], going, moved)
        write = real[:, None, None] * moved
    kept = alpha * weight
    if rule.erase:
        if token.erase is not None:
            eta = eta * token.erase[:, None, None]
        kept = kept - eta * torch.einsum("bij,bj->bi", weight, x)[:, :, None] * x[:, None, :]
    return kept + write, moved


def step(rule: SelfRule, weights: Weights, at: Weights, token: Inputs) -> tuple[Tensor, Weights]:
    """One token (Eq. 83-88, or 90 when `at` is the start of the chunk): its read, and the weights
    after it. With `adaptive=()` it is Eq. 76-78, with shared values Eq. 79-82."""
    memories = with_initial(at, token.initial)
    k, v, q = (project(rule, memories, name, token) for name in ("k", "v", "q"))
    y = recall(at if rule.read_start else weights, 0, q, token.initial)
    rate, retain = gates(rule, memories, token)
    layers = [part for part in (weights.first, weights.second) if part is not None]
    new: list[list[Tensor]] = [[] for _ in layers]
    new_moved: list[list[Tensor]] = [[] for _ in layers]
    for slot in range(len(rule.names)):
        for i, pair in enumerate(errors(rule, at, slot, k, v, token.initial)):
            moved = None if weights.moved is None else weights.moved[i][:, slot]
            weight, moved = learn(rule, layers[i][:, slot], moved, pair, rate, retain, token)
            new[i].append(weight)
            if moved is not None:
                new_moved[i].append(moved)
    stacked = [torch.stack(part, 1) for part in new]
    moving = tuple(torch.stack(part, 1) for part in new_moved if part) or None
    return y, Weights(stacked[0], stacked[1] if len(stacked) > 1 else None, moving)


def self_modifying_naive(
    rule: SelfRule, inputs: Inputs, weights: Weights, start: Weights, position: Tensor
) -> tuple[Tensor, Weights, Weights]:
    """All tokens in turn: reads [b, T, d], the running weights, and those where the chunk starts.

    `position` [b] counts the tokens each item has seen; a memory's chunk starts when it is a
    multiple of the chunk. With chunks of 1 this is Eq. 83-88 to the letter, otherwise Eq. 90.
    """
    reads = []
    for t in range(inputs.x.shape[1]):
        token = inputs.at(t)
        start = rule.begin(weights, start, position)
        y, weights = step(rule, weights, start, token)
        reads.append(y)
        position = position + (1 if token.valid is None else token.valid.long())
    return torch.stack(reads, 1), weights, rule.begin(weights, start, position)
