"""Scratch that the hand-written kernels write into."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["Workspace"]


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
