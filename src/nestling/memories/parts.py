"""What the memories share: the causal convolution, heads, and checks of their sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from nestling.memories.core import state_dtype
from nestling.norm import rms_norm
from nestling.scan.orders import is_any_order

__all__ = [
    "CausalConv",
    "Opened",
    "Shell",
    "check_sizes",
    "make_shell",
    "merge_heads",
    "split_heads",
    "whole_number",
]


def whole_number(name: str, value: object, least: int = 1) -> None:
    """Reject what is not a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}; got {value!r}")


def check_sizes(width: int, heads: int, conv: int = 1) -> None:
    """Reject a width that the heads do not divide, and a convolution without a tap."""
    whole_number("width", width)
    whole_number("heads", heads)
    whole_number("conv", conv)
    if width % heads:
        raise ValueError(f"heads must divide width; got heads={heads} and width={width}")


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, D] -> [B, H, T, D / H]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[B, H, T, D / H] -> [B, T, D]."""
    return x.transpose(1, 2).flatten(2)


def _taps(x: Tensor, weight: Tensor) -> Tensor:
    """`_Taps` in plain operations, differentiable to any order."""
    tokens = x.shape[1] - weight.shape[0] + 1
    y = x[:, :tokens] * weight[0]
    for i in range(1, weight.shape[0]):
        y = y + x[:, i : i + tokens] * weight[i]
    return y


class _Taps(torch.autograd.Function):
    """`y_t = sum_i weight_i x_{t+i}`, channel by channel; by hand because autograd would build a
    tensor of zeros for every tap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        tokens = x.shape[1] - weight.shape[0] + 1
        y = x[:, :tokens] * weight[0]
        for i in range(1, weight.shape[0]):
            y.addcmul_(x[:, i : i + tokens], weight[i])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        tokens = dy.shape[1]
        dx, dweight = torch.zeros_like(x), torch.empty_like(weight)
        for i in range(weight.shape[0]):
            dx[:, i : i + tokens].addcmul_(dy, weight[i])
            torch.sum(dy * x[:, i : i + tokens], (0, 1), out=dweight[i])
        return dx, dweight


class CausalConv(nn.Module):
    """A convolution over the last `size` tokens, channel by channel, with its tail as state.

    It starts near the identity: the newest token's tap is one, the older ones are small.
    """

    def __init__(self, width: int, size: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        size = self.weight.shape[0]
        with torch.no_grad():
            nn.init.normal_(self.weight, std=0.5 / math.sqrt(size))
            self.weight[-1] = 1.0

    def init(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The tail before the first token: [B, size - 1, D] zeros."""
        size, width = self.weight.shape
        return torch.zeros(batch_size, size - 1, width, device=device, dtype=dtype)

    def forward(self, x: Tensor, tail: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """[B, T, D] and the inputs before it, [B, size - 1, D]; the new tail ends at each row's
        last valid token."""
        size, (_, tokens, width) = self.weight.shape[0], x.shape
        if size == 1:
            return x * self.weight[0], tail
        longer = torch.cat([tail.to(x.dtype), x], 1)
        taps = _taps if is_any_order() else _Taps.apply
        y: Tensor = taps(longer, self.weight.to(x.dtype))
        if valid is None:
            return y, longer[:, tokens:].to(tail.dtype)
        last = valid.sum(1, keepdim=True) + torch.arange(size - 1, device=x.device)
        kept = longer.gather(1, last.unsqueeze(-1).expand(-1, -1, width))
        return y, kept.to(tail.dtype)


class Opened(NamedTuple):
    """Tokens on their way in: per-head parts, the output gate, the convolved tokens, the tail."""

    parts: list[Tensor]  # each [B, H, T, d], float32 or better
    gate: Tensor | None  # [B, T, D]
    x: Tensor  # [B, T, D], convolved unless each part is
    tail: Tensor  # [B, conv - 1, D], or as wide as all parts


class Shell(nn.Module):
    """What surrounds every fast-weight memory: convolution, projections to heads, and back.

    The convolution comes before the projections, or with `conv_each` after them, so that each has
    taps of its own: a key can then be the last token's and a query this one's in all channels. On
    the way out the reads are normalised per head, gated by the input, and mixed.
    """

    def __init__(
        self, width: int, heads: int, parts: int, *, conv: int, gate: bool, conv_each: bool = False
    ) -> None:
        super().__init__()
        self.width, self.heads, self.gated, self.each = width, heads, gate, conv_each
        self.conv = CausalConv(parts * width if conv_each else width, conv) if conv > 1 else None
        self.project = nn.Linear(width, (parts + gate) * width, bias=False)
        self.norm = nn.Parameter(torch.ones(width // heads))
        self.out = nn.Linear(width, width, bias=False)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.norm)

    def init(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The convolution's tail before the first token (nothing without a convolution)."""
        if self.conv is None:
            return torch.zeros(batch_size, 0, self.width, device=device, dtype=dtype)
        return self.conv.init(batch_size, device, dtype)

    def open(self, x: Tensor, tail: Tensor, valid: Tensor | None) -> Opened:
        """Convolve and project tokens: [B, T, D]."""
        if self.conv is None:
            return self.ask(x, tail)
        if not self.each:
            x, tail = self.conv(x, tail, valid)
            return self.ask(x, tail)
        projected, gate = self.project(x), None
        if self.gated:
            parts = projected.shape[-1] - self.width
            projected, gate = projected.split([parts, self.width], dim=-1)
        projected, tail = self.conv(projected, tail, valid)
        return Opened(self._split(projected.split(self.width, dim=-1)), gate, x, tail)

    def ask(self, x: Tensor, tail: Tensor) -> Opened:
        """Project tokens without the convolution."""
        pieces = self.project(x).split(self.width, dim=-1)  # one split: one gradient, put together
        if not self.gated:
            return Opened(self._split(pieces), None, x, tail)
        return Opened(self._split(pieces[:-1]), pieces[-1], x, tail)

    def _split(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        fast = state_dtype(pieces[0].dtype)
        return [split_heads(piece, self.heads).to(fast) for piece in pieces]

    def close(self, y: Tensor, gate: Tensor | None) -> Tensor:
        """Normalise the reads per head, gate them, mix the heads: [B, H, T, d] -> [B, T, D]."""
        y = merge_heads(rms_norm(y, self.norm.to(y.dtype), 1e-6))
        y = y.to(self.out.weight.dtype)
        return self.out(y if gate is None else y * silu(gate))


def make_shell(config: Any, parts: int) -> Shell:
    """The shell of a memory with so many projections, as its configuration says."""
    return Shell(
        config.width,
        config.heads,
        parts,
        conv=config.conv,
        gate=config.gate,
        conv_each=config.conv_each,
    )
