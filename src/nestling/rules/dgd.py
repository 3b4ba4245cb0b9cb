"""Delta gradient descent, exact for any input norm and any number of rows (Eq. 54-60, 112-121).

One pair: `W+ = argmin |W x - u|^2 / 2 + |W - W_t|^2 / (2 eta)` with `u = -grad_y L`. The
gradient vanishes where `W+ (I + eta x x^T) = W_t + eta u x^T`, and Sherman-Morrison turns the
inverse into a smaller rate, `eta' = eta / (1 + eta |x|^2)`:

    W+ = W_t (I - eta' x x^T) + eta' u x^T

The printed form (Eq. 57, 120) is the case |x| = 1; deviation 1. For n rows X [n, Di], U [n, Do]
of weight c each (c = 1: a sum of losses, c = 1/n: their mean, where U already carries the 1/n),

    W+ = W + eta (U - c X W^T)^T (I_n + c eta X X^T)^{-1} X

and the inverse may equally stand on the other side as `X (I_d + c eta X^T X)^{-1}`: the smaller of
the two systems is solved.

Erasing. With u = -grad_y L the fixed points are those of `L + |W x|^2 / 2`, not of L: every output
is pulled to zero, and on a squared error DGD converges to half the target (deviation 5). Eq. 59-60
allow any self-generated target; `erase` interpolates between two of them,
`u_erase = -grad_y L + (1 - erase) W_t x`: 1 is the paper's, 0 keeps L's own fixed points (the
target is the present output moved against its gradient) and still solves for all rows together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nestling.checks import require
from nestling.rules.core import Gates, Rule, State, Write, factory, pairs


def dgd_direction(
    weight: Tensor,
    x: Tensor,
    u: Tensor,
    rate: Tensor | float,
    *,
    row_weight: float = 1.0,
    erase: float = 1.0,
) -> Tensor:
    """`(W_t - W+) / rate` for many rows at once (Eq. 56, 113-116): the exact proximal step.

    weight [..., Do, Di], x [..., n, Di], u [..., n, Do], rate a number or [..., 1, 1]; `row_weight`
    is c and `erase` the choice of target in the module's docstring.
    """
    exact = torch.promote_types(weight.dtype, torch.float32)
    x, error = x.to(exact), -u.to(exact)
    if erase != 0.0:
        error = error + (row_weight * erase) * (x @ weight.to(exact).mT)  # [..., n, Do]
    strength = row_weight * rate
    if x.shape[-2] > x.shape[-1]:
        return _solve(_identity_plus(x.mT @ x, strength), x.mT @ error).mT.to(weight.dtype)
    left, right = dgd_factors(x, error, strength)
    return (left.mT @ right).to(weight.dtype)


def dgd_factors(x: Tensor, error: Tensor, strength: Tensor | float) -> tuple[Tensor, Tensor]:
    """The step as a product `left^T right` of n rows each, for no more rows than inputs (Eq. 116).

    x [..., n, Di], error [..., n, Do] the gradient at the output (with what is to be erased),
    strength `c eta`. A caller that adds the product to its weight never forms the step itself.
    """
    system = _identity_plus(x @ x.mT, strength)
    if error.shape[-1] < x.shape[-1]:
        return _solve(system, error), x
    return error, _solve(system, x)


@factory
def dgd(*, mean: bool = False, erase: float = 1.0) -> Rule:
    """Delta gradient descent as a rule (Eq. 56-58, 112-121).

    Needs the pairs of the write: the layer's inputs x and its targets `u = -grad_y L` (Eq. 112).

    `mean`: the loss is a mean over the rows, so each row weighs 1/n. `erase`: 1 is the paper's
    target, 0 keeps the fixed points of the loss; see the module's docstring. Retention stays with
    the step: it solves `... + |W - retain W_t|^2 / (2 rate)`.
    """
    require(0.0 <= erase <= 1.0, "dgd: erase", erase, "in [0, 1]")

    def step(write: Write, state: State, weight: Tensor, gates: Gates) -> tuple[Write, State]:
        x, u = pairs(write, "dgd")
        row_weight = 1.0 / max(x.shape[-2], 1) if mean else 1.0
        near = gates.retain * weight if erase else weight  # only the erase term reads it
        grad = dgd_direction(near, x, u, gates.rate, row_weight=row_weight, erase=erase)
        return write._replace(grad=grad), state

    return Rule(lambda weight: (), step, needs_pairs=True)


def _identity_plus(gram: Tensor, strength: Tensor | float) -> Tensor:
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return eye + strength * gram


def _solve(system: Tensor, right: Tensor) -> Tensor:
    """`system^{-1} right` for a symmetric positive definite system; NaN stays NaN, no error.

    With many right hand sides, products with the inverse and one step of refinement are several
    times faster than triangular solves, and as exact.
    """
    root = torch.linalg.cholesky_ex(system).L
    if right.shape[-1] < 2 * system.shape[-1]:
        return torch.cholesky_solve(right, root)
    inverse = torch.cholesky_inverse(root)
    rough = inverse @ right
    return rough + inverse @ (right - system @ rough)
