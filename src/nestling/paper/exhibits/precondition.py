"""Preconditioning as a memory (Eq. 38-41), and momentum with preconditioned values (Eq. 46-47).

`W - eta P^-1(g)` asks for a P that maps steps to the gradients they cause: a memory with keys ghat
and values g. On a quadratic loss with curvature C, a step s changes the gradient by C s, so the
memory that has learned these pairs is P = C and the step is Newton's. P is trained online like any
other memory.

P [..., Do, Do] acts on the columns of a weight [..., Do, Di]; its pairs are those columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nestling.checks import require
from nestling.objectives import Matrix, Objective, l2
from nestling.rules.core import Gates, Rule, State, Write, chain
from nestling.rules.momentum import accumulate, momentum


def preconditioned_gd(weight: Tensor, grad: Tensor, memory: Tensor, rate: float) -> Tensor:
    """`W - eta P^-1(g)` for a linear P (Eq. 38, 40)."""
    return weight - rate * torch.linalg.solve(memory, grad)


def precondition_loss(
    memory: Tensor, keys: Tensor, grads: Tensor, objective: Objective = l2
) -> Tensor:
    """`L~(P(ghat); g)`, summed over the columns of keys and gradients [..., Do, n] (Eq. 39)."""
    return objective.loss(Matrix(memory), keys.mT, grads.mT).sum(-1)


def learn_preconditioner(
    memory: Tensor, keys: Tensor, grads: Tensor, *, rate: float | Tensor, objective: Objective = l2
) -> Tensor:
    """`P - eta_P grad L~(P(ghat); g)`: the preconditioner's own gradient descent (Eq. 41)."""
    (slope,) = objective.gradient(Matrix(memory), keys.mT, grads.mT)
    return memory - rate * slope


class PreconditionState(NamedTuple):
    """The learned map from steps to gradients, and where the last pair started."""

    memory: Tensor  # [..., Do, Do]
    weight: Tensor
    grad: Tensor


def precondition(
    *, rate: float = 0.5, start: float = 1.0, floor: float = 1e-3, objective: Objective = l2
) -> Rule:
    """Gradient descent preconditioned by a memory that learns steps -> gradients (Eq. 38-41).

    Each step s of the weight and the change of the gradient it caused is one pair. `rate` is the
    memory's own, relative to the key's size: in (0, 2) it is stable. P starts as `start` times the
    identity; it is kept symmetric, and for the inverse its eigenvalues are taken by size and kept
    above `floor`, so that a step always descends. A weight of one dimension is one row.
    """
    require(0.0 < rate < 2.0, "precondition: rate", rate, "in (0, 2)")
    require(start > 0.0, "precondition: start", start, "positive")
    require(floor > 0.0, "precondition: floor", floor, "positive")

    def init(weight: Tensor) -> PreconditionState:
        rows = weight.shape[-2] if weight.ndim > 1 else 1
        eye = torch.eye(rows, dtype=weight.dtype, device=weight.device)
        memory = (start * eye).expand(*weight.shape[:-2], rows, rows).clone()
        return PreconditionState(memory, weight.clone(), torch.zeros_like(weight))

    def step(write: Write, state: State, weight: Tensor, gates: Gates) -> tuple[Write, State]:
        memory, grad = state.memory, _rows(write.grad)
        if gates.step > 1:
            keys, values = _rows(weight - state.weight), grad - _rows(state.grad)
            size = torch.linalg.matrix_norm(keys, ord=2, keepdim=True).square()
            memory = learn_preconditioner(
                memory, keys, values, rate=rate / size.clamp(min=1e-30), objective=objective
            )
            memory = 0.5 * (memory + memory.mT)
        values, vectors = torch.linalg.eigh(memory)
        curvature = values.abs().clamp(min=floor).unsqueeze(-1)
        direction = vectors @ ((vectors.mT @ grad) / curvature)
        after = PreconditionState(memory, weight.clone(), write.grad.clone())
        return write._replace(grad=direction.reshape(weight.shape)), after

    return Rule(init, step)


def _rows(x: Tensor) -> Tensor:
    return x if x.ndim > 1 else x.reshape(1, -1)


def preconditioned_momentum_step(
    weight: Tensor, memory: Tensor, grad: Tensor, value: Tensor, *, retain: float, rate: float
) -> tuple[Tensor, Tensor]:
    """`m = alpha m - eta P g`, then `W + m` (Eq. 46-47): weight and memory.

    The memory maps gradients to values P instead of to 1: a matrix [..., Do, Do].
    """
    memory = accumulate(memory, value @ grad, retain=retain, rate=-rate)
    return weight + memory, memory


def preconditioned_momentum(preconditioner: Rule, decay: float = 0.9) -> Rule:
    """Momentum of preconditioned gradients (Eq. 46-47), by any preconditioner."""
    return chain(preconditioner, momentum(decay))
