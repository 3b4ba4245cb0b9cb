"""The channel half of a block: memories that map the residual stream to the residual stream.

All have one form, `forward(x, state, mask) -> (y, state)`, and `init(batch_size)` for the state
before the first token. Levels that never change within a sequence have the state `()`: this is
where the per-sequence fast weights of a learning continuum memory live (Eq. 71).

Every sub-layer here is pre-normed and residual, so that a chain of one level is exactly a
Transformer's feed-forward half, and a level that has learned nothing passes its input on.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nestling.blocks.mlp import SwiGLU, level_mlp
from nestling.levels import Level
from nestling.memories.core import Memory
from nestling.norm import RMSNorm

__all__ = ["Chain", "Channel", "FeedForward", "InContext", "Parallel"]


class Channel(nn.Module, abc.ABC):
    """A channel memory; see the module's docstring."""

    @abc.abstractmethod
    def init(self, batch_size: int, **options: Any) -> Any:
        """The state before the first token (`device` and `dtype` as for memories)."""

    @abc.abstractmethod
    def forward(
        self, x: Tensor, state: Any = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """[B, T, D] -> [B, T, D] and the state after the last token."""


class _Frozen(Channel):
    """A channel memory whose weights stay the same within a sequence: no state."""

    def init(self, batch_size: int, **options: Any) -> tuple[()]:
        return ()


class FeedForward(_Frozen):
    """`x + SwiGLU(norm(x))`: Transformer++'s channel, a memory of frequency 0."""

    def __init__(self, width: int, hidden: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.norm = RMSNorm(width, eps)
        self.mlp = SwiGLU(width, hidden)

    def forward(
        self, x: Tensor, state: Any = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        return x + self.mlp(self.norm(x)), ()


class Chain(_Frozen):
    """Continuum memory as a chain, `MLP_k(... MLP_1(x))`, fastest level first (Eq. 70).

    The MLP block of a level is `x + MLP(norm(x))`. `levels` says how often each one is to change;
    here they are frozen within a sequence.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        levels: Sequence[Level],
        *,
        activation: str = "gelu",
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.levels = tuple(levels)
        self.norms = nn.ModuleList(RMSNorm(width, eps) for _ in levels)
        self.mlps = nn.ModuleList(level_mlp(width, hidden, activation) for _ in levels)

    def forward(
        self, x: Tensor, state: Any = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        for norm, mlp in zip(self.norms, self.mlps, strict=True):
            x = x + mlp(norm(x))
        return x, ()


class Parallel(_Frozen):
    """Continuum memory with independent levels, `Agg(MLP_k(x), ..., MLP_1(x))` (Eq. 74).

    `Agg` is a learned weighted sum, one weight per level, added to the residual stream.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        levels: Sequence[Level],
        *,
        activation: str = "gelu",
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.levels = tuple(levels)
        self.norm = RMSNorm(width, eps)
        self.mlps = nn.ModuleList(level_mlp(width, hidden, activation) for _ in levels)
        self.weight = nn.Parameter(torch.empty(len(self.levels)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, len(self.levels) ** -0.5)

    def forward(
        self, x: Tensor, state: Any = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        normed = self.norm(x)
        for weight, mlp in zip(self.weight.unbind(), self.mlps, strict=True):
            x = x + weight * mlp(normed)
        return x, ()


class InContext(Channel):
    """`x + memory(norm(x))` with any memory: AdaTransformer's channel (Eq. 69)."""

    def __init__(self, memory: Memory, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.norm = RMSNorm(memory.width, eps)
        self.memory = memory

    def init(self, batch_size: int, **options: Any) -> Any:
        return self.memory.init(batch_size, **options)

    def forward(
        self, x: Tensor, state: Any = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        y, state = self.memory(self.norm(x), state, mask)
        return x + y, state
