"""Fast weights as differences: full matrices, or factors that stay exact until a rank is exceeded.

A difference is None (zero), a Tensor [B, Do, Di], or `Factors` (left right^T). Truncation keeps the
best approximation of the given rank. For `m` columns in all it is exact: QR of both sides and the
singular values of an m x m matrix. For many columns (a long chunk) the range is found by subspace
iteration instead, with a few more columns than asked: products with tall thin matrices only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nestling.cms.core import Factors, Fast, Part

__all__ = ["add", "dense", "merge", "norm2", "read", "scale", "truncate"]

EXACT = 96
"""Up to so many columns truncation is by QR and SVD."""


def dense(fast: Tensor | Factors) -> Tensor:
    """The matrix [B, Do, Di]."""
    return fast.left @ fast.right.mT if isinstance(fast, Factors) else fast


def read(x: Tensor, fast: Tensor | Factors) -> Tensor:
    """`x Delta^T` sequence by sequence: [B, n, Di] -> [B, n, Do]."""
    if isinstance(fast, Factors):
        return (x @ fast.right.to(x.dtype)) @ fast.left.mT.to(x.dtype)
    return x @ fast.mT.to(x.dtype)


def norm2(fast: Fast) -> Tensor | float:
    """The squared Frobenius norm of each sequence's difference: [B]."""
    if fast is None:
        return 0.0
    if isinstance(fast, Factors):
        return (
            ((fast.left.mT @ fast.left) * (fast.right.mT @ fast.right)).sum((-2, -1)).clamp(min=0)
        )
    return torch.linalg.vector_norm(fast, dim=(-2, -1)).square()


def scale(fast: Fast, factor: Tensor | float) -> Fast:
    """`factor Delta`; the factor is a number or [B, 1, 1]."""
    if isinstance(fast, Factors):
        return Factors(fast.left * factor, fast.right)
    return None if fast is None else fast * factor


def add(one: Fast, other: Fast) -> Fast:
    """The sum of two differences of the same kind (factors are joined, not truncated)."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, Factors) and isinstance(other, Factors):
        left = torch.cat([one.left, other.left], -1)
        return Factors(left, torch.cat([one.right, other.right], -1))
    if isinstance(one, Factors) or isinstance(other, Factors):
        raise TypeError("a full difference cannot be added to factors")
    return one + other


def merge(base: Tensor, parts: list[tuple[Part, Tensor]]) -> Tensor:
    """`W0 + sum_l Delta_l`: [Do, Di], or [B, Do, Di] for several sequences."""
    batch = parts[0][1].shape[0]
    exact = torch.promote_types(base.dtype, parts[0][1].dtype)
    total = base.to(exact)
    fresh = False
    for part, fast in parts:
        fast = fast[0] if batch == 1 else fast
        if part.axis is None:
            total = total.add_(fast) if fresh and not fast.requires_grad else total + fast
        else:
            if not fresh:
                total = (total if batch == 1 else total.expand(batch, -1, -1)).clone()
            total.narrow(-2 + part.axis, part.start, part.stop - part.start).add_(fast)
        fresh = not total.requires_grad
    return total.to(base.dtype)


def truncate(factors: Factors, rank: int) -> tuple[Factors, Tensor]:
    """The best approximation of at most `rank` columns, and the norm of what it drops: [B]."""
    left, right = factors
    columns = left.shape[-1]
    if columns <= rank:
        return factors, left.new_zeros(left.shape[0])
    if columns <= EXACT or columns <= 2 * rank:
        return _exact(left, right, rank)
    # The range of M = left right^T by subspace iteration from a fixed start, then exact in it.
    generator = torch.Generator().manual_seed(columns)
    start = torch.randn(columns, min(rank + 8, columns), generator=generator, dtype=left.dtype)
    basis, _ = torch.linalg.qr(left @ start.to(left.device))  # [B, Do, r + 8]
    for _ in range(2):
        back, _ = torch.linalg.qr(right @ (left.mT @ basis))
        basis, _ = torch.linalg.qr(left @ (right.mT @ back))
    kept, _ = _exact(basis, right @ (left.mT @ basis), rank)
    dropped = (_norm2(left, right) - _norm2(*kept)).clamp(min=0).sqrt()
    return kept, dropped


def _exact(left: Tensor, right: Tensor, rank: int) -> tuple[Factors, Tensor]:
    q, r = torch.linalg.qr(left)
    p, s = torch.linalg.qr(right)
    u, sizes, v = torch.linalg.svd(r @ s.mT, full_matrices=False)
    root = sizes[..., None, :rank].sqrt()
    kept = Factors(q @ (u[..., :rank] * root), p @ (v.mT[..., :rank] * root))
    return kept, torch.linalg.vector_norm(sizes[..., rank:], dim=-1)


def _norm2(left: Tensor, right: Tensor) -> Tensor:
    return ((left.mT @ left) * (right.mT @ right)).sum((-2, -1))
