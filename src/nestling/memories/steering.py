"""One small memory for all adaptive projections of a larger one.

In Eq. 83-88 every projection (k, v, rate, retention) is a memory as large as the main one. None of
them depends on the main memory, so they may be smaller: here one memory of a few channels is
written beside it, and its reads are added to the static projections. It has keys, values and gates
of its own; at its slow rate it takes many tokens to settle, so its reads also tell how long it has
been learning, which a gate that sees only a few tokens cannot know.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from nestling.memories.core import state_dtype

if TYPE_CHECKING:
    from nestling.memories.self_modifying import SelfModifying

__all__ = ["RATE", "Steering"]

RATE = 0.02
"""Where the small memory's rate starts: it settles in about fifty tokens."""

PROJECTIONS, GATES = ("k", "v", "q"), ("eta", "alpha")


class Steering(nn.Module):
    """Reads of a small `memory`, as additions to the projections named in `adaptive`."""

    def __init__(
        self, memory: SelfModifying, width: int, heads: int, adaptive: tuple[str, ...]
    ) -> None:
        super().__init__()
        self.memory, self.heads = memory, heads
        self.sizes = {name: width // heads for name in PROJECTIONS if name in adaptive}
        self.sizes |= {name: 1 for name in GATES if name in adaptive}
        self.inward = nn.Linear(width, memory.width, bias=False)
        self.outward = nn.Linear(memory.width, heads * sum(self.sizes.values()), bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Small additions: the projections start almost static, and training moves them."""
        nn.init.normal_(self.outward.weight, std=0.1 / math.sqrt(self.memory.width))

    def run(
        self, x: Tensor, state: Any, valid: Tensor | None, position: int | None
    ) -> tuple[Mapping[str, Tensor], Any]:
        """Read and write packed tokens [B, T, D]: additions, each [B H, T, .], and the state."""
        y, state = self.memory.run(self.inward(x), state, valid, position)
        return self._additions(y), state

    def read(self, x: Tensor, state: Any) -> Mapping[str, Tensor]:
        """The additions as the memory stands."""
        return self._additions(self.memory.read(self.inward(x), state))

    def _additions(self, y: Tensor) -> Mapping[str, Tensor]:
        parts = self.outward(y).unflatten(-1, (self.heads, -1)).transpose(1, 2).flatten(0, 1)
        parts = parts.to(state_dtype(parts.dtype))
        return dict(zip(self.sizes, parts.split(list(self.sizes.values()), -1), strict=True))
