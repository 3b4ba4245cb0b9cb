"""Shared by the Triton kernels of all scans: rows, the inverse of a chunk, tile sizes, precision.

This file and the `triton.py` beside each scan are loaded only where the Triton back end is used
(extra `nestling[triton]`). Kernels compute in float32 whatever the inputs are: bf16 values become
float32 as they are loaded, so the interpreter (`TRITON_INTERPRET=1`, which multiplies bf16 bit
patterns) and the device run the same arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = 128
"""The widest memory a program's tiles hold."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that tensors may have."""

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, on CPU tensors; decided as they are loaded."""


def where_it_runs(tensor: Tensor) -> str | None:
    """Why kernels cannot run on this tensor's device, or None."""
    if tensor.is_cuda or INTERPRETED:
        return None
    return f"it needs CUDA tensors (or TRITON_INTERPRET=1); x is on {tensor.device}"


def longest() -> int:
    """Tokens of a tile: more do not fit a GPU's registers without spilling."""
    return 64 if INTERPRETED else 32


def precision() -> dict[str, Any]:
    """How products are rounded, from `torch.get_float32_matmul_precision()`.

    `highest` is three tf32 products for one (about float32); `high` and `medium` are tf32, with the
    solve still in three. The interpreter computes in float32.
    """
    if INTERPRETED:
        return {"PREC": "ieee", "SOLVE": "ieee"}
    exact = torch.get_float32_matmul_precision() == "highest"
    return {"PREC": "tf32x3" if exact else "tf32", "SOLVE": "tf32x3"}


def tile_rows(size: int) -> int:
    """The smallest tile that holds so many rows: a power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def flat(tensor: Tensor | None) -> Tensor | None:
    """The tensor as kernels address it: row-major, without gaps."""
    return None if tensor is None else tensor.contiguous()


@triton.jit
def load_rows(pointer, t, ok, columns, WIDTH: tl.constexpr):
    """Rows t and some columns of a row-major [T, WIDTH], in float32; zero where not ok."""
    at = pointer + t[:, None] * WIDTH + columns[None, :]
    return tl.load(at, mask=ok[:, None], other=0.0).to(tl.float32)


@triton.jit
def unit_inverse(L, C: tl.constexpr, PREC: tl.constexpr):
    """`(I + L)^-1` for strictly lower L [C, C], by doubling blocks; every step is exact.

    With F the corners of all diagonal blocks of size 2b, `[[A, 0], [B, D]]^-1` is
    `Inv_2b = Inv_b - Inv_b F Inv_b` for b = 1, 2, 4 ... C/2. It is a loop at run time: unrolled, it
    compiles for minutes and spills.
    """
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    inverse = tl.where(t == s, 1.0, 0.0) - tl.where(t // 2 == s // 2, L, 0.0)
    size = 2
    while size < C:
        corner = (t // (2 * size) == s // (2 * size)) & (t // size != s // size)
        F = tl.dot(tl.where(corner, L, 0.0), inverse, input_precision=PREC)
        inverse -= tl.dot(inverse, F, input_precision=PREC)
        size *= 2
    return inverse
