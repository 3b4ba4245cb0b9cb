"""Momentum as a memory of past gradients, in the paper's forms (Eq. 10-13, 32-37).

The paper keeps the rate inside the memory, `m = alpha m - eta g; W = W + m`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nestling.objectives import Matrix, Objective
from nestling.paper.exhibits.gd import argmin, proximity
from nestling.rules.core import Gates, Rule, State, Write, pairs
from nestling.rules.momentum import MomentumState, accumulate


def momentum_step(
    weight: Tensor, memory: Tensor, grad: Tensor, *, retain: float = 1.0, rate: float
) -> tuple[Tensor, Tensor]:
    """`m = alpha m - eta g`, then `W + m` (Eq. 32-33), with alpha = 1 Eq. 10-11: weight and memory.

    Eq. 10-11 store the opposite sign, `W - m` and `m + eta g`: the same system.
    """
    memory = accumulate(memory, grad, retain=retain, rate=-rate)
    return weight + memory, memory


def momentum_proximal(
    weight: Tensor, memory: Tensor, grad: Tensor, *, rate: float
) -> tuple[Tensor, Tensor]:
    """`m = argmin -<m, g> + |m - m_t|^2 / (2 eta)`, then `W - m` (Eq. 12-13), solved.

    Two levels: the weight follows a memory, which is trained on the gradients.
    """
    memory = argmin(lambda m: -(m * grad).sum() + proximity(m, memory, rate), memory)
    return weight - memory, memory


def momentum_layer_proximal(
    memory: Tensor, x: Tensor, surprise: Tensor, *, retain: float, rate: float
) -> Tensor:
    """`argmin <m x, delta> + |m - alpha m_t|^2 / (2 eta)` (Eq. 34), solved: x -> -delta."""
    near = retain * memory
    return argmin(lambda m: (x @ m.mT * surprise).sum() + proximity(m, near, rate), memory)


def generalised_momentum_step(
    weight: Tensor,
    memory: Tensor,
    x: Tensor,
    u: Tensor,
    objective: Objective,
    *,
    retain: float,
    rate: float,
) -> tuple[Tensor, Tensor]:
    """`m = alpha m - eta grad L~(m; x, u)`, then `W + m` (Eq. 35, 37): weight and memory.

    The memory maps a layer's inputs x to its write targets `u = -delta` under any objective; with
    the dot product this is Eq. 32-33.
    """
    (grad,) = objective.gradient(Matrix(memory), x, u)
    memory = accumulate(memory, grad, retain=retain, rate=-rate)
    return weight + memory, memory


def generalised_momentum_proximal(
    memory: Tensor, x: Tensor, u: Tensor, objective: Objective, *, retain: float, rate: float
) -> Tensor:
    """`argmin L~(m; x, u) + |m - alpha m_t|^2 / (2 eta)` (Eq. 36), solved for convex objectives."""
    near = retain * memory

    def loss(m: Tensor) -> Tensor:
        return objective.loss(Matrix(m), x, u).sum() + proximity(m, near, rate)

    return argmin(loss, memory, steps=8)


def generalised_momentum(objective: Objective, *, decay: float = 0.9, rate: float = 1.0) -> Rule:
    """Momentum that learns a layer's inputs -> write targets by any objective (Eq. 35-37).

    Needs the pairs `x` and `u` of the write. `rate` is the memory's own; for `l2` keep it below
    2 / |x|^2 (or use the exact form, delta momentum).
    """

    def step(write: Write, state: State, weight: Tensor, gates: Gates) -> tuple[Write, State]:
        x, u = pairs(write, "generalised_momentum")
        _, memory = generalised_momentum_step(
            weight, state.memory, x, u, objective, retain=decay, rate=rate
        )
        return write._replace(grad=-memory), MomentumState(memory)

    return Rule(lambda weight: MomentumState(torch.zeros_like(weight)), step, needs_pairs=True)
