"""Newton-Schulz: replace a matrix by the nearest one with orthonormal rows or columns (Eq. 42-44).

The cubic iteration is gradient descent on `|O^T O - I|_F^2` (Eq. 43) with rate 1/8, since the
gradient is `4 O (O^T O - I)`:

    O - 4/8 O (O^T O - I) = O (3 I - O^T O) / 2                               (Eq. 44)

In general one step is `O <- O p(O^T O)` with `p(G) = a I + b G + c G^2`. deviation 11: the paper
mixes two objectives, so `CUBIC` is Eq. 44 exactly and `QUINTIC` holds Muon's coefficients, which
reach singular values of about 1 (between 0.7 and 1.2) in five steps instead of fifteen.

The fast form works on the smaller side, where all steps share the start matrix. With `G = X X^T`
(n x n, X wide) every iterate is `Q X` for a polynomial Q in G, and all such matrices commute:

    P = p(G),   Q <- P Q,   G <- P G P

so a step costs four n x n products however wide X is. A negative eigenvalue that rounding puts
into G grows by a^2 a step, so after `RESTART` steps X is formed and G computed afresh.

Precision. The result only needs to be nearly orthogonal (singular values of 0.7 to 1.2), so
bfloat16 serves where it is quicker: on GPUs, and on CPUs that are seen to multiply it faster. There
a Gram matrix serves two steps, for rounding grows on it (by three orders in five steps where
singular values are spread), and errors stay those of iterating X itself.

All products but the last are symmetric. On a CPU a large one is formed in strips up to the
diagonal, and the rest is copied: with two strips three quarters of the work, with four 5/8.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nestling.checks import require
from nestling.machine import bf16_is_quicker
from nestling.rules.core import Rule, factory, stateless
from nestling.rules.size import frobenius

Coefficients = tuple[float, float, float]
Multiply = Callable[..., Tensor]
"""`torch.addmm` for a matrix, `torch.baddbmm` for many."""

CUBIC: Coefficients = (1.5, -0.5, 0.0)
"""Gradient descent on `|O^T O - I|_F^2`: Eq. 43-44."""

QUINTIC: Coefficients = (3.4445, -4.7750, 2.0315)
"""Muon's coefficients: five steps bring every singular value above 0.01 near 1 (Eq. 42)."""

RESTART = 5  # steps on one Gram matrix before rounding errors matter
ROUGH_RESTART = 2  # the same in bfloat16 and float16
BFLOAT_FROM = 128  # below this side nothing is gained by a smaller dtype
STRIPS = 4  # of a symmetric product, at most
ROWS = {torch.bfloat16: 256, torch.float16: 256}  # of a strip at least: smaller ones are slower
EXACT_ROWS = 128  # the same in other precisions
GRAM_FROM = 1.5  # wide / narrow side from which the Gram form needs fewer multiplications


def newton_schulz_naive(
    matrix: Tensor, steps: int = 5, coefficients: Coefficients = QUINTIC
) -> Tensor:
    """Eq. 43-44 as they are written: `O <- O (a I + b O^T O + c (O^T O)^2)` from `m / |m|`."""
    a, b, c = coefficients
    out = matrix / frobenius(matrix)  # [..., n, m]
    for _ in range(steps):
        gram = out.mT @ out  # [..., m, m]
        out = a * out + out @ (b * gram + c * gram @ gram)
    return out


def newton_schulz(
    matrix: Tensor,
    steps: int = 5,
    coefficients: Coefficients = QUINTIC,
    precision: torch.dtype | None = None,
) -> Tensor:
    """Orthogonalise each matrix `[..., n, m]` by `steps` Newton-Schulz steps (Eq. 42-44).

    Returned in the matrix's dtype. A zero matrix stays zero, and the result does not depend on the
    matrix's scale. `precision` is the dtype to compute in; None takes bfloat16 for matrices of at
    most 32 bits where it is quicker (`quick_precision`), and float32 or the matrix's own elsewhere.
    """
    _check(matrix, steps)
    if matrix.numel() == 0 or steps == 0:
        return matrix / frobenius(matrix)
    exact = torch.promote_types(matrix.dtype, torch.float32)
    if precision is None:
        small = max(matrix.shape[-2:]) < BFLOAT_FROM
        precision = exact if exact != torch.float32 or small else quick_precision(matrix.device)
    rows, columns = matrix.shape[-2:]
    x = matrix.to(exact).reshape(-1, rows, columns)
    x = (x / frobenius(x)).to(precision)
    if rows > columns:
        x = x.mT
    alone = x.shape[0] == 1  # torch's batched products first copy what is transposed
    x = x[0] if alone else x
    multiply = torch.addmm if alone else torch.baddbmm
    if max(rows, columns) >= GRAM_FROM * min(rows, columns):
        restart = ROUGH_RESTART if precision in (torch.bfloat16, torch.float16) else RESTART
        for start in range(0, steps, restart):
            x = _gram_steps(x, min(restart, steps - start), coefficients)
    else:
        x = _direct_steps(x, steps, coefficients, multiply)
    if rows > columns:
        x = x.mT
    return x.to(matrix.dtype).reshape(matrix.shape)


@factory
def orthogonalise(
    *,
    steps: int = 5,
    coefficients: Coefficients = QUINTIC,
    precision: torch.dtype | None = None,
) -> Rule:
    """Newton-Schulz as a rule: the `sigma` of Eq. 52 that makes momentum Muon (Eq. 42)."""
    return stateless(lambda grad: newton_schulz(grad, steps, coefficients, precision))


def quick_precision(device: torch.device) -> torch.dtype:
    """The dtype in which a device multiplies matrices fastest and well enough for Newton-Schulz.

    bfloat16 on GPUs. On a CPU that has instructions for it, a measurement decides: once per
    process, a second or two, in a process of its own, for some virtual machines advertise
    instructions that fault.
    """
    if device.type == "cpu":
        return torch.bfloat16 if bf16_is_quicker() else torch.float32
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _direct_steps(x: Tensor, steps: int, coefficients: Coefficients, multiply: Multiply) -> Tensor:
    """The iteration on a wide `x` itself: [B, n, m] or [n, m] with n <= m."""
    a, b, c = coefficients
    for _ in range(steps):
        gram = _symmetric(x, x.mT)  # [B, n, n]
        poly = _symmetric(gram, gram, gram, beta=b, alpha=c) if c else b * gram
        x = multiply(x, poly, x, beta=a)
    return x


def _gram_steps(x: Tensor, steps: int, coefficients: Coefficients) -> Tensor:
    """The same on the Gram matrix; see the module's docstring."""
    a, b, c = coefficients
    gram = _symmetric(x, x.mT)  # [B, n, n]
    total = gram  # Q of the docstring; the first step sets it
    for step in range(steps):
        poly = _symmetric(gram, gram, gram, beta=b, alpha=c) if c else b * gram  # p - a I
        total = _symmetric(poly, total, total, beta=a) if step else poly + a * _eye_like(poly)
        if step < steps - 1:
            half = _symmetric(poly, gram, gram, beta=a)  # P G
            gram = _symmetric(poly, half, half, beta=a)  # P G P
    return total @ x


def _symmetric(
    left: Tensor, right: Tensor, add: Tensor | None = None, *, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """`beta add + alpha left right`, which is symmetric; without `add` the product alone."""
    size, count = left.shape[-2], _strips(left)
    multiply = torch.addmm if left.dim() == 2 else torch.baddbmm
    if count < 2:
        if add is None:
            return left @ right
        return multiply(add, left, right, beta=beta, alpha=alpha)
    out = left.new_empty(size, size)
    rows = -(-size // count)
    for start in range(0, size, rows):
        stop = min(start + rows, size)
        strip, one, other = out[start:stop, :stop], left[start:stop], right[:, :stop]
        if add is None:
            torch.mm(one, other, out=strip)
        else:
            torch.addmm(add[start:stop, :stop], one, other, beta=beta, alpha=alpha, out=strip)
        out[:start, start:stop] = strip[:, :start].mT
    return out


def _strips(left: Tensor) -> int:
    """How many strips a symmetric product of these rows is formed in; 1 is the whole."""
    if left.dim() != 2 or not left.is_cpu or torch.compiler.is_compiling():
        return 1
    if left.requires_grad or torch._C._are_functorch_transforms_active():
        return 1
    return min(STRIPS, left.shape[0] // ROWS.get(left.dtype, EXACT_ROWS))


def _eye_like(gram: Tensor) -> Tensor:
    return torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)


def _check(matrix: Tensor, steps: int) -> None:
    if matrix.ndim < 2:
        raise ValueError(
            f"newton_schulz: matrix needs at least 2 dimensions, got shape {tuple(matrix.shape)}"
        )
    if not matrix.is_floating_point():
        raise TypeError(f"newton_schulz: matrix must be floating point, got {matrix.dtype}")
    require(steps >= 0, "newton_schulz: steps", steps, "at least 0")
