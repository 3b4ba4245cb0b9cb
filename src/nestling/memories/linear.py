"""Matrix memories with static projections: one class, many models (Eq. 5, 14-18, 64-65).

`M_t = M_{t-1} (alpha_t I - eta_t k_t k_t^T) + eta_t v_t k_t^T`, read `y_t = M_t q_t`. Without the
`k k^T` term it is Hebbian: linear attention (alpha = 1) or, with retention, RetNet and its kin.
With it, it is DeltaNet, and gated delta with retention. The configurations name the members.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from nestling.checks import one_of, whole_number
from nestling.memories.core import (
    Device,
    Dtype,
    Memory,
    Opened,
    advance,
    at_start,
    check_sizes,
    device_and_dtype,
    keep_in_graph,
    make_shell,
    state_dtype,
    state_start,
)
from nestling.norm import unit
from nestling.scan import BACKENDS
from nestling.scan.delta.api import scan_unchecked
from nestling.scan.delta.step import TokenParts, takes, token_step


@dataclass(frozen=True, kw_only=True)
class LinearConfig:
    """A matrix memory with static projections.

    erase: learn by the delta rule (Eq. 65) instead of adding (Eq. 15). retain: "all" keeps
    everything, "fixed" forgets at one pace per head (RetNet), "gated" as each token says. rate:
    "one", or "gated"; negative doubles gated rates, so that eigenvalues reach -1. chunk: tokens
    solved together, without effect on the result. conv_each: the causal convolution acts on each
    projection instead of once before them. backend: which kernels run the scan, a name from
    `nestling.scan.BACKENDS`; "auto" is Triton's or fla's on CUDA and the chunked form elsewhere.
    """

    width: int
    heads: int
    erase: bool = True
    retain: str = "gated"
    rate: str = "gated"
    negative: bool = False
    chunk: int = 64
    conv: int = 4
    conv_each: bool = False
    gate: bool = True
    backend: str = "auto"

    def __post_init__(self) -> None:
        check_sizes(self.width, self.heads, self.conv)
        whole_number("chunk", self.chunk)
        one_of("backend", self.backend, ("auto", *BACKENDS))
        one_of("retain", self.retain, ("all", "fixed", "gated"))
        one_of("rate", self.rate, ("one", "gated"))

    def scan(
        self, weight: Tensor, k: Tensor, v: Tensor, q: Tensor, rate: Tensor, retain: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Reads and the memory after all tokens: [B, H, T, d] each, gates [B, H, T]."""
        if k.shape[-2] == 1 and self.backend == "auto" and takes(weight, k, v, rate):
            both = unit(torch.cat([k, q], -2))
            token = TokenParts(both, v, rate.unsqueeze(-1), retain.unsqueeze(-1))
            return token_step(weight, token, self.erase, "after")
        return scan_unchecked(
            weight,
            unit(k),
            v,
            rate,
            retain,
            unit(q),
            erase=self.erase,
            chunk=self.chunk,
            backend=self.backend,
        )


@dataclass(frozen=True, kw_only=True)
class LinearAttentionConfig(LinearConfig):
    """Linear attention, `M_t = M_{t-1} + v_t k_t^T` (Eq. 14-18)."""

    erase: bool = False
    retain: str = "all"
    rate: str = "one"


@dataclass(frozen=True, kw_only=True)
class RetentionConfig(LinearConfig):
    """Hebbian with decay, `M_t = alpha M_{t-1} + v_t k_t^T` (Eq. 64); RetNet: one alpha a head."""

    erase: bool = False
    retain: str = "fixed"
    rate: str = "one"


@dataclass(frozen=True, kw_only=True)
class DeltaNetConfig(LinearConfig):
    """DeltaNet, `M_t = M_{t-1} (I - eta_t k_t k_t^T) + eta_t v_t k_t^T` (Eq. 65)."""

    retain: str = "all"


@dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig(LinearConfig):
    """The delta rule with a retention that each token chooses."""


class LinearState(NamedTuple):
    """Tokens seen, the convolution's tail, and the memory of each head."""

    position: Tensor  # [B] int64
    tail: Tensor  # [B, conv - 1, D], or all parts wide with conv_each
    weight: Tensor  # [B, H, d, d]


class TokenGates(nn.Module):
    """Rate and retention of each token and head, bounded; padding neither writes nor decays.

    Retention starts where half of a write survives 512 tokens or more, and rates at 0.5.
    """

    def __init__(self, config: LinearConfig) -> None:
        super().__init__()
        self.config = config
        self.rate = nn.Linear(config.width, config.heads) if config.rate == "gated" else None
        self.retain = nn.Linear(config.width, config.heads) if config.retain == "gated" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer, bias in ((self.rate, 0.0), (self.retain, 6.5)):
            if layer is not None:
                nn.init.normal_(layer.weight, std=0.1 / math.sqrt(self.config.width))
                nn.init.constant_(layer.bias, bias)

    def forward(self, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """[B, T, D] -> rate and retention, each [B, H, T]."""
        shape = (x.shape[0], self.config.heads, x.shape[1])
        fast = state_dtype(x.dtype)
        if self.rate is None:
            rate = x.new_ones(shape, dtype=fast)
        else:
            most = 2.0 if self.config.negative else 1.0
            rate = most * torch.sigmoid(self.rate(x).to(fast)).transpose(1, 2)
        if self.retain is not None:
            retain = logsigmoid(self.retain(x).to(fast)).exp().transpose(1, 2)
        elif self.config.retain == "fixed":
            pace = torch.arange(self.config.heads, device=x.device, dtype=fast)
            retain = (1 - 2.0 ** (-7 - pace)).view(1, -1, 1).expand(shape)
        else:
            retain = x.new_ones(shape, dtype=fast)
        if valid is not None:
            rate = torch.where(valid.unsqueeze(1), rate, 0.0)
            retain = torch.where(valid.unsqueeze(1), retain, 1.0)
        return rate, retain


class MatrixMemory(Memory):
    """A trained matrix per head, the shell around it and the gates: `LinearMemory` and `Omega`."""

    def __init__(self, config: LinearConfig) -> None:
        super().__init__()
        self.config, self.width = config, config.width
        size = config.width // config.heads
        self.shell = make_shell(config, 3)
        self.gates = TokenGates(config)
        self.weight = nn.Parameter(torch.zeros(config.heads, size, size))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def begin(self, batch_size: int, device: Device, dtype: Dtype) -> LinearState:
        """The trained initial memory (zero at first) for every sequence."""
        device, dtype = device_and_dtype(self.weight, device, dtype)
        return LinearState(
            at_start(batch_size, device),
            self.shell.init(batch_size, device, dtype),
            state_start(self.weight.to(device, state_dtype(dtype)), batch_size),
        )

    def read(self, x: Tensor, state: Any) -> Tensor:
        """`M q` for each token, at the memory as it stands."""
        opened: Opened = self.shell.ask(x, state.tail)
        return self.shell.close(unit(opened.parts[0]) @ state.weight.mT, opened.gate)


class LinearMemory(MatrixMemory):
    """A matrix memory per head with static projections (Eq. 5, 14-18, 64-65)."""

    def init(self, batch_size: int, *, device: Device = None, dtype: Dtype = None) -> LinearState:
        """The trained initial memory (zero at first) for every sequence."""
        return self.begin(batch_size, device, dtype)

    def run(
        self, x: Tensor, state: LinearState, valid: Tensor | None, position: int | None
    ) -> tuple[Tensor, LinearState]:
        """Project, scan, and project back; see `Memory.run`."""
        opened = self.shell.open(x, state.tail, valid)
        q, k, v = opened.parts
        rate, retain = self.gates(opened.x, valid)
        y, weight = self.config.scan(state.weight, k, v, q, rate, retain)
        after = advance(state.position, x, valid)
        y = keep_in_graph(self.shell.close(y, opened.gate), self.weight)
        return y, LinearState(after, opened.tail, weight)
