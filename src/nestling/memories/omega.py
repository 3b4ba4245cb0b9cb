"""The Omega rule as a memory (Eq. 68): each step learns from the last `window` pairs at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from nestling.checks import whole_number
from nestling.memories.core import Device, Dtype, advance, keep_in_graph
from nestling.memories.linear import LinearConfig, MatrixMemory
from nestling.norm import unit
from nestling.scan.delta.chunk import products


@dataclass(frozen=True, kw_only=True)
class OmegaConfig(LinearConfig):
    """window: how many of the last pairs every step learns from; each counts 1 / window."""

    window: int = 4
    chunk: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("window", self.window)
        if not self.erase:
            raise ValueError("the Omega rule is on the L2 objective: erase must be True")


class OmegaState(NamedTuple):
    """Tokens seen, the convolution's tail, the memory, and the last `window - 1` pairs."""

    position: Tensor  # [B] int64
    tail: Tensor  # [B, conv - 1, D], or all parts wide with conv_each
    weight: Tensor  # [B, H, d, d]
    keys: Tensor  # [B, H, window - 1, d]
    values: Tensor  # [B, H, window - 1, d]
    rates: Tensor  # [B, H, window - 1], zero where there was no token


def omega_scan(
    weight: Tensor, k: Tensor, v: Tensor, q: Tensor, rate: Tensor, retain: Tensor, *, chunk: int
) -> tuple[Tensor, Tensor]:
    """Reads and end state of `M_t = alpha_t M_{t-1} - sum_i eta_i grad |M k_i - v_i|^2 / 2`, the
    sum over token t's window, all gradients at `M_{t-1}` (Eq. 68).

    k, v are [..., T, c, d] and rate [..., T, c]: the c pairs of each token's window; q [..., T, d],
    retain [..., T]. As in the one kernel, what a chunk writes solves one triangular system; pairs
    of the same token do not see each other.
    """
    reads = []
    window = k.shape[-2]
    for at in range(0, q.shape[-2], chunk):
        now = slice(at, at + chunk)
        keys, values, eta = k[..., now, :, :], v[..., now, :, :], rate[..., now, :]
        decay, g = products(retain[..., now]), retain[..., now].cumprod(-1)  # g_t / g_s, g_t
        past = pad(decay[..., :-1, :], (0, 0, 1, 0))  # g_{t-1} / g_s, zero from token t on
        keys, values = keys.flatten(-3, -2), values.flatten(-3, -2)  # [..., C c, d]
        eta = eta.flatten(-2, -1).unsqueeze(-1)
        ratio = past.repeat_interleave(window, -1)  # [..., C, C c]
        before = pad(g[..., :-1], (1, 0), value=1.0).repeat_interleave(window, -1).unsqueeze(-1)
        system = eta * ratio.repeat_interleave(window, -2) * (keys @ keys.mT)
        right = eta * (values - before * (keys @ weight.mT))
        w = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        asked, after = q[..., now, :], decay.repeat_interleave(window, -1)  # [..., C, C c]
        seen = (after * (asked @ keys.mT)) @ w
        reads.append(g.unsqueeze(-1) * (asked @ weight.mT) + seen)
        tail = after[..., -1, :].unsqueeze(-1)
        weight = g[..., -1, None, None] * weight + (tail * w).mT @ keys
    return torch.cat(reads, -2), weight


class Omega(MatrixMemory):
    """A matrix memory per head that learns by the Omega rule (Eq. 68) with retention."""

    config: OmegaConfig

    def init(self, batch_size: int, *, device: Device = None, dtype: Dtype = None) -> OmegaState:
        """The trained initial memory (zero at first) and an empty window for every sequence."""
        begun = self.begin(batch_size, device, dtype)
        _, heads, _, size = begun.weight.shape
        pairs = begun.weight.new_zeros(batch_size, heads, self.config.window - 1, size)
        return OmegaState(*begun, pairs, pairs.clone(), pairs[..., 0].clone())

    def run(
        self, x: Tensor, state: OmegaState, valid: Tensor | None, position: int | None
    ) -> tuple[Tensor, OmegaState]:
        """Project, gather each token's window, scan, and project back; see `Memory.run`."""
        opened = self.shell.open(x, state.tail, valid)
        q, k, v = opened.parts
        rate, retain = self.gates(opened.x, valid)
        window, tokens = self.config.window, x.shape[1]
        keys = torch.cat([state.keys, unit(k)], 2)
        values = torch.cat([state.values, v], 2)
        rates = torch.cat([state.rates, rate], 2)

        def windows(part: Tensor) -> Tensor:
            """The last c of them for every token: [B, H, T + c - 1, ...] -> [B, H, T, c, ...]."""
            return torch.stack([part[:, :, i : i + tokens] for i in range(window)], 3)

        eta = windows(rates) / window
        if valid is not None:
            eta = eta * valid[:, None, :, None]
        y, weight = omega_scan(
            state.weight,
            windows(keys),
            windows(values),
            unit(q),
            eta,
            retain,
            chunk=self.config.chunk,
        )
        count = valid.sum(1) if valid is not None else x.new_full(x.shape[:1], tokens).long()
        last = count.unsqueeze(1) + torch.arange(window - 1, device=x.device)
        pick = last[:, None, :].expand(-1, self.config.heads, -1)
        wide = pick.unsqueeze(-1).expand(-1, -1, -1, k.shape[-1])
        after = OmegaState(
            advance(state.position, x, valid),
            opened.tail,
            weight,
            keys.gather(2, wide),
            values.gather(2, wide),
            rates.gather(2, pick),
        )
        return keep_in_graph(self.shell.close(y, opened.gate), self.weight), after
