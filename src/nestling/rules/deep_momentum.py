"""Deep momentum: the memory of past gradients is a small MLP (Eq. 50).

The paper writes `W + m(u)` with `u = g`, the memory trained by `|m(u) - P u|^2`, P = 1, and leaves
open how an MLP acts on a gradient of any shape (deviation 17). Here it acts on rows. Per matrix
[Do, Di] one two-layer memory of width `hidden`

    m(x) = A sigma(B x),     B [hidden, Di], A [Di, hidden]

learns in context to answer each row's direction `x = g_i / |g_i|` with itself: an autoencoder of
gradients. What it has seen often it reproduces; what is new, such as noise, it does not. It starts
with `A = B^T`, B orthonormal, and takes one gradient step of the inner objective (mean over rows) a
step of the optimizer, with retention alpha. The weight then steps along

    |g_i| (x + gain clip(m(x)))                             clip: to norm at most one

Since the second term is shorter than the first for gain < 1, the step always points down the
gradient: <step, g> >= (1 - gain) |g|^2.

State: `2 hidden Di` numbers per matrix, where momentum needs `Do Di`: smaller for Do > 2 hidden. A
vector is one row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nestling.checks import require
from nestling.rules.core import Gates, Rule, State, Write, factory
from nestling.rules.size import TINY


class DeepMomentumState(NamedTuple):
    """The memory's two layers, shared by the rows of one matrix."""

    inner: Tensor  # B [..., H, Di]
    outer: Tensor  # A [..., Di, H]


@factory
def deep_momentum(
    *, hidden: int = 16, decay: float = 0.99, rate: float = 0.5, gain: float = 0.9
) -> Rule:
    """Momentum with a two-layer memory, trained at each step (Eq. 50; deviation 17).

    `decay` is the memory's alpha, `rate` its eta, `gain` how far its answer may bend the step.
    """
    require(hidden >= 1, "deep_momentum: hidden", hidden, "at least 1")
    require(0.0 <= gain < 1.0, "deep_momentum: gain", gain, "in [0, 1) to descend")

    def init(weight: Tensor) -> DeepMomentumState:
        inputs = weight.shape[-1] if weight.ndim else 1
        leading = weight.shape[:-2]
        # A fixed orthonormal start, the same in every process: cosines of rising frequency.
        at = torch.arange(inputs, device=weight.device, dtype=torch.float64) + 0.5
        order = torch.arange(min(hidden, inputs), device=weight.device, dtype=torch.float64)
        basis = torch.cos(torch.pi / inputs * order[:, None] * at)  # [H, Di]
        basis = basis / torch.linalg.vector_norm(basis, dim=-1, keepdim=True).clamp(min=TINY)
        inner = basis.to(weight.dtype).expand(*leading, *basis.shape).clone()
        return DeepMomentumState(inner, inner.mT.clone(memory_format=torch.contiguous_format))

    def step(write: Write, state: State, weight: Tensor, gates: Gates) -> tuple[Write, State]:
        grad = write.grad if write.grad.ndim > 1 else write.grad.reshape(1, -1)  # [..., Do, Di]
        size = torch.linalg.vector_norm(grad, dim=-1, keepdim=True)
        rows = grad / size.clamp(min=TINY)
        state = _learn(state, rows, decay, rate)
        answer = _recall(state, rows)
        length = torch.linalg.vector_norm(answer, dim=-1, keepdim=True)
        out = size * (rows + gain * answer / length.clamp(min=1.0))
        return write._replace(grad=out.reshape(write.grad.shape)), state

    return Rule(init, step)


def deep_momentum_loss(state: DeepMomentumState, rows: Tensor) -> Tensor:
    """The inner objective `|m(x) - x|^2 / 2`, a mean over the rows [..., Do, Di] (Eq. 50)."""
    return (_recall(state, rows) - rows).square().sum(-1).mean(-1) / 2


def _recall(state: DeepMomentumState, rows: Tensor) -> Tensor:
    return torch.nn.functional.silu(rows @ state.inner.mT) @ state.outer.mT


def _learn(state: DeepMomentumState, rows: Tensor, decay: float, rate: float) -> DeepMomentumState:
    """One gradient step of the inner objective, its gradient written out."""
    before = rows @ state.inner.mT  # [..., Do, H]
    gate = torch.sigmoid(before)
    active = before * gate
    error = (active @ state.outer.mT - rows) / rows.shape[-2]  # [..., Do, Di]
    slope = gate * (1.0 + before * (1.0 - gate))
    outer = error.mT @ active
    inner = (error @ state.outer * slope).mT @ rows
    return DeepMomentumState(decay * state.inner - rate * inner, decay * state.outer - rate * outer)
