"""AdaTransformer's channel: the MLP's weight becomes a memory that is written in context (Eq. 69).

Where a Transformer's channel reads a fixed weight, `y = W phi(x)`, this one reads
`M_t = M_{t-1} + v_t k_t^T`, from a meta-learned `M_0` (Eq. 21-23, 69): one level faster.
Shapes: B sequences, H heads, T tokens, D width, F hidden width, d = D/H, f = F/H.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nestling.memories.core import (
    Device,
    Dtype,
    Memory,
    advance,
    at_start,
    device_and_dtype,
    keep_in_graph,
    merge_heads,
    split_heads,
    state_dtype,
    state_start,
)
from nestling.norm import RMSNorm
from nestling.scan import scan


class AdaptiveState(NamedTuple):
    """Tokens seen and the running weight of every sequence."""

    position: Tensor  # [B] int64
    weight: Tensor  # [B, H, d, f]


class AdaptiveMLP(Memory):
    """An in-context linear memory of hidden width F: `M_t = M_{t-1} + v_t k_t^T` (Eq. 69).

    Keys and queries have norm one per head; the read `M_t q_t` is normalised, because the sum over
    a long context grows, and projected back.
    """

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        if hidden % heads:
            raise ValueError(f"heads={heads} must divide the hidden width; got {hidden}")
        self.width, self.heads = width, heads
        self.query = nn.Linear(width, hidden, bias=False)
        self.key = nn.Linear(width, hidden, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm = RMSNorm(width // heads)
        self.weight = nn.Parameter(torch.empty(heads, width // heads, hidden // heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in (self.query, self.key, self.value, self.out):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
        nn.init.normal_(self.weight, std=self.weight.shape[-1] ** -0.5)

    def init(self, batch_size: int, *, device: Device = None, dtype: Dtype = None) -> AdaptiveState:
        """The meta-learned `M_0` for every sequence."""
        device, dtype = device_and_dtype(self.weight, device, dtype)
        weight = self.weight.to(device, state_dtype(dtype))
        position = at_start(batch_size, device)
        return AdaptiveState(position, state_start(weight, batch_size))

    def run(
        self, x: Tensor, state: AdaptiveState, valid: Tensor | None, position: int | None
    ) -> tuple[Tensor, AdaptiveState]:
        """Write and read every token; see `Memory.run`."""
        k, v = self._unit(self.key, x), split_heads(self.value(x), self.heads).to(state.weight)
        rate = torch.ones(k.shape[:-1], dtype=k.dtype, device=k.device)  # [B, H, T]
        if valid is not None:
            rate = rate * valid.unsqueeze(1)
        q, keep = self._unit(self.query, x), torch.ones_like(rate)
        y, weight = scan(state.weight, k, v, rate, keep, q, erase=False, check=False)
        y = keep_in_graph(self._close(y, x), self.weight)
        return y, AdaptiveState(advance(state.position, x, valid), weight)

    def read(self, x: Tensor, state: AdaptiveState) -> Tensor:
        """`M q` for each token, at the memory as it stands."""
        return self._close(self._unit(self.query, x) @ state.weight.mT, x)

    def _unit(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, H, T, f] of norm one."""
        heads = split_heads(layer(x), self.heads)
        return nn.functional.normalize(heads.to(state_dtype(heads.dtype)), dim=-1)

    def _close(self, y: Tensor, x: Tensor) -> Any:
        return self.out(merge_heads(self.norm(y.to(self.norm.weight.dtype))).to(x.dtype))
