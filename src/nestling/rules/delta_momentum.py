"""Delta momentum: momentum as a memory that learns by the delta rule (Eq. 48-49).

Plain momentum stores gradients by a dot product and can only add. With the L2 objective
`|m g^T - P|^2` (Eq. 48) the memory first takes out what it already answers for this gradient, then
writes: `m <- m (alpha I - g^T g) - eta P g` (Eq. 49). The keys are the rows of g; m maps them to P.

As printed the erase term has no rate: with |g|^2 > 1 + alpha it diverges (deviation 16). That is
`delta_momentum_literal`. `delta_momentum` takes the gradient's direction `ghat = g / |g|` as key,
`|g| P` as value (so a write is still along `P g`), and solves for the memory exactly:

    m <- argmin |m ghat^T - |g| P|^2 / 2 + |m - alpha m_t|^2 / (2 eta)

which is DGD on the memory, for all rows of g together: the erase strength is at most one. For a
single row and P = 1 it is `m <- alpha m + eta' (|g| - alpha m . ghat) ghat`, eta' = eta/(1 + eta):
along the gradient the memory moves to it, across it the past fades with alpha.

Vectors have no rows to relate; they take the element-wise memory of Eq. 100-102, `m . ghat -> P`
with `ghat = g / rms(g)`, again with the exact rate per entry.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nestling.checks import require
from nestling.rules.core import Gates, Rule, State, Write, factory
from nestling.rules.dgd import dgd_direction
from nestling.rules.size import TINY, rms


class DeltaMomentumState(NamedTuple):
    """The memory of past gradients, of the weight's shape."""

    memory: Tensor


@factory
def delta_momentum_literal(*, decay: float = 0.9, value: Tensor | float = 1.0) -> Rule:
    """Eq. 49 as printed, `m (alpha I - g^T g) + P g` with the rate applied at the step.

    Diverges once |g|^2 > 1 + alpha. `value` is P: a number or a matrix [Do, Do].
    """

    def step(write: Write, state: State, weight: Tensor, gates: Gates) -> tuple[Write, State]:
        grad = write.grad if write.grad.ndim > 1 else write.grad.reshape(1, -1)  # [..., Do, Di]
        old = state.memory.reshape(grad.shape)
        memory = decay * old - (old @ grad.mT) @ grad + _times(value, grad)
        memory = memory.reshape(write.grad.shape)
        return write._replace(grad=memory), DeltaMomentumState(memory)

    return Rule(_init, step)


@factory
def delta_momentum(
    *,
    decay: float = 0.9,
    rate: float = 0.2,
    value: Tensor | float = 1.0,
    elementwise: bool | None = None,
) -> Rule:
    """Delta momentum with normalised keys and the exact rate (Eq. 48-49; deviation 16).

    `decay` is alpha, `rate` the memory's own eta, `value` P: a number or a matrix [Do, Do].
    `elementwise` chooses the form for vectors; by default any weight of fewer than two dimensions
    takes it.
    """
    require(0.0 <= decay <= 1.0, "delta_momentum: decay", decay, "in [0, 1]")
    require(rate > 0.0, "delta_momentum: rate", rate, "positive")

    def step(write: Write, state: State, weight: Tensor, gates: Gates) -> tuple[Write, State]:
        grad, old = write.grad, decay * state.memory
        single = grad.ndim < 2 if elementwise is None else elementwise
        recall = _recall_entries if single else _recall_rows
        memory = old - rate * recall(old, grad, value, rate)
        return write._replace(grad=memory), DeltaMomentumState(memory)

    return Rule(_init, step)


def _recall_rows(memory: Tensor, grad: Tensor, value: Tensor | float, rate: float) -> Tensor:
    """The exact step of the memory, with the rows of the gradient as keys (Eq. 48)."""
    size = torch.linalg.vector_norm(grad, dim=(-2, -1), keepdim=True)
    keys = grad / size.clamp(min=TINY)  # [..., Do, Di]
    eye = torch.eye(grad.shape[-2], dtype=grad.dtype, device=grad.device)
    values = size * _times(value, eye).mT  # [..., Do, Do], row i is the value of key i
    return dgd_direction(memory, keys, values, rate)


def _recall_entries(memory: Tensor, grad: Tensor, value: Tensor | float, rate: float) -> Tensor:
    """The exact step with every entry its own key: `|m . ghat - P|^2` (Eq. 101)."""
    size = rms(grad, dims=1)
    keys = grad / size
    return (memory * keys - size * value) * keys / (1.0 + rate * keys.square())


def _times(value: Tensor | float, matrix: Tensor) -> Tensor:
    return value @ matrix if isinstance(value, Tensor) and value.ndim >= 2 else value * matrix


def _init(weight: Tensor) -> DeltaMomentumState:
    return DeltaMomentumState(torch.zeros_like(weight))
