"""Delta gradient descent on one pair, and the general problem it solves (Eq. 54-60, 112-121).

`nestling.rules.dgd` derives the exact step for any number of rows; here are the forms of the paper.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from nestling.objectives import Matrix, Objective
from nestling.paper.exhibits.gd import argmin


def delta_step(
    weight: Tensor, x: Tensor, u: Tensor, rate: Tensor | float, retain: Tensor | float = 1.0
) -> Tensor:
    """The delta rule on one pair: `W (retain I - rate x x^T) + rate u x^T` (Eq. 57, 119-121).

    weight [..., Do, Di], x [..., Di], u [..., Do]; rate and retain are numbers or [...].
    """
    rate, retain = _column(rate), _column(retain)
    read = (weight @ x[..., None])[..., 0]  # [..., Do]
    write = (u - read)[..., None] * x[..., None, :]  # [..., Do, Di]
    return retain * weight + rate * write


def delta_rate(x: Tensor, rate: Tensor | float) -> Tensor:
    """The exact rate for any norm of x [..., Di]: `eta / (1 + eta |x|^2)` (Eq. 58, 117-118)."""
    return rate / (1.0 + rate * x.square().sum(-1))


def dgd_step(
    weight: Tensor, x: Tensor, u: Tensor, rate: Tensor | float, retain: Tensor | float = 1.0
) -> Tensor:
    """`argmin |W x - u|^2 / 2 + |W - retain W_t|^2 / (2 rate)` for one pair (Eq. 56-58, 113)."""
    return delta_step(_column(retain) * weight, x, u, delta_rate(x, rate))


def generalised_descent(
    weight: Tensor,
    x: Tensor,
    target: Callable[[Tensor, Tensor], Tensor],
    objective: Objective,
    retention: Callable[[Tensor, Tensor], Tensor],
    *,
    steps: int = 1,
) -> Tensor:
    """Generalised gradient descent (Definition 5, Eq. 59-60), solved numerically.

    `argmin_W objective(W; x, u) + retention(W, W_t)` with the self-generated `u = target(W_t, x)`.
    The reference for every closed form: a dot product with `|W - W_t|^2 / (2 eta)` is gradient
    descent (Eq. 54-55), the squared error with it is DGD (Eq. 56). Both are quadratic, so one
    Newton step solves them; other convex objectives take a few.
    """
    u = target(weight, x)

    def loss(new: Tensor) -> Tensor:
        return objective.loss(Matrix(new), x, u).sum() + retention(new, weight)

    return argmin(loss, weight, steps=steps)


def _column(gate: Tensor | float) -> Tensor | float:
    return gate[..., None, None] if isinstance(gate, Tensor) else gate
