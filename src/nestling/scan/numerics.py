"""The numerics that scans share: their dtype, scratch, decay products and the unit inverse.

`decay` and `unit_inverse` double: from blocks of size b to blocks of size 2b. Neither takes a
logarithm nor divides, so a retain of 0 and a running product that underflows are exact, and every
product is at most 1. They write into scratch, so they are for hand-written kernels only: autograd
does not see them.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_BASE = 8
"""Size of the diagonal blocks that `unit_inverse` inverts row by row."""


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The widest dtype among the inputs, at least float32: memories and solves live in it."""
    dtype = torch.float32
    for tensor in tensors:
        if tensor is not None:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


class Workspace:
    """Named scratch tensors that all segments of a call share, and two constants.

    Fresh memory comes from where no cache holds it, which costs several times the arithmetic done
    on it; so kernels write with `out=`, to the same place in every segment.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self.device, self.dtype = like.device, dtype
        self._buffers: dict[str, Tensor] = {}
        self._last: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """Scratch of this shape; it holds whatever was last written under this name."""
        last = self._last.get(name)
        if last is not None and last.shape == shape:
            return last
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=self.dtype, device=self.device)
            self._buffers[name] = buffer
        self._last[name] = view = buffer[:size].view(shape)
        return view

    def zeros(self, name: str, *shape: int) -> Tensor:
        """As above, zero on first use: for those who always write the same part, as triangles."""
        name = f"{name} {shape}"
        if name not in self._buffers:
            self._buffers[name] = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return self._buffers[name]

    def eye(self, size: int) -> Tensor:
        """The unit matrix [C, C]."""
        return self._constant("eye", size)

    def above(self, size: int) -> Tensor:
        """0 below the diagonal, -inf on and above it, [C, C]."""
        return self._constant("above", size)

    def _constant(self, name: str, size: int) -> Tensor:
        key = f"{name} {size}"
        if key not in self._last:
            one = torch.eye(size, dtype=self.dtype, device=self.device)
            self._last[key] = one if name == "eye" else torch.full_like(one, -torch.inf).triu_()
        return self._last[key]


def _power(size: int, least: int = 1) -> int:
    return max(least, 1 << (size - 1).bit_length())


def decay(retain: Tensor, work: Workspace) -> tuple[Tensor, Tensor]:
    """All running products of the retentions of a chunk.

    retain `[Q, C]` -> g `[Q, C + 1]` with `g_t = prod_{r <= t} retain_r` (`g_0 = 1`) and
    G `[Q, C + 1, C]` with `G_ts = prod_{s < r <= t} retain_r` for `s <= t`, else 0. Rows of G are
    t = 0..C, columns s = 1..C: `G[:, :-1]` belongs to the memory before a token, `G[:, 1:]` to
    the memory after it, and the last row to the end of the chunk.
    """
    batch, chunk = retain.shape
    size = _power(chunk)
    running = retain.new_ones(batch, size + 1)
    before = torch.ones_like(running[:, 1:])  # product from the start of t's block up to t
    before[:, :chunk] = retain
    behind = torch.ones_like(before)  # product from after s to the end of s's block
    table = work.zeros("decay", batch, size + 1, size)
    table[:, 1:].diagonal(dim1=1, dim2=2).fill_(1.0)
    half = 1
    while half < size:
        first, second = before.view(batch, -1, 2, half).unbind(2)  # [Q, pairs, b]
        suffix = behind.view(batch, -1, 2, half)[:, :, 0]
        below = _corners(table[:, 1:], half)  # [Q, pairs, b, b]
        torch.mul(second.unsqueeze(-1), suffix.unsqueeze(-2), out=below)
        suffix.mul_(second[..., -1:])
        second.mul_(first[..., -1:])
        half *= 2
    running[:, 1:] = before
    return running[:, : chunk + 1], table[:, : chunk + 1, :chunk]


def _corners(matrix: Tensor, half: int) -> Tensor:
    """The lower left quarter of every diagonal block of size 2b, a view `[Q, pairs, b, b]`."""
    tiles = matrix.unflatten(1, (-1, 2, half)).unflatten(4, (-1, 2, half))
    return tiles[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3).movedim(-1, 1)


def unit_inverse(lower: Tensor, out: Tensor, work: Workspace) -> Tensor:
    """`(I + lower)^{-1}` for strictly lower triangular `[Q, C, C]` (the rest must be zero).

    Diagonal blocks by substitution, then `[[A, 0], [B, D]]^{-1} = [[A', 0], [-D' B A', D']]`
    for blocks of 8, 16, 32, ...: batched matmuls, where a batched solve is one call per chunk.
    Fills `out`, which must be contiguous and zero above the diagonal.
    """
    batch, chunk = lower.shape[0], lower.shape[-1]
    size = _power(chunk, _BASE)
    inverse = out
    if size != chunk:
        lower = F.pad(lower, (0, size - chunk, 0, size - chunk))
        inverse = work.zeros("inverse", batch, size, size)
    blocks = _diagonal(lower)  # inverted row by row; batch last, so that rows are long
    rows = work("rows", *blocks.shape).copy_(blocks)  # [b, b, Q, blocks]
    small = work.zeros("small", *blocks.shape)
    small.diagonal(dim1=0, dim2=1).fill_(1.0)
    for i in range(1, _BASE):
        terms = work("terms", i, i, *rows.shape[2:])
        torch.mul(rows[i, :i, None], small[:i, :i], out=terms)
        torch.sum(terms, 0, out=small[i, :i]).neg_()
    _diagonal(inverse).copy_(small)
    half = _BASE
    while half < size:
        product, corner = work(f"corners {half}", 2, batch, half, half)
        for start in range(0, size, 2 * half):
            one, two = slice(start, start + half), slice(start + half, start + 2 * half)
            torch.bmm(inverse[:, two, two], lower[:, two, one], out=product)
            torch.bmm(product, inverse[:, one, one], out=corner)
            torch.neg(corner, out=inverse[:, two, one])
        half *= 2
    return out if inverse is out else out.copy_(inverse[:, :chunk, :chunk])


def _diagonal(matrix: Tensor) -> Tensor:
    """View of the diagonal blocks, batch last: `[b, b, Q, blocks]`."""
    tiles = matrix.unflatten(1, (-1, _BASE)).unflatten(3, (-1, _BASE))
    return tiles.diagonal(dim1=1, dim2=3).permute(1, 2, 0, 3)
