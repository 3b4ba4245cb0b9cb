"""The contract of every mixer memory: a module with explicit state.

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

**Parts.** What most memories share follows below: the shell of convolution and projections.

A memory implements `init`, `run` and `read`; `forward` and `write` are common. `run` gets tokens
already packed: real tokens first, `valid` ([B, T] bool, a prefix of True per row) or None if all
are real, and T >= 1; `position` is the one all sequences stand at, or None when they differ.
"""

from __future__ import annotations

import abc
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from nestling.checks import whole_number
from nestling.norm import rms_norm

__all__ = [
    "CausalConv",
    "Device",
    "Dtype",
    "Memory",
    "Opened",
    "Packed",
    "Room",
    "Shell",
    "TokenReader",
    "advance",
    "at_start",
    "check_sizes",
    "device_and_dtype",
    "keep_in_graph",
    "make_shell",
    "merge_heads",
    "pack_rows",
    "same_position",
    "split_heads",
    "state_dtype",
    "state_start",
    "unknown",
]


TokenReader = Callable[[Tensor, Tensor, Any], tuple[Tensor, Any]]
"""`reader(x, onto, state)`: the output added to `onto` [B, D], in place, and the state after one
token of every sequence [B, 1, D]. Without gradients, at the dtype of all weights and states."""


class Room(threading.local):
    """Places for results that nobody keeps, with their views, made once for many calls.

    Every thread has its own, for the batch of its last call. Where calls do not wait for what they
    asked for (all devices but the CPU), they are made for every call.
    """

    def __init__(self, make: Callable[[int], Any], device: torch.device) -> None:
        self._make, self._keep = make, device.type == "cpu"
        self._batch, self._kept = -1, None

    def of(self, batch: int) -> Any:
        """The places for so many sequences."""
        if batch != self._batch:
            with torch.inference_mode(mode=False):
                places = self._make(batch)
            if not self._keep:
                return places
            self._batch, self._kept = batch, places
        return self._kept


Device = torch.device | str | None
Dtype = torch.dtype | None
"""The device and the dtype of a state; None takes those of the module's parameters."""


class Packed(NamedTuple):
    """Where each row's real tokens lie: `order` brings them to the front, `valid` says which."""

    order: Tensor  # [B, N] long
    valid: Tensor  # [B, N] bool, a prefix of True per row

    def gather(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, N, D], real tokens first, zeros behind them whatever was there."""
        picked = x.gather(1, self.order.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        return picked.masked_fill(~self.valid.unsqueeze(-1), 0.0)

    def scatter(self, y: Tensor, length: int) -> Tensor:
        """[B, N, D] -> [B, length, D]: the inverse of `gather`, zeros at padding."""
        y = y.masked_fill(~self.valid.unsqueeze(-1), 0.0)
        out = y.new_zeros(y.shape[0], length, y.shape[-1])
        return out.scatter_add(1, self.order.unsqueeze(-1).expand(-1, -1, y.shape[-1]), y)


def pack_rows(mask: Tensor, longest: int | None = None) -> Packed:
    """Bring the real tokens of every row, at most `longest`, to the front, in order."""
    if longest is None:
        longest = mask.shape[1] if unknown(mask) else int(mask.sum(1).max())
    order = torch.argsort((~mask).to(torch.uint8), dim=1, stable=True)[:, :longest]
    valid = torch.arange(longest, device=mask.device) < mask.sum(1).unsqueeze(1)
    return Packed(order, valid)


def unknown(mask: Tensor) -> bool:
    """Whether nothing may depend on what is in a mask: in compiled code, on the meta device."""
    return torch.compiler.is_compiling() or mask.is_meta


def at_start(batch: int, device: torch.device | str | None) -> Tensor:
    """The position of sequences that have seen nothing: [B]."""
    return _known(torch.zeros(batch, dtype=torch.int64, device=device), 0)


def advance(position: Tensor, x: Tensor, valid: Tensor | None) -> Tensor:
    """The position after the tokens of `x`: [B] -> [B]."""
    if valid is not None:
        return position + valid.sum(1)
    after = position + x.shape[1]
    if torch.compiler.is_compiling() or not hasattr(position, KNOWN):
        return after
    before = getattr(position, KNOWN)
    return _known(after, None if before is None else before + x.shape[1])


def same_position(position: Tensor) -> int | None:
    """The position shared by all sequences, or None when they differ.

    Asking a device for it means waiting for all it has to do. So the answer is kept with the
    tensor, and `advance` hands it on: a stream is asked once, or never where it begins with `init`.
    """
    if torch.compiler.is_compiling():
        first = int(position[0])
        return first if position.shape[0] == 1 or bool((position == first).all()) else None
    if not hasattr(position, KNOWN):
        if position.is_meta:
            return None
        low, high = torch.stack(torch.aminmax(position)).tolist()
        _known(position, low if low == high else None)
    shared: int | None = getattr(position, KNOWN)
    return shared


KNOWN = "_same_position"
"""The attribute of a position that holds what is known of it: one number for all, or None."""


def _known(position: Tensor, shared: int | None) -> Tensor:
    if not torch.compiler.is_compiling():
        setattr(position, KNOWN, shared)
    return position


def device_and_dtype(
    like: Tensor, device: Device, dtype: Dtype
) -> tuple[torch.device, torch.dtype]:
    """The device and dtype of a new state: as asked for, else those of a parameter."""
    device = like.device if device is None else torch.device(device)
    return device, like.dtype if dtype is None else dtype


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Fast weights are kept in float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def state_start(weight: Tensor, batch: int) -> Tensor:
    """A trained start for every sequence, [B, ...], as data of its own.

    A state that shared memory with a parameter would change with it, and would point to nothing
    once FSDP2 has freed the parameter.
    """
    return weight.expand(batch, *weight.shape).clone()


def keep_in_graph(y: Tensor, *starts: Tensor) -> Tensor:
    """`y` as it is, with trained starts in its graph.

    A carried state has left them behind, so they get no gradient; processes that share the work
    (DDP, FSDP2) wait for one of every parameter, and with this it is zero.
    """
    if not torch.is_grad_enabled():
        return y
    learned = [start for start in starts if start.requires_grad]
    if not learned:
        return y
    nothing = torch.stack([0.0 * start.sum() for start in learned]).sum()
    return y + nothing.to(y.dtype)


class Memory(nn.Module, abc.ABC):
    """A mixer memory with explicit state; see the module's docstring for the contract."""

    width: int

    @abc.abstractmethod
    def init(self, batch_size: int, *, device: Device = None, dtype: Dtype = None) -> Any:
        """The state before the first token. Device and dtype default to the parameters'."""

    @abc.abstractmethod
    def run(
        self, x: Tensor, state: Any, valid: Tensor | None, position: int | None
    ) -> tuple[Tensor, Any]:
        """Process packed tokens: [B, N, D], N >= 1, `valid` a prefix of True per row or None."""

    @abc.abstractmethod
    def read(self, x: Tensor, state: Any) -> Tensor:
        """Ask the memory as it stands, token by token on its own: [B, T, D] -> [B, T, D]."""

    def token_reader(self) -> TokenReader | None:
        """`run` of one token a sequence in fewer operations, from copies of the weights as they
        are now; None where there is none, or where the options ask for something else."""
        return None

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
        if mask is None:
            return self.run(x, state, None, position)
        fewest, most = 0, x.shape[1]
        if not unknown(mask):
            fewest, most = torch.stack(torch.aminmax(mask.sum(1))).tolist()
        if fewest == x.shape[1]:
            return self.run(x, state, None, position)
        if most == 0:
            return torch.zeros_like(x), state
        packed = pack_rows(mask, most)
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
        if state is not None and state.position.shape[0] != x.shape[0]:
            held = state.position.shape[0]
            raise ValueError(
                f"the state holds {held} sequences, x has {x.shape[0]}; select or repeat the state"
                " first (nestling.tree)"
            )


def check_sizes(width: int, heads: int, conv: int = 1) -> None:
    """Reject a width that the heads do not divide, and a convolution without a tap."""
    whole_number("width", width)
    whole_number("heads", heads)
    whole_number("conv", conv)
    if width % heads:
        raise ValueError(f"heads must divide width; got heads={heads} and width={width}")


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, D] -> [B, H, T, D / H]."""
    batch, tokens, width = x.shape
    return x.view(batch, tokens, heads, width // heads).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[B, H, T, D / H] -> [B, T, D]."""
    return x.transpose(1, 2).flatten(2)


def _taps(x: Tensor, weight: Tensor) -> Tensor:
    """`_Taps` in plain operations."""
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
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        tokens, size = dy.shape[1], weight.shape[0]
        if torch.is_grad_enabled():  # somebody differentiates the gradient: plain operations
            shifted = [pad(dy * weight[i], (0, 0, i, size - 1 - i)) for i in range(size)]
            sums = [(dy * x[:, i : i + tokens]).sum((0, 1)) for i in range(size)]
            return torch.stack(shifted).sum(0), torch.stack(sums)
        dx, dweight = torch.zeros_like(x), torch.empty_like(weight)
        for i in range(size):
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
        weight = self.weight.to(x.dtype)
        if tokens == 1:
            y: Tensor = (longer * weight).sum(1, keepdim=True)
        else:
            plain = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
            y = (_taps if plain else _Taps.apply)(longer, weight)
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
    """The layers around every fast-weight memory: convolution, projections to heads, and back.

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
        projected = self.project(x)  # one split: one gradient, put together
        pieces = projected.chunk(projected.shape[-1] // self.width, dim=-1)
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


def make_shell(config: Any, parts: int, projections: Any = None) -> Shell:
    """The shell of a memory with so many projections, as its configuration says."""
    how = config if projections is None else projections
    return Shell(
        config.width, config.heads, parts,
        conv=how.conv, gate=config.gate, conv_each=how.conv_each,
    )  # fmt: skip
