"""What every mixer memory is: a module with explicit state.

    memory = SomeMemory(SomeConfig(width=256, heads=4, ...))
    state = memory.init(batch_size)                 # trained initial state, position 0
    y, state = memory(x, state, mask)               # [B, T, D] -> [B, T, D]
    y, state = memory(x)                            # state=None: starts from `init`

**State** is a NamedTuple of tensors (nested tuples allowed, `None` for absent parts) whose first
dimension is the batch. It always has the field `position` ([B], int64): how many real tokens each
sequence has seen. Beside it stand whatever the memory needs to go on as if it had never stopped:
the convolution's tail, running weights, the weights at the start of the running chunk, a cache.
Nothing else is remembered; modules hold no hidden state. `nestling.tree` has the functions that
select, repeat, stack, detach and move any state; a model's state is the tuple of its layers'.

**Streaming.** Cutting a stream into calls of any sizes changes neither outputs nor states. Chunk
boundaries are absolute: a sequence's chunk ends when its own `position` is a multiple of it.

**Mask** ([B, T], bool, False = padding) may have any form. A padding token does not decay, write,
move the convolution or advance the position; its output is zero. Real tokens get the same result
as without padding. `mask=None` or all True is the quick path. Sequences of a batch may stand at
different positions; when they stand at the same one the quick path is used.

**Causality.** `y_t` depends on tokens up to t. Sequences never see each other.

**Precision.** Fast weights are float32 or better, whatever the module's or autocast's dtype.

**read and write.** `write(x, state)` is `forward` without its outputs. `read(x, state)` asks the
memory as it stands: every token is a query of its own, nothing changes, the convolution is skipped.

A memory implements `init`, `run` and `read`; `forward` and `write` are common. `run` gets tokens
already packed: real tokens first, `valid` ([B, T] bool, a prefix of True per row) or None if all
are real, and T >= 1; `position` is the one all sequences stand at, or None when they differ.
"""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nestling.tree import batch_size

__all__ = ["Memory", "Packed", "advance", "pack", "same_position", "state_dtype"]


class Packed(NamedTuple):
    """Where each row's real tokens lie: `order` brings them to the front, `valid` says which."""

    order: Tensor  # [B, N] long
    valid: Tensor  # [B, N] bool, a prefix of True per row

    def gather(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, N, D], real tokens first, zeros behind them."""
        picked = x.gather(1, self.order.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        return picked * self.valid.unsqueeze(-1).to(x.dtype)

    def scatter(self, y: Tensor, length: int) -> Tensor:
        """[B, N, D] -> [B, length, D]: the inverse of `gather`, zeros at padding."""
        y = y * self.valid.unsqueeze(-1).to(y.dtype)
        out = y.new_zeros(y.shape[0], length, y.shape[-1])
        return out.scatter_add(1, self.order.unsqueeze(-1).expand(-1, -1, y.shape[-1]), y)


def pack(mask: Tensor) -> Packed:
    """Bring the real tokens of every row to the front, in order, and cut what no row needs."""
    count = mask.sum(1)
    longest = int(count.max())
    order = torch.argsort((~mask).to(torch.uint8), dim=1, stable=True)[:, :longest]
    valid = torch.arange(longest, device=mask.device) < count.unsqueeze(1)
    return Packed(order, valid)


def advance(position: Tensor, x: Tensor, valid: Tensor | None) -> Tensor:
    """The position after the tokens of `x`: [B] -> [B]."""
    return position + (x.shape[1] if valid is None else valid.sum(1))


def same_position(position: Tensor) -> int | None:
    """The position shared by all sequences, or None when they differ."""
    first = int(position[0])
    return first if position.shape[0] == 1 or bool((position == first).all()) else None


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Fast weights are kept in float32 at least."""
    return torch.promote_types(dtype, torch.float32)


class Memory(nn.Module, abc.ABC):
    """A mixer memory with explicit state; see the module's docstring for the contract."""

    width: int

    @abc.abstractmethod
    def init(
        self,
        batch_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """The state before the first token. Device and dtype default to the parameters'."""

    @abc.abstractmethod
    def run(
        self, x: Tensor, state: Any, valid: Tensor | None, position: int | None
    ) -> tuple[Tensor, Any]:
        """Process packed tokens: [B, N, D], N >= 1, `valid` a prefix of True per row or None."""

    @abc.abstractmethod
    def read(self, x: Tensor, state: Any) -> Tensor:
        """Ask the memory as it stands, token by token on its own: [B, T, D] -> [B, T, D]."""

    def forward(
        self, x: Tensor, state: Any = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Read and write every token in turn: outputs [B, T, D] and the state after the last."""
        self._check(x, state, mask)
        position = 0 if state is None or x.shape[0] == 0 else same_position(state.position)
        if state is None:
            state = self.init(x.shape[0], device=x.device)
        if x.shape[0] == 0 or x.shape[1] == 0:
            return x, state
        if mask is None or bool(mask.all()):
            return self.run(x, state, None, position)
        packed = pack(mask)
        if packed.order.shape[1] == 0:
            return torch.zeros_like(x), state
        y, state = self.run(packed.gather(x), state, packed.valid, position)
        return packed.scatter(y, x.shape[1]), state

    def write(self, x: Tensor, state: Any = None, mask: Tensor | None = None) -> Any:
        """The state after the tokens of `x`, without their outputs."""
        return self.forward(x, state, mask)[1]

    def _check(self, x: Tensor, state: Any, mask: Tensor | None) -> None:
        if x.dim() != 3 or x.shape[-1] != self.width:
            raise ValueError(
                f"{type(self).__name__} takes x of shape [batch, tokens, {self.width}];"
                f" got {tuple(x.shape)}"
            )
        if mask is not None and (mask.dtype != torch.bool or mask.shape != x.shape[:2]):
            raise ValueError(
                f"mask must be bool of shape {tuple(x.shape[:2])} (False = padding);"
                f" got {mask.dtype} of shape {tuple(mask.shape)}"
            )
        if state is not None and batch_size(state) != x.shape[0]:
            raise ValueError(
                f"the state holds {batch_size(state)} sequences, x has {x.shape[0]}; select or"
                " repeat the state first (nestling.tree)"
            )
