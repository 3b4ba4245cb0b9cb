"""The channel's MLPs: one level of a continuum memory, or a Transformer's feed-forward layer.

Shapes: B sequences, T tokens, D width, F hidden width.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor, nn

__all__ = ["ACTIVATIONS", "GATED", "MLP", "SwiGLU", "level_mlp", "scaled_normal_"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": nn.functional.gelu,
    "relu": nn.functional.relu,
    "relu2": lambda x: nn.functional.relu(x).square(),
    "silu": nn.functional.silu,
}
"""The activations a configuration may name, beside GATED."""

GATED = "swiglu"
"""The name that makes the MLP of a level a gated one."""


def scaled_normal_(weight: Tensor, fan_in: int) -> None:
    """Normal with standard deviation `1/sqrt(fan_in)`, so that the scale of the input is kept."""
    nn.init.normal_(weight, std=1.0 / math.sqrt(fan_in))


class MLP(nn.Module):
    """`W_down act(W_up x)`: a memory of one hidden layer, the block MLP of Eq. 70."""

    def __init__(self, width: int, hidden: int, activation: str = "gelu") -> None:
        super().__init__()
        self.activation = activation
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        scaled_normal_(self.up.weight, self.up.in_features)
        scaled_normal_(self.down.weight, self.down.in_features)

    def forward(self, x: Tensor) -> Tensor:
        hidden = ACTIVATIONS[self.activation](self.up(x))  # [B, T, F]
        return self.down(hidden)


class SwiGLU(nn.Module):
    """`W_down (silu(W_gate x) * W_up x)`: the feed-forward layer of Transformer++."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in (self.gate, self.up, self.down):
            scaled_normal_(layer.weight, layer.in_features)

    def forward(self, x: Tensor) -> Tensor:
        gate = nn.functional.silu(self.gate(x))
        return self.down(gate * self.up(x))


def level_mlp(width: int, hidden: int, activation: str) -> MLP | SwiGLU:
    """The MLP of one level of a continuum memory (Eq. 70)."""
    return SwiGLU(width, hidden) if activation == GATED else MLP(width, hidden, activation)
