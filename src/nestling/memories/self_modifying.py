"""Self-modifying Titans as a layer (Eq. 76-93): memories that make their own keys, values, rates
and retentions, and rewrite all of these in context."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nestling.memories.core import Memory, advance, state_dtype
from nestling.memories.parts import Opened, check_sizes, make_shell, whole_number
from nestling.memories.steering import RATE, Steering
from nestling.norm import unit
from nestling.objectives import dot, l2
from nestling.scan.self_modifying import scan_self_modifying
from nestling.scan.self_modifying.rule import RETAIN_MIN, Inputs, SelfRule, Weights, whole
from nestling.scan.self_modifying.segment import project, recall
from nestling.tree import state_start, tree_map

__all__ = ["SelfModifying", "SelfModifyingConfig", "SelfModifyingState"]


@dataclass(frozen=True, kw_only=True)
class SelfModifyingConfig:
    """A block of self-modifying memories; the rule's options are those of `SelfRule`.

    adaptive: which projections are memories, of ("k", "v", "eta", "alpha", "q"); none and
        `own_values=False` is stage 1 (Eq. 76-78), `own_values=False` stage 2 (Eq. 79-82), the
        default stage 3 (Eq. 83-88), with q static (deviation 9).
    expansion: 0 for matrix memories, otherwise the hidden width of 2-layer residual ones (Eq. 89)
        in head widths.
    chunk, chunk_others: tokens between two updates of what the main memory, and the other memories,
        take their errors and projections from (Eq. 90).
    residual: what memories learn in context is added to static projections and to their trained
        initial weights, and is what is erased, forgotten and read; False is Eq. 83-88 as printed,
        where all of it is rewritten (deviation 22).
    momentum: a gate theta carries writes on (deviation 18). negative: rates up to twice the
        retention, so that a write can flip the sign of what is stored (parity needs it).
    steering: 0, or the width of one small memory that all adaptive projections share, in place of a
        memory as wide as a head for each: its reads are added to static projections. It learns at
        rates of its own, slowly, so its reads also tell how long it has been learning.
    rates: where rates start in the first and in the last head, with geometric steps between. High
        ones make the recurrence of small chunks nonlinear from the start: state tracking wants it.
    retain: where retention starts; by default a write survives 256 tokens (0.9985^256 = 0.68).
    adding: so many heads, the first ones, do not erase: what they write adds up, and so they count.
    conv_each: the causal convolution acts on each projection instead of once before them.
    recompute: keep only each chunk's first weights and compute the rest again in the backward pass:
        less memory, about a third more time in the scan.
    """

    width: int
    heads: int
    adaptive: tuple[str, ...] = ("k", "v", "eta", "alpha")
    objective: str = "dot"
    own_values: bool = True
    erase: bool = True
    residual: bool = True
    momentum: bool = False
    negative: bool = False
    expansion: int = 0
    steering: int = 0
    chunk: int = 64
    chunk_others: int = 64
    read_start: bool = False
    retain_max: float = 0.9999
    retain: float = 0.9985
    rates: tuple[float, float] = (0.1, 0.1)
    adding: int = 0
    clip: float = 1.0
    conv: int = 4
    conv_each: bool = False
    gate: bool = True
    recompute: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "adaptive", tuple(self.adaptive))
        object.__setattr__(self, "rates", tuple(self.rates))
        check_sizes(self.width, self.heads, self.conv)
        whole_number("expansion", self.expansion, least=0)
        whole_number("steering", self.steering, least=0)
        if self.steering and not (self.adaptive and self.residual):
            raise ValueError(
                f"steering={self.steering} moves static projections: it needs residual=True and"
                f" something adaptive; got residual={self.residual}, adaptive={self.adaptive}"
            )
        whole_number("chunk", self.chunk)
        whole_number("chunk_others", self.chunk_others)
        if self.objective not in ("dot", "l2"):
            raise ValueError(f"objective must be 'dot' or 'l2'; got {self.objective!r}")
        most = self.rule.rate_max  # (making the rule checks the rest)
        if len(self.rates) != 2 or not all(0 < rate < most for rate in self.rates):
            raise ValueError(f"rates must be two numbers between 0 and {most:g}; got {self.rates}")
        if not RETAIN_MIN < self.retain < 1:
            raise ValueError(f"retain must be between {RETAIN_MIN:g} and 1; got {self.retain}")
        whole_number("adding", self.adding, least=0)
        if self.adding > self.heads or (self.adding and not self.erase):
            raise ValueError(
                f"adding counts heads that do not erase, of {self.heads} that do by default; got"
                f" adding={self.adding} with erase={self.erase}"
            )

    @property
    def rule(self) -> SelfRule:
        """The rule by which all memories of the block learn."""
        return SelfRule(
            adaptive=() if self.steering else self.adaptive,
            objective=l2 if self.objective == "l2" else dot,
            own_values=self.own_values,
            erase=self.erase,
            rate_max=2.0 if self.negative else 1.0,
            retain_max=self.retain_max,
            clip=self.clip,
            chunk=self.chunk,
            chunk_others=self.chunk_others,
            read_start=self.read_start,
        )


class SelfModifyingState(NamedTuple):
    """Per sequence: tokens seen, the convolution's tail, the running weights of all memories, and
    the weights at the start of each memory's running chunk."""

    position: Tensor  # [B] int64
    tail: Tensor  # [B, conv - 1, D], or all parts wide with conv_each
    weights: Weights  # [B, H, N, ., .]
    start: Weights  # [B, H, N, ., .]
    steering: Any = None  # SelfModifyingState of the small memory that moves the projections


NOTHING: Mapping[str, Tensor] = MappingProxyType({})
"""What is added to the projections of a memory that is not steered."""

THETA, REACH = 0.9, 0.1
"""The momentum's largest gate, and how far memories move unit projections at first."""


class SelfModifying(Memory):
    """Self-modifying Titans: `y = M_mem(q)`, with k, v, eta and alpha from memories that all learn
    their own values by delta gradient descent with retention (Eq. 83-88, chunked as Eq. 90).

    The convolved input is projected to the heads; inside a head everything is in context. The reads
    are normalised, gated and projected back.
    """

    def __init__(self, config: SelfModifyingConfig) -> None:
        super().__init__()
        self.config, self.rule, self.width = config, config.rule, config.width
        width, heads = config.width, config.heads
        size, many = width // heads, len(self.rule.names)
        hidden = config.expansion * size
        names = ("k", "v", "q")
        self.static = tuple(n for n in names if config.residual or n not in config.adaptive)
        self.shell = make_shell(config, 1 + len(self.static))
        self.readout = nn.Parameter(torch.empty(heads, 2, size))
        self.bias = nn.Parameter(torch.empty(heads, 2))
        self.first = nn.Parameter(torch.empty(heads, many, hidden or size, size))
        self.second: nn.Parameter | None = None
        if hidden:
            self.second = nn.Parameter(torch.empty(heads, many, size, hidden))
        self.reach: nn.Parameter | None = None
        self.gates: nn.Linear | None = None
        if config.residual:
            self.reach = nn.Parameter(torch.empty(heads))
            self.gates = nn.Linear(width, 2 * heads, bias=False)
        self.theta: nn.Linear | None = None
        if config.momentum:
            self.theta = nn.Linear(width, heads)
        self.steering: Steering | None = None
        if config.steering:
            self.steering = Steering(SelfModifying(_small(config)), width, heads, config.adaptive)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Random initial memories that keep lengths; gates as configured."""
        size = self.first.shape[-1]
        slow, fast = (math.log(rate) for rate in self.config.rates)
        rate = torch.linspace(slow, fast, self.config.heads).exp() / self.rule.rate_max
        retain = min(self.config.retain / self.rule.retain_max, self.config.retain)
        with torch.no_grad():
            nn.init.normal_(self.readout, std=0.1 / math.sqrt(size))
            self.bias[:, 0] = torch.log(rate / (1 - rate))
            self.bias[:, 1] = math.log(retain / (1 - retain))
            nn.init.normal_(self.first, std=1 / math.sqrt(size))
            if self.second is not None:
                nn.init.normal_(self.second, std=1 / math.sqrt(self.second.shape[-1]))
            if self.reach is not None and self.gates is not None:
                nn.init.constant_(self.reach, REACH)
                nn.init.normal_(self.gates.weight, std=0.1 / math.sqrt(self.width))
                if self.second is None:
                    self.first[:, 0] = torch.eye(size) / REACH
                else:
                    self.second[:, 0] = 0.0
            if self.theta is not None:
                nn.init.normal_(self.theta.weight, std=0.02)
                nn.init.zeros_(self.theta.bias)

    def init(
        self,
        batch_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> SelfModifyingState:
        """Trained initial weights (or none, as a difference) for every sequence, position 0."""
        device = self.first.device if device is None else torch.device(device)
        dtype = self.first.dtype if dtype is None else dtype
        initial = self._initial(1, device, state_dtype(dtype))
        if self.config.residual:
            initial = tree_map(torch.zeros_like, initial)
        first, second, _ = tree_map(lambda w: state_start(w[0], batch_size), initial)
        moved = None
        if self.config.momentum:
            moved = tuple(torch.zeros_like(w) for w in (first, second) if w is not None)
        position = torch.zeros(batch_size, dtype=torch.int64, device=device)
        tail = self.shell.init(batch_size, device, dtype)
        steering = None
        if self.steering is not None:
            steering = self.steering.memory.init(batch_size, device=device, dtype=dtype)
        return SelfModifyingState(
            position, tail, Weights(first, second, moved), Weights(first, second), steering
        )

    def run(
        self, x: Tensor, state: SelfModifyingState, valid: Tensor | None, position: int | None
    ) -> tuple[Tensor, SelfModifyingState]:
        """Convolve, project, scan, and project back; see `Memory.run`."""
        batch = x.shape[0]
        opened = self.shell.open(x, state.tail, valid)
        added, steering = NOTHING, state.steering
        if self.steering is not None:
            added, steering = self.steering.run(opened.x, steering, valid, position)
        inputs = self._inputs(opened, valid, added)
        where: int | Tensor
        if position is None:
            where = state.position.repeat_interleave(self.config.heads)
        else:
            where = position
        weights, start = (tree_map(_fold, part) for part in (state.weights, state.start))
        y, weights, start = scan_self_modifying(
            self.rule, inputs, weights, start, where, self.config.recompute
        )
        weights, start = (
            tree_map(lambda w: w.unflatten(0, (batch, -1)), part) for part in (weights, start)
        )
        y = self.shell.close(y.unflatten(0, (batch, -1)), opened.gate)
        position_after = advance(state.position, x, valid)
        return y, SelfModifyingState(position_after, opened.tail, weights, start, steering)

    def read(self, x: Tensor, state: SelfModifyingState) -> Tensor:
        """What the main memory says to each token now (Eq. 83)."""
        opened = self.shell.ask(x, state.tail)
        added = NOTHING if self.steering is None else self.steering.read(opened.x, state.steering)
        inputs = self._inputs(opened, None, added)
        weights, start = (tree_map(_fold, part) for part in (state.weights, state.start))
        q = project(self.rule, whole(start, inputs.initial), "q", inputs)
        y = recall(weights, inputs.initial, q)
        return self.shell.close(y.unflatten(0, (x.shape[0], -1)), opened.gate)

    def bound(self) -> Tensor:
        """The largest norm any row of a memory's weights can ever have, [layers] (deviation 8).

        For unit inputs, errors up to c and retention up to a: `max(|w_0|, a c / sqrt(1 - a^2))`
        when rates stay below retentions, `max(|w_0|, 2 a c / (1 - a))` when they may be twice as
        large; with momentum `max(|w_0|, r / (1 - a))`, where r = rate c / (1 - theta) bounds it.
        Where the weights are differences they start at zero: `w_0 = 0`.
        """
        a, c, rate = self.rule.retain_max, self.rule.clip, self.rule.rate_max
        pairs = [w for w in (self.first, self.second) if w is not None]
        rows = torch.stack([w.detach().norm(dim=-1).max() for w in pairs])
        if self.config.momentum:
            most = rate * a * c / (1 - THETA) / (1 - a)
        elif rate > 1 or not self.rule.erase or self.config.adding:
            most = rate * a * c / (1 - a)
        else:
            most = a * c / math.sqrt(1 - a * a)
        if self.steering is not None:
            most = max(most, float(self.steering.memory.bound().max()))
        if self.config.residual:
            return torch.full_like(rows, most)
        return rows.clamp_min(most)

    def _inputs(
        self, opened: Opened, valid: Tensor | None, added: Mapping[str, Tensor] = NOTHING
    ) -> Inputs:
        """What the scan needs of the opened tokens: [B, H, T, d] -> [B H, T, d] each."""
        heads, batch = self.config.heads, opened.x.shape[0]
        x, *rest = opened.parts
        given = {}
        for name, part in zip(self.static, rest, strict=True):
            moved = part + added[name].view_as(part) if name in added else part
            given[name] = unit(moved).flatten(0, 1)
        theta = gates = initial = None
        if self.reach is not None and self.gates is not None:
            x = unit(x) * self.reach.to(x.dtype).view(-1, 1, 1)
            gates = self.gates(opened.x).to(x.dtype).unflatten(-1, (heads, 2))
            gates = gates.transpose(1, 2).flatten(0, 1)  # [B H, T, 2]
            gates = _plus(gates, added)
            initial = tree_map(_fold, self._initial(batch, x.device, x.dtype))
        x = x.flatten(0, 1)
        if self.theta is not None:
            theta = THETA * torch.sigmoid(self.theta(opened.x).to(x.dtype))
            theta = theta.transpose(1, 2).flatten(0, 1)
        readout, bias = (
            part.to(x.dtype).expand(batch, *part.shape).flatten(0, 1)
            for part in (self.readout, self.bias)
        )
        if valid is not None:
            valid = valid.repeat_interleave(heads, 0)
        erase = None
        if self.config.adding:
            head = torch.arange(heads, device=x.device)
            erase = (head >= self.config.adding).to(x.dtype).repeat(batch)
        return Inputs(
            x, readout, bias, **given,
            gates=gates, erase=erase, theta=theta, valid=valid, initial=initial,
        )  # fmt: skip

    def _initial(self, batch: int, device: torch.device, dtype: torch.dtype) -> Weights:
        """The trained initial weights for every sequence, [B, H, N, ., .]."""

        def spread(weight: Tensor) -> Tensor:
            return weight.to(device, dtype).unsqueeze(0).expand(batch, *weight.shape)

        return Weights(spread(self.first), None if self.second is None else spread(self.second))


def _small(config: SelfModifyingConfig) -> SelfModifyingConfig:
    """What steers a memory: one head, no convolution, static projections of its own."""
    return SelfModifyingConfig(
        width=config.steering,
        heads=1,
        adaptive=(),
        objective=config.objective,
        own_values=config.own_values,
        erase=config.erase,
        chunk=config.chunk_others,
        chunk_others=config.chunk_others,
        retain_max=config.retain_max,
        retain=config.retain,
        clip=config.clip,
        rates=(RATE, RATE),
        conv=1,
        gate=False,
        recompute=config.recompute,
    )


def _plus(gates: Tensor, added: Mapping[str, Tensor]) -> Tensor:
    """The gates [b, T, 2] of eta and alpha with what is added to them."""
    names = ("eta", "alpha")
    if not any(name in added for name in names):
        return gates
    both = [added.get(name, torch.zeros_like(gates[..., :1])) for name in names]
    return gates + torch.cat(both, -1)


def _fold(weight: Tensor) -> Tensor:
    return weight.flatten(0, 1)
