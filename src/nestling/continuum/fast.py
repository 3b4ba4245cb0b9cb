"""Fast weights as differences: full matrices, or factors that stay exact until a rank is exceeded.

A difference is None (zero), a Tensor [B, Do, Di], or `Factors` (left right^T). Truncation keeps the
best approximation of the given rank, by whichever way is cheapest:

- few columns: QR of both sides and the singular values of what is between (`_exact`);
- more: with the Gram matrices `gl = left^T left` and `gr = right^T right` every product with
  `M M^T` is one with `gr gl` in the space of the columns, `M M^T (left a) = left (gr gl a)`, so
  subspace iteration touches only small matrices (`_by_grams`);
- so many that the matrix itself is smaller: subspace iteration on it (`_by_matrix`).

Subspace iteration carries a few more columns than asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nestling.continuum.assignment import Part

__all__ = [
    "Factors",
    "Fast",
    "add",
    "dense",
    "handier",
    "handy",
    "merge",
    "norm2",
    "read",
    "scale",
    "smaller",
    "step",
    "truncate",
    "truncate_all",
]


class Factors(NamedTuple):
    """A compact matrix `left right^T`."""

    left: Tensor  # [B, Do, R]
    right: Tensor  # [B, Di, R]


Fast = Tensor | Factors | None
"""One part's difference [B, Do, Di]; None is zero, as long as nothing was learned."""


EXTRA = 8
"""Columns of a subspace beyond the rank asked for."""

PASS = 22
"""Operations that take as long as writing a number and reading it again, as measured."""


def dense(fast: Tensor | Factors) -> Tensor:
    """The matrix [B, Do, Di]."""
    return fast.left @ fast.right.mT if isinstance(fast, Factors) else fast


def read(x: Tensor, fast: Tensor | Factors) -> Tensor:
    """`x Delta^T` sequence by sequence: [B, n, Di] -> [B, n, Do]."""
    if isinstance(fast, Factors):
        return (x @ fast.right.to(x.dtype)) @ fast.left.mT.to(x.dtype)
    return x @ fast.mT.to(x.dtype)


def smaller(columns: int, outputs: int, inputs: int) -> bool:
    """Whether factors of so many columns take less room than the matrix."""
    return columns * (outputs + inputs) < outputs * inputs


def norm2(fast: Fast) -> Tensor | float:
    """The squared Frobenius norm of each sequence's difference: [B]."""
    if fast is None:
        return 0.0
    if isinstance(fast, Factors):
        return _norm2(*fast).clamp(min=0)
    return torch.linalg.vector_norm(fast, dim=(-2, -1)).square()


def scale(fast: Fast, factor: Tensor | float) -> Fast:
    """`factor Delta`; the factor is a number or [B, 1, 1]."""
    if isinstance(fast, Factors):
        return Factors(fast.left * factor, fast.right)
    return None if fast is None else fast * factor


def turn(fast: Fast, by: Tensor) -> Fast:
    """`Delta R` with a symmetric R [Di, Di]."""
    if fast is None:
        return None
    if isinstance(fast, Factors):
        return Factors(fast.left, by.to(fast.right.dtype) @ fast.right)
    return fast @ by.to(fast.dtype)


def add(one: Fast, other: Fast) -> Fast:
    """The sum of two differences; factors are joined as long as the matrix is not smaller."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, Factors) and isinstance(other, Factors):
        left, right = (torch.cat(sides, -1) for sides in zip(one, other, strict=True))
        if smaller(left.shape[-1], left.shape[-2], right.shape[-2]):
            return Factors(left, right)
        return left @ right.mT
    if isinstance(one, Factors):
        one, other = other, one
    if isinstance(other, Factors):
        return torch.baddbmm(dense(one), other.left, other.right.mT)
    return dense(one) + other


def handier(columns: int, outputs: int, inputs: int, readers: int = 1) -> bool:
    """Whether a gradient of so many columns is better formed once than kept in factors.

    In factors every reader adds it by a product, of `columns Do Di` operations (one of these there
    is in any case), and its norm takes Gram matrices, of `columns^2 (Do + Di)`. Formed, it has to
    be written and read by each, which takes as long as some `PASS` operations on every number.
    """
    size = outputs * inputs
    kept = columns**2 * (outputs + inputs) + (readers - 1) * columns * size
    return kept > readers * PASS * size or not smaller(columns, outputs, inputs)


def handy(fast: Fast) -> Fast:
    """In the form that is handier for one reader."""
    if not isinstance(fast, Factors):
        return fast
    outputs, inputs, columns = fast.left.shape[-2], *fast.right.shape[-2:]
    return dense(fast) if handier(columns, outputs, inputs) else fast


def step(
    old: Tensor | None,
    gradient: Tensor | Factors,
    strength: float,
    retain: float,
    *,
    in_place: bool = False,
) -> Tensor:
    """`retain Delta + strength G`: [B, Do, Di]; for a gradient in factors in one product."""
    if isinstance(gradient, Tensor):
        if old is None:
            return gradient * strength
        kept = old if in_place else old.clone()
        return (kept if retain == 1.0 else kept.mul_(retain)).add_(gradient, alpha=strength)
    left, right = gradient.left, gradient.right.mT
    if old is None:
        return (left * strength) @ right
    out = old if in_place else None
    return torch.baddbmm(old, left, right, beta=retain, alpha=strength, out=out)


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


def truncate(fast: Tensor | Factors, rank: int) -> tuple[Factors, Tensor]:
    """The best approximation of at most `rank` columns, and the norm of what it drops: [B]."""
    return truncate_all([fast], rank)[0]


def truncate_all(fasts: Sequence[Tensor | Factors], rank: int) -> list[tuple[Factors, Tensor]]:
    """`truncate` of several differences: small matrices of one size are worked on together."""
    done: dict[int, tuple[Factors, Tensor]] = {}
    alike: dict[int, list[int]] = {}
    for place, fast in enumerate(fasts):
        columns = fast.left.shape[-1] if isinstance(fast, Factors) else 0
        if not _finite(fast):  # the decompositions below raise where a caller wants to see it
            done[place] = _lost(fast, rank)
            continue
        if isinstance(fast, Tensor):
            done[place] = _by_matrix(fast, rank)
        elif columns <= rank:
            done[place] = fast, fast.left.new_zeros(fast.left.shape[0])
        elif columns <= max(2 * rank, rank + EXTRA):
            done[place] = _exact(*fast, rank)
        elif smaller(columns, fast.left.shape[-2], fast.right.shape[-2]):
            alike.setdefault(columns, []).append(place)
        else:
            done[place] = _by_matrix(dense(fast), rank)
    for places in alike.values():
        some = [fast for place in places if isinstance(fast := fasts[place], Factors)]
        done |= zip(places, _by_grams(some, rank), strict=True)
    return [done[place] for place in range(len(fasts))]


def _finite(fast: Tensor | Factors) -> bool:
    return all(
        bool(each.isfinite().all()) for each in ([fast] if isinstance(fast, Tensor) else fast)
    )


def _lost(fast: Tensor | Factors, rank: int) -> tuple[Factors, Tensor]:
    """What is not finite, in the form of its rank: every number is nan."""
    outputs, inputs = fast.shape[-2:] if isinstance(fast, Tensor) else (s.shape[-2] for s in fast)
    like = fast if isinstance(fast, Tensor) else fast.left
    sides = (like.new_full((like.shape[0], size, rank), torch.nan) for size in (outputs, inputs))
    return Factors(*sides), like.new_full((like.shape[0],), torch.nan)


def _exact(left: Tensor, right: Tensor, rank: int) -> tuple[Factors, Tensor]:
    q, r = torch.linalg.qr(left)
    p, s = torch.linalg.qr(right)
    u, sizes, v = torch.linalg.svd(r @ s.mT, full_matrices=False)
    root = sizes[..., None, :rank].sqrt()
    kept = Factors(q @ (u[..., :rank] * root), p @ (v.mT[..., :rank] * root))
    return kept, torch.linalg.vector_norm(sizes[..., rank:], dim=-1)


def _by_grams(many: list[Factors], rank: int) -> list[tuple[Factors, Tensor]]:
    """Subspace iteration in the space of the columns, in float64, for all at once."""
    gl = torch.cat([left.mT @ left for left, _ in many]).double()  # [all B, m, m]
    gr = torch.cat([right.mT @ right for _, right in many]).double()
    a = _start(gl.shape[-1], rank, gl).expand(gl.shape[0], -1, -1)
    for _ in range(2):
        for _ in range(2):
            a = gr @ (gl @ a)
        a, _ = torch.linalg.qr(a)
    sizes, turn = torch.linalg.eigh(a.mT @ gl @ a)
    a = a @ (turn * _inverse(sizes).sqrt().unsqueeze(-2))  # left a is orthonormal
    c = gl @ a  # M^T (left a) = right c
    squares, turn = torch.linalg.eigh(c.mT @ gr @ c)
    best = turn[..., -rank:]
    root = squares[..., None, -rank:].clamp(min=0).sqrt().sqrt()
    total, most = (gl * gr).sum((-2, -1)), squares[..., -rank:].sum(-1)
    batch, dtype = many[0].left.shape[0], many[0].left.dtype
    mixed = (a @ best * root).to(dtype), (c @ best * _inverse(root)).to(dtype)
    lost = _dropped(total, most, dtype)
    each = zip(many, *(part.split(batch) for part in (*mixed, lost)), strict=True)
    return [(Factors(f.left @ mine, f.right @ its), gone) for f, mine, its, gone in each]


def _by_matrix(matrix: Tensor, rank: int) -> tuple[Factors, Tensor]:
    """Subspace iteration on the matrix itself."""
    basis, _ = torch.linalg.qr(matrix @ _start(matrix.shape[-1], rank, matrix))
    for _ in range(2):
        back, _ = torch.linalg.qr(matrix.mT @ basis)
        basis, _ = torch.linalg.qr(matrix @ back)
    kept, _ = _exact(basis, matrix.mT @ basis, rank)
    total = torch.linalg.vector_norm(matrix, dim=(-2, -1)).square()
    return kept, _dropped(total, _norm2(*kept), matrix.dtype)


def _start(rows: int, rank: int, like: Tensor) -> Tensor:
    """The same random columns every time: [rows, rank + EXTRA]."""
    generator = torch.Generator().manual_seed(rows)
    start = torch.randn(rows, min(rank + EXTRA, rows), generator=generator, dtype=torch.float64)
    return start.to(like)


def _inverse(sizes: Tensor) -> Tensor:
    """1 / sizes; 0 for what is zero beside the largest."""
    least = sizes.amax(-1, keepdim=True) * torch.finfo(sizes.dtype).eps * sizes.shape[-1]
    return torch.where(sizes > least, 1.0 / sizes, torch.zeros_like(sizes))


def _dropped(total: Tensor, kept: Tensor, dtype: torch.dtype) -> Tensor:
    """The norm of what is missing, [B]; nothing where the squares differ by rounding only."""
    gap, least = total - kept, 64 * torch.finfo(dtype).eps * total
    return torch.where(gap > least, gap, torch.zeros_like(gap)).sqrt().to(dtype)


def _norm2(left: Tensor, right: Tensor) -> Tensor:
    if not smaller(left.shape[-1], left.shape[-2], right.shape[-2]):
        return torch.linalg.vector_norm(left @ right.mT, dim=(-2, -1)).square()
    return ((left.mT @ left) * (right.mT @ right)).sum((-2, -1))
