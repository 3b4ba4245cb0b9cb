"""The size of a gradient: what the rules divide by to be free of its scale."""

from __future__ import annotations

import math

import torch
from torch import Tensor

TINY = 1e-20
"""Below this size a matrix counts as zero; dividing by it gives zero for a zero matrix."""


def frobenius(x: Tensor) -> Tensor:
    """The Frobenius norm of each matrix [..., n, m], kept as [..., 1, 1], at least `TINY`."""
    return torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=TINY)


def rms(x: Tensor, dims: int = 2) -> Tensor:
    """The root mean square over the last `dims` dimensions (all, if it has fewer), dims kept."""
    if x.ndim == 0:
        return x.abs().clamp(min=TINY)
    if x.ndim == 1 or dims == 1:
        size, count = torch.linalg.vector_norm(x, dim=-1, keepdim=True), x.shape[-1]
    else:
        size = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
        count = x.shape[-2] * x.shape[-1]
    return (size / math.sqrt(count)).clamp(min=TINY) if count else size
