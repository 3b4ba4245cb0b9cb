"""How the chunked scan walks over memory: segments of several chunks, and scratch they share.

A segment is some chunks of all sequences, small enough for a CPU's cache. Inside it tensors are
laid out chunk after chunk, `[Q, C, ...]` with `Q = chunks * sequences`: the recurrence walks over
contiguous slices, everything else is one batched operation over Q.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Segment", "Workspace", "segments"]

_SEGMENT = 1 << 18
"""Numbers in one tensor of a segment (1 MB in float32): enough work to hide the cost of a call, and
a dozen such tensors stay in cache, so the time per token does not grow with the sequence."""


class Workspace:
    """Named scratch tensors that all segments of a call share.

    Fresh memory costs several times the arithmetic done on it, so kernels write with `out=`.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self.device, self.dtype = like.device, dtype
        self._pool: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """Scratch of this shape; it holds whatever was last written under this name."""
        size = math.prod(shape)
        buffer = self._pool.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=self.dtype, device=self.device)
            self._pool[name] = buffer
        return buffer[:size].view(shape)

    def zeros(self, name: str, *shape: int) -> Tensor:
        """As above, zero on first use: for those who always write the same part, as triangles."""
        name = f"{name} {shape}"
        if name not in self._pool:
            self._pool[name] = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return self._pool[name]


class Segment(NamedTuple):
    """Tokens `[start, stop)`: `chunks` chunks of `size` tokens, the first being chunk `first`."""

    start: int
    stop: int
    first: int
    chunks: int
    size: int

    def cut(self, tensor: Tensor, name: str, work: Workspace) -> Tensor:
        """`[M, T, ...]` -> this segment, chunk after chunk `[Q, C, ...]`; a view if it can be."""
        part = tensor[:, self.start : self.stop]
        if self.chunks == 1 and part.dtype == work.dtype:
            return part
        part = part.unflatten(1, (self.chunks, self.size)).transpose(0, 1)
        copy = work(name, *part.shape)
        return copy.copy_(part).flatten(0, 1)

    def paste(self, part: Tensor, tensor: Tensor) -> None:
        """The inverse of `cut`: write `[Q, C, ...]` into `tensor[:, start:stop]`."""
        whole = tensor[:, self.start : self.stop].unflatten(1, (self.chunks, self.size))
        whole.copy_(part.unflatten(0, (self.chunks, -1)).transpose(0, 1))

    def stored(self, flat: Tensor, sequences: int, width: int, columns: int) -> Tensor:
        """This segment's part of a flat store `[T * M * width]`, as `[Q, C, columns]`."""
        shape = (self.chunks * sequences, self.size, columns)
        return flat.narrow(0, self.start * sequences * width, math.prod(shape)).view(shape)


def segments(tokens: int, sequences: int, width: int, chunk: int) -> Iterator[Segment]:
    """Cut T tokens into segments of whole chunks, and one shorter chunk where T is ragged."""
    whole = tokens // chunk
    step = max(1, _SEGMENT // max(1, sequences * chunk * width))
    for first in range(0, whole, step):
        count = min(step, whole - first)
        yield Segment(first * chunk, (first + count) * chunk, first, count, chunk)
    if tokens % chunk:
        yield Segment(whole * chunk, tokens, whole, 1, tokens % chunk)
