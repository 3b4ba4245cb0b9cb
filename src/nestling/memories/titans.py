"""Titans: a two-layer memory with momentum and retention, and static projections (Eq. 76-78).

It is the first stage of the self-modifying memory: `k, v, q, eta, alpha` are linear in the tokens,
and the memory learns `k -> v` by gradient descent on the L2 objective, with momentum.

**Features.** Two layers that learn at once wait for each other, chunk after chunk. Where only the
last one learns in context, the first makes features `phi(x) = unit(silu(Theta x))` and learning is

    W <- W (alpha I - eta phi(k) phi(k)^T) + eta v phi(k)^T,    y = W phi(q):

the gated delta rule, for which the matrix scan has kernels everywhere. Theta is trained, as all
projections are; nothing is taken at a chunk's start, so chunks change speed only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

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
)
from nestling.memories.self_modifying import (
    Rates,
    Retention,
    SelfModifyingState,
    fold,
    for_all,
    largest_row,
    momentum_gate,
    start_gates,
    start_memories,
    start_weights,
    unfold,
    where_heads,
)
from nestling.norm import unit
from nestling.objectives import dot, l2
from nestling.scan import BACKENDS
from nestling.scan.deep import MLPState, scan_mlp
from nestling.scan.delta.api import scan_unchecked
from nestling.scan.self_modifying import Inputs, SelfRule, Weights, scan_self_modifying
from nestling.scan.self_modifying.segment import recall


@dataclass(frozen=True, kw_only=True)
class TitansConfig:
    """A Titans memory.

    expansion: the hidden width in head widths.
    chunk: tokens between two moments at which errors are taken (Eq. 90).
    momentum: a gate theta carries writes on (deviation 18).
    features: only the last layer learns in context, by the delta rule on what the first makes of
        the keys: it runs on the matrix scan, without momentum. backend: of that scan, as for
        `nestling.scan.scan`.
    rates, retention: as for self-modifying memories.
    clip: bound on the error signal of every layer (deviation 8).
    conv, conv_each: taps of the causal convolution, and whether each projection has its own.
    gate: the input gates the reads.
    recompute: keep less for the backward pass and compute it again there.
    """

    width: int
    heads: int
    expansion: int = 1
    chunk: int = 64
    momentum: bool = True
    features: bool = False
    rates: Rates = field(default_factory=Rates)
    retention: Retention = field(default_factory=Retention)
    clip: float = 1.0
    conv: int = 4
    conv_each: bool = False
    gate: bool = True
    recompute: bool = False
    backend: str = "auto"

    def __post_init__(self) -> None:
        check_sizes(self.width, self.heads, self.conv)
        whole_number("expansion", self.expansion)
        whole_number("chunk", self.chunk)
        one_of("backend", self.backend, ("auto", *BACKENDS))
        if self.backend != "auto" and not self.features:
            raise ValueError(
                f"backend={self.backend!r} is for features=True; where both layers learn there is"
                " one form"
            )
        if self.features and self.momentum:
            raise ValueError(
                "features=True learns by the delta rule, without momentum: it needs momentum=False"
            )
        _ = self.rule  # (making the rule checks the rest)

    @property
    def rule(self) -> SelfRule:
        """The rule by which the memory learns: stage 1 (Eq. 76-78), or the delta rule."""
        return SelfRule(
            adaptive=(),
            objective=dot if self.features else l2,
            own_values=False,
            erase=self.features,
            rate_max=self.rates.most,
            shut=self.rates.shut,
            retain_max=self.retention.most,
            tied=self.retention.tied,
            clip=self.clip,
            chunk=self.chunk,
            chunk_others=self.chunk,
        )


class Titans(Memory):
    """A two-layer memory per head that learns by gradient descent with momentum (Eq. 76-78)."""

    def __init__(self, config: TitansConfig) -> None:
        super().__init__()
        self.config, self.rule, self.width = config, config.rule, config.width
        size = config.width // config.heads
        hidden = config.expansion * size
        self.shell = make_shell(config, 4)  # x for the gates, k, v, q
        self.readout = nn.Parameter(torch.empty(config.heads, 2, size))
        self.bias = nn.Parameter(torch.empty(config.heads, 2))
        self.first = nn.Parameter(torch.empty(config.heads, 1, hidden, size))
        self.second = nn.Parameter(torch.empty(config.heads, 1, size, hidden))
        self.theta = nn.Linear(config.width, config.heads) if config.momentum else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A random initial memory that keeps lengths; gates as configured."""
        with torch.no_grad():
            start_gates(self.readout, self.bias, self.theta, self.config)
            start_memories(self.first, self.second)
            if self.config.features:  # keys are units: this spreads what goes into silu
                self.first.mul_(math.sqrt(self.first.shape[-1]))

    def init(
        self, batch_size: int, *, device: Device = None, dtype: Dtype = None
    ) -> SelfModifyingState:
        """The trained initial memory for every sequence, position 0: both layers, or the one that
        learns."""
        device, dtype = device_and_dtype(self.first, device, dtype)
        first: Tensor = self.second if self.config.features else self.first
        second = None if self.config.features else self.second
        weights, start = start_weights(
            first, second, self.config.momentum, batch_size, device, dtype
        )
        tail = self.shell.init(batch_size, device, dtype)
        return SelfModifyingState(at_start(batch_size, device), tail, weights, start)

    def run(
        self, x: Tensor, state: SelfModifyingState, valid: Tensor | None, position: int | None
    ) -> tuple[Tensor, SelfModifyingState]:
        """Convolve, project, scan, and project back; see `Memory.run`."""
        batch = x.shape[0]
        opened = self.shell.open(x, state.tail, valid)
        inputs = self._inputs(opened, valid)
        weights, start = fold(state.weights), fold(state.start)
        if self.config.features:
            y, weights, start = self._scan_features(inputs, weights)
        elif position is None or valid is not None:
            where = where_heads(state.position, position, self.config.heads)
            y, weights, start = scan_self_modifying(self.rule, inputs, weights, start, where)
        else:
            y, weights, start = self._scan(inputs, weights, start, position)
        y = self.shell.close(y.unflatten(0, (batch, -1)), opened.gate)
        y = keep_in_graph(y, self.first, self.second)
        after = advance(state.position, x, valid)
        ends = (unfold(part, batch) for part in (weights, start))
        return y, SelfModifyingState(after, opened.tail, *ends)

    def read(self, x: Tensor, state: SelfModifyingState) -> Tensor:
        """Ask the memory as it stands about each token (Eq. 78)."""
        opened = self.shell.ask(x, state.tail)
        q = unit(opened.parts[3])
        if self.config.features:
            y = (self._phi(q) @ state.weights.first[:, :, 0].mT).flatten(0, 1)
        else:
            y = recall(fold(state.weights), None, q.flatten(0, 1))
        return self.shell.close(y.unflatten(0, (x.shape[0], -1)), opened.gate)

    def bound(self) -> Tensor:
        """The largest norm any row of the weights that learn can ever have, [layers]; see
        `largest_row`."""
        layers = (self.second,) if self.config.features else (self.first, self.second)
        rows = [w.detach().norm(dim=-1).max() for w in layers]
        return torch.stack(rows).clamp_min(largest_row(self.rule, self.config.momentum, False))

    def _inputs(self, opened: Opened, valid: Tensor | None) -> Inputs:
        """The scan's inputs, from the opened tokens: [B, H, T, d] -> [B H, T, d] each."""
        batch = opened.x.shape[0]
        x, *rest = (part.flatten(0, 1) for part in opened.parts)
        k, v, q = (unit(part) for part in rest)
        theta = None if self.theta is None else momentum_gate(self.theta, opened.x, x.dtype)
        if valid is not None:
            valid = valid.repeat_interleave(self.config.heads, 0)
        readout, bias = for_all(self.readout, batch, x), for_all(self.bias, batch, x)
        return Inputs(x, readout, bias, k, v, q, theta=theta, valid=valid)

    def _phi(self, x: Tensor) -> Tensor:
        """Features of keys or queries: [B, H, T, d] -> [B, H, T, F]."""
        return unit(silu(x @ self.first[:, 0].to(x.dtype).mT))

    def _scan_features(self, inputs: Inputs, weights: Weights) -> tuple[Tensor, Weights, Weights]:
        """The matrix scan on features."""
        k, v, q = inputs.k, inputs.v, inputs.q
        if k is None or v is None or q is None:
            raise AssertionError("unreachable: Titans has static projections")
        rate, retain = self._gates(inputs)
        k, q = (
            self._phi(part.unflatten(0, (-1, self.config.heads))).flatten(0, 1) for part in (k, q)
        )
        y, weight = scan_unchecked(
            weights.first[:, 0], k, v, rate, retain, q,
            read="before", chunk=self.config.chunk, recompute=self.config.recompute,
            backend=self.config.backend,
        )  # fmt: skip
        after = Weights(weight.unsqueeze(1))
        return y, after, after

    def _gates(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        raw = inputs.x @ inputs.readout.mT + inputs.bias.unsqueeze(1)  # [b, T, 2]
        return self.rule.rate_and_retain(raw, inputs.valid)

    def _scan(
        self, inputs: Inputs, weights: Weights, start: Weights, position: int
    ) -> tuple[Tensor, Weights, Weights]:
        """Nothing that goes in depends on the memory, so the two-layer scan takes it."""
        k, v, q = inputs.k, inputs.v, inputs.q
        if k is None or v is None:
            raise AssertionError("unreachable: Titans has static projections")
        rate, retain = self._gates(inputs)
        inside = position % self.config.chunk != 0
        moved = (None, None) if weights.moved is None else weights.moved
        state = MLPState(
            _one(weights.second),
            _one(weights.first),
            _one(start.second) if inside else None,
            _one(start.first) if inside else None,
            _one(moved[1]),
            _one(moved[0]),
            position,
        )
        y, end = scan_mlp(
            state, k, v, rate, retain, q,
            objective=l2, erase=False, read="before", chunk=self.config.chunk,
            clip=self.config.clip, momentum=inputs.theta,
            recompute=self.config.recompute, check=False,
        )  # fmt: skip
        if y is None:
            raise AssertionError("unreachable: queries were given")
        now = Weights(end.w2.unsqueeze(1), end.w1.unsqueeze(1))
        begun = now
        if end.start1 is not None and end.start2 is not None:
            begun = Weights(end.start2.unsqueeze(1), end.start1.unsqueeze(1))
        if end.velocity1 is not None and end.velocity2 is not None:
            now = now._replace(moved=(end.velocity2.unsqueeze(1), end.velocity1.unsqueeze(1)))
        return y, now, begun


def _one(part: Tensor | None) -> Any:
    """The one memory of a stack: [b, 1, ...] -> [b, ...]."""
    return None if part is None else part[:, 0]
