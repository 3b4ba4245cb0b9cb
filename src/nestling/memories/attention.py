"""Softmax attention as a memory: non-parametric, it keeps every pair, or the last ones of a window.

Eq. 62-63: attention is the Nadaraya-Watson estimate of the value given the query, the best constant
in a local L2 regression weighted by `exp(q . k)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from nestling.checks import whole_number
from nestling.memories.core import (
    CausalConv,
    Device,
    Dtype,
    Memory,
    advance,
    at_start,
    check_sizes,
    device_and_dtype,
    merge_heads,
    split_heads,
    unknown,
)


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """window: how many tokens a query sees, itself included; None sees all. rope: the base of
    rotary positions, 0 for none. conv: taps of a causal convolution before it, 1 for none."""

    width: int
    heads: int
    window: int | None = None
    rope: float = 10000.0
    conv: int = 1

    def __post_init__(self) -> None:
        check_sizes(self.width, self.heads, self.conv)
        if self.window is not None:
            whole_number("window", self.window)
        if self.rope < 0:
            raise ValueError(f"rope must be a positive base, or 0 for none; got {self.rope}")
        if self.rope and (self.width // self.heads) % 2:
            raise ValueError(
                f"rotary positions need an even head width; got {self.width // self.heads}"
            )


class AttentionState(NamedTuple):
    """Tokens seen, the convolution's tail, and the cache.

    Without a window the pair of position p stands at index p; what lies at or behind the position
    does not count. With one, the last `window - 1` pairs stand at the end, the newest last.
    """

    position: Tensor  # [B] int64
    tail: Tensor  # [B, conv - 1, D]
    keys: Tensor  # [B, H, S, d]
    values: Tensor  # [B, H, S, d]


def rotate(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotary positions: turn each pair of channels by an angle that grows with the position.

    x is [B, H, T, d], positions [T] or [B, T].
    """
    half = x.shape[-1] // 2
    powers = torch.arange(half, device=x.device, dtype=torch.float64) / half
    angle = positions.double().unsqueeze(-1) * base**-powers  # [.., T, d / 2]
    if positions.dim() == 2:
        angle = angle.unsqueeze(1)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Attention(Memory):
    """Causal softmax attention, Eq. 62 (all tokens) and Eq. 63 (sliding window)."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        self.config, self.width = config, config.width
        self.conv = CausalConv(config.width, config.conv) if config.conv > 1 else None
        self.project = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def init(
        self, batch_size: int, *, device: Device = None, dtype: Dtype = None
    ) -> AttentionState:
        """An empty cache (of constant size with a window)."""
        device, dtype = device_and_dtype(self.out.weight, device, dtype)
        size = 0 if self.config.window is None else self.config.window - 1
        shape = (batch_size, self.config.heads, size, self.width // self.config.heads)
        empty = torch.zeros(shape, device=device, dtype=dtype)
        tail = torch.zeros(batch_size, self.config.conv - 1, self.width, device=device, dtype=dtype)
        position = at_start(batch_size, device)
        return AttentionState(position, tail, empty, empty.clone())

    def run(
        self, x: Tensor, state: AttentionState, valid: Tensor | None, position: int | None
    ) -> tuple[Tensor, AttentionState]:
        """Project, attend over cache and tokens, project back; see `Memory.run`."""
        tail = state.tail
        if self.conv is not None:
            x, tail = self.conv(x, tail, valid)
        q, k, v = (split_heads(p, self.config.heads) for p in self.project(x).chunk(3, dim=-1))
        steps = torch.arange(x.shape[1], device=x.device)
        where = state.position.unsqueeze(1) + steps if position is None else position + steps
        if self.config.rope:
            q, k = (rotate(part, where, self.config.rope) for part in (q, k))
        if self.config.window is not None:
            y, keys, values = _slide(q, k, v, state, valid, self.config.window)
        elif position is not None and valid is None:
            y, keys, values = _append(q, k, v, state, position)
        else:
            y, keys, values = _insert(q, k, v, state, valid)
        y = self.out(merge_heads(y))
        return y, AttentionState(advance(state.position, x, valid), tail, keys, values)

    def read(self, x: Tensor, state: AttentionState) -> Tensor:
        """Each token asks the cache as the next one would; what is asked is not stored."""
        q = split_heads(self.project(x)[..., : self.width], self.config.heads)
        if self.config.rope:
            where = state.position.unsqueeze(1).expand(-1, x.shape[1])
            q = rotate(q, where, self.config.rope)
        size = state.keys.shape[2]
        slots = torch.arange(size, device=x.device)
        age = size - slots if self.config.window is not None else slots + 1
        seen = (age <= state.position.unsqueeze(1))[:, None, None]  # [B, 1, 1, S]
        seen = seen.expand(-1, 1, x.shape[1], -1)
        y = scaled_dot_product_attention(q, state.keys, state.values, attn_mask=seen)
        return self.out(merge_heads(torch.where(seen.any(-1, keepdim=True), y, 0.0)))


def _append(
    q: Tensor, k: Tensor, v: Tensor, state: AttentionState, position: int
) -> tuple[Tensor, Tensor, Tensor]:
    """All sequences stand at the same position: the new pairs follow the old ones."""
    keys = torch.cat([state.keys[:, :, :position].to(k.dtype), k], 2) if position else k
    values = torch.cat([state.values[:, :, :position].to(v.dtype), v], 2) if position else v
    tokens = q.shape[2]
    if position == 0 or tokens == 1:
        y = scaled_dot_product_attention(q, keys, values, is_causal=bool(tokens > 1))
    else:
        seen = torch.ones(tokens, keys.shape[2], dtype=torch.bool, device=q.device)
        y = scaled_dot_product_attention(q, keys, values, attn_mask=seen.tril(position))
    return y, keys, values


def _insert(
    q: Tensor, k: Tensor, v: Tensor, state: AttentionState, valid: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences at different positions: each writes its pairs behind its own."""
    batch, heads, tokens, size = k.shape
    where = state.position.unsqueeze(1) + torch.arange(tokens, device=k.device)  # [B, T]
    count = where.new_full((batch,), tokens) if valid is None else valid.sum(1)
    if unknown(count):  # enough for any
        room = state.keys.shape[2] + tokens
    else:
        room = max(int((state.position + count).max()), state.keys.shape[2])
    target = where if valid is None else where.masked_fill(~valid, room)  # padding is dropped
    index = target[:, None, :, None].expand(-1, heads, -1, size)

    def put(old: Tensor, new: Tensor) -> Tensor:
        longer = pad(old.to(new.dtype), (0, 0, 0, room + 1 - old.shape[2]))
        return longer.scatter(2, index, new)[:, :, :room]

    keys, values = put(state.keys, k), put(state.values, v)
    seen = torch.arange(room, device=k.device) <= where[:, None, :, None]  # [B, 1, T, S]
    return scaled_dot_product_attention(q, keys, values, attn_mask=seen), keys, values


def _slide(
    q: Tensor, k: Tensor, v: Tensor, state: AttentionState, valid: Tensor | None, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A window: the past is the last `window - 1` pairs, and queries go block by block."""
    past = window - 1
    keys = torch.cat([state.keys.to(k.dtype), k], 2)
    values = torch.cat([state.values.to(v.dtype), v], 2)
    _, heads, tokens, size = k.shape
    first = (past - state.position).clamp_min(0)[:, None, None, None]  # oldest real pair
    block = max(window, 64)
    reads = []
    for at in range(0, tokens, block):
        stop = min(at + block, tokens)
        rows = torch.arange(at, stop, device=q.device).unsqueeze(1)  # sees columns row .. row+past
        columns = torch.arange(at, stop + past, device=q.device)
        seen = (columns >= rows) & (columns <= rows + past) & (columns >= first)
        near = slice(at, stop + past)
        reads.append(
            scaled_dot_product_attention(
                q[:, :, at:stop], keys[:, :, near], values[:, :, near], attn_mask=seen
            )
        )
    y = torch.cat(reads, 2)
    if valid is None:
        return y, keys[:, :, tokens:], values[:, :, tokens:]
    last = valid.sum(1, keepdim=True) + torch.arange(past, device=k.device)  # [B, past]
    index = last[:, None, :, None].expand(-1, heads, -1, size)
    return y, keys.gather(2, index), values.gather(2, index)
