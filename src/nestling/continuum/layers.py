"""The layers of a block: MLPs that are levels of memory, and the channels they form (Eq. 70, 74).

A **channel** is the second half of a block: a memory that maps the residual stream to the residual
stream, `forward(x, state, mask) -> (y, state)`, with `init(batch_size)` for the state before the
first token. The MLPs of a chain or of levels side by side are read here as they stand; what each
sequence learns on top of them lives in the engine's fast weights (`nestling.continuum.engine`).

Every sub-layer is pre-normed and residual, so that a chain of one level is exactly a Transformer's
feed-forward half, and a level that has learned nothing passes its input on.

Shapes: B sequences, T tokens, D width, F hidden width.
"""

from __future__ import annotations

import abc
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nestling.continuum.natural import InputMoments
from nestling.levels import Level
from nestling.memories.core import Memory
from nestling.norm import RMSNorm, one_token

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


class _Now(threading.local):
    """The `nestling.continuum.fast.Reading` that layers of this thread ask, or None.

    depth: how many there are in this thread, those that look at every operation among them.
    """

    reading: Any = None
    depth: int = 0


NOW = _Now()


class LevelLinear(nn.Linear):
    """A matrix of a level: inside a `Reading` it answers with what each sequence has learned.

    It asks by itself, so that no other operation of the model has to be looked at.
    """

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or NOW.reading is None:
            return nn.functional.linear(x, self.weight, self.bias)
        answer: Tensor = NOW.reading.linear(x, self.weight, self.bias)
        return answer


class MLP(nn.Module):
    """`W_down act(W_up x)`: a memory of one hidden layer, the block MLP of Eq. 70."""

    def __init__(self, width: int, hidden: int, activation: str = "gelu") -> None:
        super().__init__()
        self.activation = activation
        self.up = LevelLinear(width, hidden, bias=False)
        self.down = LevelLinear(hidden, width, bias=False)
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
        self.gate = LevelLinear(width, hidden, bias=False)
        self.up = LevelLinear(width, hidden, bias=False)
        self.down = LevelLinear(hidden, width, bias=False)
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
        natural: bool = False,
    ) -> None:
        super().__init__()
        self.levels = tuple(levels)
        self.moments = InputMoments(width, hidden, len(levels), shared=False) if natural else None
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
        natural: bool = False,
    ) -> None:
        super().__init__()
        self.levels = tuple(levels)
        self.moments = InputMoments(width, hidden, len(levels), shared=True) if natural else None
        self.norm = RMSNorm(width, eps)
        self.mlps = nn.ModuleList(level_mlp(width, hidden, activation) for _ in levels)
        self.weight = nn.Parameter(torch.empty(len(self.levels)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, len(self.levels) ** -0.5)

    def forward(
        self, x: Tensor, state: Any = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        normed, few = self.norm(x), one_token(x) and x.dtype == self.weight.dtype
        for weight, mlp in zip(self.weight.unbind(), self.mlps, strict=True):
            y = mlp(normed)
            x = torch.addcmul(x, weight, y) if few and y.dtype == x.dtype else x + weight * y
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


class LevelRates(nn.Module):
    """The levels' rates as a parameter: `exp(log_rate)`, from given rates on."""

    def __init__(self, rates: Sequence[float]) -> None:
        super().__init__()
        self.given = tuple(rates)
        self.log_rate = nn.Parameter(torch.empty(len(self.given)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        logs = [math.log(rate) if rate > 0.0 else 0.0 for rate in self.given]
        with torch.no_grad():
            self.log_rate.copy_(torch.tensor(logs))

    def forward(self) -> Tensor:
        """[levels]; what it says of a level without a rate means nothing."""
        return self.log_rate.exp()


class BlockState(NamedTuple):
    """A block's state of each sequence: its mixer's and its channel's."""

    mixer: Any
    channel: Any


class Block(nn.Module):
    """`x <- x + mixer(norm(x))`, then the channel memory, which adds to the stream itself.

    With self-modifying Titans and a continuum memory this is Hope (Eq. 94-97); with attention and
    a continuum memory Hope-Attention; with attention and a feed-forward layer Transformer++; with
    attention and an in-context linear memory AdaTransformer (Eq. 69).
    """

    def __init__(self, mixer: Memory, channel: Channel, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.norm = RMSNorm(mixer.width, eps)
        self.mixer = mixer
        self.channel = channel

    def init(self, batch_size: int, **options: Any) -> BlockState:
        """The state before the first token (`device` and `dtype` as for memories)."""
        return BlockState(
            self.mixer.init(batch_size, **options), self.channel.init(batch_size, **options)
        )

    def forward(
        self, x: Tensor, state: BlockState | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, BlockState]:
        """[B, T, D] -> [B, T, D] and the state after the last token; mask as for memories."""
        mixer, channel = (None, None) if state is None else state
        y, mixer = self.mixer(self.norm(x), mixer, mask)
        x, channel = self.channel(x + y, channel, mask)
        return x, BlockState(mixer, channel)
