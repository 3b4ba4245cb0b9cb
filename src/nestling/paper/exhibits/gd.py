"""Gradient descent in its three forms, and the training of one linear layer (Eq. 1-3, 6-9).

A step is also the answer to a small problem: stay close, and make the linearised loss small.
Written like that, a weight is a memory of what it was trained on. `argmin` solves such problems
numerically, so that equations with an argmin run as they stand, beside their closed forms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from nestling.objectives import Architecture, Matrix, Objective
from nestling.rules.core import Gates, Rule, State, Write, pairs


def gd(weight: Tensor, grad: Tensor, rate: float | Tensor) -> Tensor:
    """`W - eta g` (Eq. 1)."""
    return weight - rate * grad


def gd_proximal(weight: Tensor, grad: Tensor, rate: float) -> Tensor:
    """`argmin <g, W> + |W - W_t|^2 / (2 eta)` (Eq. 2), solved."""
    return argmin(lambda w: (grad * w).sum() + proximity(w, weight, rate), weight)


def gd_leader(start: Tensor, grads: Iterable[Tensor], rate: float) -> Tensor:
    """`argmin sum_s <g_s, W> + |W - W_1|^2 / (2 eta)` (Eq. 3), solved: the leader is followed."""
    total = torch.stack(list(grads)).sum(0)
    return argmin(lambda w: (total * w).sum() + proximity(w, start, rate), start)


def proximity(weight: Tensor, near: Tensor, rate: float) -> Tensor:
    """`|W - W_t|^2 / (2 eta)`: the price of moving."""
    return (weight - near).square().sum() / (2.0 * rate)


def argmin(loss: Callable[[Tensor], Tensor], start: Tensor, *, steps: int = 1) -> Tensor:
    """Where a smooth convex loss is smallest, by Newton's method; quadratic losses take one step.

    Exact and expensive (it forms the Hessian): for checking closed forms on small problems.
    """
    best = start.detach()
    for _ in range(steps):
        slope = torch.autograd.functional.jacobian(loss, best).reshape(-1)
        curvature = torch.autograd.functional.hessian(loss, best)
        curvature = curvature.reshape(best.numel(), best.numel())
        best = best - torch.linalg.solve(curvature, slope).reshape(best.shape)
    return best


def layer_gd(weight: Tensor, x: Tensor, surprise: Tensor, rate: float | Tensor) -> Tensor:
    """`W - eta grad_y L (x) x`: a linear layer's step from input and surprise alone (Eq. 8).

    x [..., N, Di] and surprise [..., N, Do] may hold several pairs, which are summed.
    """
    return gd(weight, surprise.mT @ x, rate)


def layer_proximal(weight: Tensor, x: Tensor, surprise: Tensor, rate: float) -> Tensor:
    """`argmin <W x, grad_y L> + |W - W_t|^2 / (2 eta)` (Eq. 9), solved.

    The layer is a memory that is asked to answer each input with the opposite of its surprise.
    """
    return argmin(lambda w: (x @ w.mT * surprise).sum() + proximity(w, weight, rate), weight)


def train_layer(
    weight: Tensor,
    data: Iterable[tuple[Tensor, Tensor]],
    surprise: Callable[[Tensor, Tensor], Tensor],
    rate: float,
) -> Tensor:
    """`W* = argmin_W L(W; data)` by a step per batch of inputs and targets (Eq. 7).

    `surprise(y, target)` is the loss's gradient by the layer's output `y = W x`.
    """
    for x, target in data:
        weight = layer_gd(weight, x, surprise(x @ weight.mT, target), rate)
    return weight


def associate(
    objective: Objective,
    memory: Architecture,
    key: Tensor,
    value: Tensor,
    *,
    rate: float,
    steps: int,
) -> Architecture:
    """`M* = argmin_M L~(M(K); V)` by gradient descent (Eq. 6): a memory of these pairs."""
    for _ in range(steps):
        grads = objective.gradient(memory, key, value)
        memory = memory.replace(
            tuple(gd(w, g, rate) for w, g in zip(memory.weights, grads, strict=True))
        )
    return memory


def descent(objective: Objective) -> Rule:
    """A matrix memory that descends an objective of the write's pairs: keys `x`, values `u`.

    With `dot` it is linear attention and (with retention) every Hebbian memory, with `l2` DeltaNet,
    with `oja` OjaNet (Eq. 18, 64-65, 67). The write's own gradient is not used.
    """

    def step(write: Write, state: State, weight: Tensor, gates: Gates) -> tuple[Write, State]:
        x, u = pairs(write, "descent")
        (grad,) = objective.gradient(Matrix(weight), x, u)
        return write._replace(grad=grad), state

    return Rule(lambda weight: (), step, needs_pairs=True)
