"""Self-modifying Titans as a layer (Eq. 76-93): memories that make their own keys, values, rates
and retentions, and rewrite all of these in context."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

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
)
from nestling.norm import unit
from nestling.objectives import Objective, dot
from nestling.scan.self_modifying import SELF_BACKENDS, scan_self_modifying
from nestling.scan.self_modifying.rule import RETAIN_MIN, Inputs, SelfRule, Weights, with_initial
from nestling.scan.self_modifying.segment import project, recall

__all__ = [
    "Learning",
    "Projections",
    "Rates",
    "Retention",
    "SelfModifying",
    "SelfModifyingConfig",
    "SelfModifyingState",
]


@dataclass(frozen=True, kw_only=True)
class Projections:
    """How tokens become keys, values, queries and gates.

    adaptive: which of ("k", "v", "eta", "alpha", "q") are memories; none is stage 1 (Eq. 76-78),
        the default stage 3 (Eq. 83-88) with q static (deviation 9).
    residual: what memories learn in context is added to static projections and to their trained
        initial weights, and is what is erased, forgotten and read; False is Eq. 83-88 as printed,
        where all of it is rewritten (deviation 22).
    conv: taps of the causal convolution, 1 for none.
    conv_each: the convolution acts on each projection instead of once before them.
    """

    adaptive: tuple[str, ...] = ("k", "v", "eta", "alpha")
    residual: bool = True
    conv: int = 4
    conv_each: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "adaptive", tuple(self.adaptive))
        whole_number("conv", self.conv)


@dataclass(frozen=True, kw_only=True)
class Learning:
    """How a write is made.

    objective: `nestling.objectives.dot` (Eq. 92) or `l2` (Eq. 93).
    own_values: every memory makes its own values (Eq. 84); False gives all the same (Eq. 81).
    erase: delta gradient descent; False is gradient descent (Eq. 77, 82).
    adding: so many heads, the first ones, do not erase: what they write adds up, and so they count.
        A whole number of heads, or a share of them below 1 (`heads_adding` rounds it down).
    momentum: a gate theta carries writes on (deviation 18).
    clip: bound on the error signal of every layer (deviation 8).
    read_start: read at the chunk's start (Eq. 90) instead of the state before each token.
    """

    objective: Objective = dot
    own_values: bool = True
    erase: bool = True
    adding: int | float = 0
    momentum: bool = False
    clip: float = 1.0
    read_start: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.adding, float) and not 0 < self.adding < 1:
            raise ValueError(
                f"adding must be a number of heads, or a share of them below 1; got {self.adding!r}"
            )
        if not isinstance(self.adding, float):
            whole_number("adding", self.adding, least=0)

    def heads_adding(self, heads: int) -> int:
        """How many of so many heads do not erase."""
        return int(self.adding * heads) if self.adding < 1 else int(self.adding)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How strongly tokens write.

    start: where rates start in the first and in the last head, with geometric steps between. All
        errors of a chunk are taken where it begins, so a chunk moves by up to its length times
        this: at 0.1 and 64 tokens two layers overshoot and gradients explode. Small chunks may
        start higher, which makes their recurrence nonlinear: state tracking wants it.
    most: the largest rate as a share of the retention. 2 lets a write flip the sign of what is
        stored (parity needs it).
    shut: below this share of the largest a rate is exactly zero, and what is above is stretched to
        take its place (deviation 25). With tied retention a memory then stands still on tokens that
        do not matter, however many they are.
    """

    start: tuple[float, float] = (0.01, 0.01)
    most: float = 1.0
    shut: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", tuple(self.start))
        if not 0 < self.most <= 2:
            raise ValueError(f"the largest rate must be in (0, 2]; got {self.most}")
        if not 0 <= self.shut < 1:
            raise ValueError(f"rates.shut must be in [0, 1); got {self.shut}")
        if len(self.start) != 2 or not all(0 < rate < self.most for rate in self.start):
            raise ValueError(
                f"rates must be two numbers between 0 and {self.most:g}; got {self.start}"
            )

    def spread(self, heads: int) -> Tensor:
        """The rate at which each head starts, [H], as a share of the largest."""
        low, high = (math.log(rate) for rate in self.start)
        return torch.linspace(low, high, heads, device="cpu").exp() / self.most


@dataclass(frozen=True, kw_only=True)
class Retention:
    """How much of the memory every token keeps.

    start: where retention starts in the first and in the last head; between them what is lost,
        `1 - retention`, has geometric steps, so heads differ in how long they keep. By default a
        write survives 256 tokens in all of them (0.9985^256 = 0.68).
    most: the largest retention.
    tied: nothing fades where nothing is written (deviation 24): a token that writes with the share
        s of the largest rate loses the share s of what a full write would. `start` is what tokens
        keep at the rates they start with, `most` what a full write can keep at most.
    """

    start: tuple[float, float] = (0.9985, 0.9985)
    most: float = 0.9999
    tied: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", tuple(self.start))
        if not RETAIN_MIN < self.most < 1:
            raise ValueError(f"retain_max must be in (0, 1), above {RETAIN_MIN:g}; got {self.most}")
        if len(self.start) != 2 or not all(RETAIN_MIN < start < 1 for start in self.start):
            raise ValueError(
                f"retain must be between {RETAIN_MIN:g} and 1, in the first and the last head; got"
                f" {self.start}"
            )

    def spread(self, shares: Tensor) -> Tensor:
        """The start of each head's gate, [H] between 0 and 1, at these starting rates."""
        first, last = (math.log1p(-start) for start in self.start)
        heads = shares.shape[0]
        kept = 1 - torch.linspace(first, last, heads, dtype=torch.float64, device="cpu").exp()
        if self.tied:
            full = 1 - (1 - kept) / shares.double()
            if bool((full <= RETAIN_MIN).any()):
                raise ValueError(
                    f"tied retention cannot start at {self.start} with rates that small: a full"
                    " write would keep nothing; raise the retention or the rates"
                )
            kept = full
        return torch.minimum(kept / self.most, kept)


@dataclass(frozen=True, kw_only=True)
class SelfModifyingConfig:
    """A block of self-modifying memories (Eq. 83-93), in groups.

    >>> SelfModifyingConfig(width=64, heads=2, retention=Retention(tied=True)).chunk
    64

    expansion: 0 for matrix memories, otherwise the hidden width of 2-layer residual ones (Eq. 89)
        in head widths.
    chunk, chunk_others: tokens between two updates of what the main memory, and the other memories,
        take their errors and projections from (Eq. 90).
    gate: the input gates the reads.
    recompute: keep only each chunk's first weights and compute the rest again in the backward pass:
        less memory, about a third more time in the scan.
    backend: which kernels run the scan, "auto", "chunk" or "triton"; "auto" is Triton's on CUDA,
        where they have a form for these options, and the chunked form elsewhere.
    """

    width: int
    heads: int
    projections: Projections = field(default_factory=Projections)
    learning: Learning = field(default_factory=Learning)
    rates: Rates = field(default_factory=Rates)
    retention: Retention = field(default_factory=Retention)
    expansion: int = 0
    chunk: int = 64
    chunk_others: int = 64
    gate: bool = True
    recompute: bool = False
    backend: str = "auto"

    def __post_init__(self) -> None:
        check_sizes(self.width, self.heads)
        one_of("backend", self.backend, SELF_BACKENDS)
        for name, kind in GROUPS.items():
            if not isinstance(getattr(self, name), kind):
                raise TypeError(
                    f"{name} must be a nestling.memories.{kind.__name__}; got"
                    f" {getattr(self, name)!r} (nestling.memories.configure takes plain options)"
                )
        whole_number("expansion", self.expansion, least=0)
        whole_number("chunk", self.chunk)
        whole_number("chunk_others", self.chunk_others)
        adding, erase = self.learning.adding, self.learning.erase
        if adding > self.heads or (adding and not erase):
            raise ValueError(
                f"adding counts heads that do not erase, of {self.heads} that do by default; got"
                f" adding={adding} with erase={erase}"
            )
        _ = self.rule  # (making the rule checks the rest)

    @property
    def rule(self) -> SelfRule:
        """The rule by which all memories of the block learn."""
        return SelfRule(
            adaptive=self.projections.adaptive,
            objective=self.learning.objective,
            own_values=self.learning.own_values,
            erase=self.learning.erase,
            rate_max=self.rates.most,
            shut=self.rates.shut,
            retain_max=self.retention.most,
            tied=self.retention.tied,
            clip=self.learning.clip,
            chunk=self.chunk,
            chunk_others=self.chunk_others,
            read_start=self.learning.read_start,
        )


GROUPS: dict[str, type] = {
    "projections": Projections,
    "learning": Learning,
    "rates": Rates,
    "retention": Retention,
}
"""The groups of the configuration."""


class SelfModifyingState(NamedTuple):
    """Per sequence: tokens seen, the convolution's tail, the running weights of all memories, and
    the weights at the start of each memory's running chunk."""

    position: Tensor  # [B] int64
    tail: Tensor  # [B, conv - 1, D], or all parts wide with conv_each
    weights: Weights  # [B, H, N, ., .]
    start: Weights  # [B, H, N, ., .]


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
        width, heads, projections = config.width, config.heads, config.projections
        size, many = width // heads, len(self.rule.names)
        hidden = config.expansion * size
        names, residual = ("k", "v", "q"), projections.residual
        self.static = tuple(n for n in names if residual or n not in projections.adaptive)
        self.shell = make_shell(config, 1 + len(self.static), projections)
        self.readout = nn.Parameter(torch.empty(heads, 2, size))
        self.bias = nn.Parameter(torch.empty(heads, 2))
        self.first = nn.Parameter(torch.empty(heads, many, hidden or size, size))
        self.second: nn.Parameter | None = None
        if hidden:
            self.second = nn.Parameter(torch.empty(heads, many, size, hidden))
        self.reach: nn.Parameter | None = None
        self.gates: nn.Linear | None = None
        if residual:
            self.reach = nn.Parameter(torch.empty(heads))
            self.gates = nn.Linear(width, 2 * heads, bias=False)
        self.theta = nn.Linear(width, heads) if config.learning.momentum else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Random initial memories that keep lengths; gates as configured."""
        with torch.no_grad():
            start_gates(self.readout, self.bias, self.theta, self.config)
            start_memories(self.first, self.second)
            if self.reach is not None and self.gates is not None:
                nn.init.constant_(self.reach, REACH)
                nn.init.normal_(self.gates.weight, std=0.1 / math.sqrt(self.width))
                if self.second is None:
                    self.first[:, 0] = torch.eye(self.first.shape[-1]) / REACH
                else:
                    self.second[:, 0] = 0.0

    def init(
        self, batch_size: int, *, device: Device = None, dtype: Dtype = None
    ) -> SelfModifyingState:
        """Trained initial weights (or none, as a difference) for every sequence, position 0."""
        device, dtype = device_and_dtype(self.first, device, dtype)
        first, second = self.first, self.second
        if self.config.projections.residual:
            first, second = (None if w is None else torch.zeros_like(w) for w in (first, second))  # type: ignore[assignment]
        weights, start = start_weights(
            first, second, self.config.learning.momentum, batch_size, device, dtype
        )
        tail = self.shell.init(batch_size, device, dtype)
        return SelfModifyingState(at_start(batch_size, device), tail, weights, start)

    def run(
        self, x: Tensor, state: SelfModifyingState, valid: Tensor | None, position: int | None
    ) -> tuple[Tensor, SelfModifyingState]:
        """Convolve, project, scan, and project back; see `Memory.run`."""
        opened = self.shell.open(x, state.tail, valid)
        inputs = self._inputs(opened, valid)
        where = where_heads(state.position, position, self.config.heads)
        y, weights, start = scan_self_modifying(
            self.rule, inputs, fold(state.weights), fold(state.start), where,
            self.config.recompute, self.config.backend,
        )  # fmt: skip
        y = self.shell.close(y.unflatten(0, (x.shape[0], -1)), opened.gate)
        y = keep_in_graph(y, self.first, *([] if self.second is None else [self.second]))
        weights, start = (unfold(part, x.shape[0]) for part in (weights, start))
        after = advance(state.position, x, valid)
        return y, SelfModifyingState(after, opened.tail, weights, start)

    def read(self, x: Tensor, state: SelfModifyingState) -> Tensor:
        """Ask the main memory as it stands about each token (Eq. 83)."""
        opened = self.shell.ask(x, state.tail)
        inputs = self._inputs(opened, None)
        q = project(self.rule, with_initial(fold(state.start), inputs.initial), "q", inputs)
        y = recall(fold(state.weights), inputs.initial, q)
        return self.shell.close(y.unflatten(0, (x.shape[0], -1)), opened.gate)

    def bound(self) -> Tensor:
        """The largest norm any row of a memory's weights can ever have, [layers] (deviation 8).

        `largest_row` says why. Where the weights are differences they start at zero: `w_0 = 0`.
        """
        pairs = [w for w in (self.first, self.second) if w is not None]
        rows = torch.stack([w.detach().norm(dim=-1).max() for w in pairs])
        learning = self.config.learning
        adding = learning.heads_adding(self.config.heads) > 0
        most = largest_row(self.rule, learning.momentum, adding)
        if self.config.projections.residual:
            return torch.full_like(rows, most)
        return rows.clamp_min(most)

    def _inputs(self, opened: Opened, valid: Tensor | None) -> Inputs:
        """The scan's inputs, from the opened tokens: [B, H, T, d] -> [B H, T, d] each."""
        heads, batch = self.config.heads, opened.x.shape[0]
        x, *rest = opened.parts
        given = {n: unit(part).flatten(0, 1) for n, part in zip(self.static, rest, strict=True)}
        theta = gates = initial = None
        if self.reach is not None and self.gates is not None:
            x = unit(x) * self.reach.to(x.dtype).view(-1, 1, 1)
            gates = self.gates(opened.x).to(x.dtype).unflatten(-1, (heads, 2))
            gates = gates.transpose(1, 2).flatten(0, 1)  # [B H, T, 2]
            second = None if self.second is None else for_all(self.second, batch, x)
            initial = Weights(for_all(self.first, batch, x), second)
        x = x.flatten(0, 1)
        if self.theta is not None:
            theta = momentum_gate(self.theta, opened.x, x.dtype)
        if valid is not None:
            valid = valid.repeat_interleave(heads, 0)
        erase = None
        if adding := self.config.learning.heads_adding(heads):
            head = torch.arange(heads, device=x.device)
            erase = (head >= adding).to(x.dtype).repeat(batch)
        return Inputs(
            x, for_all(self.readout, batch, x), for_all(self.bias, batch, x), **given,
            gates=gates, erase=erase, theta=theta, valid=valid, initial=initial,
        )  # fmt: skip


def largest_row(rule: SelfRule, momentum: bool, adding: bool) -> float:
    """The norm that no row `w` of a layer exceeds, unless it starts longer (deviations 8, 24).

    For inputs k of length at most 1, errors |u| <= c, retentions alpha, and rates eta = alpha beta
    with beta <= r s, where s in [0, 1] is the share of the largest rate r:

    **Erasing, r <= 1.** `w' = alpha ((1 - beta) w_k + beta u) k + alpha w_perp` for unit k. Squares
    are convex, so `|w'|^2 <= alpha^2 (|w|^2 + beta c^2)`: rows shrink once `|w|^2` exceeds
    `alpha^2 beta c^2 / (1 - alpha^2)`. With alpha <= a this is at most `a^2 c^2 / (1 - a^2)`. Tied,
    `1 - alpha = s (1 - a_t)` with a_t <= a, so `1 - alpha^2 >= s (1 - a) (1 + alpha)`: the share s
    cancels, and `alpha^2 r s c^2 / (s (1 - a) (1 + alpha)) <= r c^2 / (2 (1 - a))`. At s = 0 the
    row stays as it is.

    **Rates up to 2, or heads that do not erase.** `|w'| <= alpha |w| + alpha beta c`: rows shrink
    beyond `r a c / (1 - a)`; tied, beyond `alpha r s c / (s (1 - a)) <= r c / (1 - a)`.

    **Momentum.** `z' = theta z + eta u k`, theta <= h, so `|z| <= Z = r c / (1 - h)`, and rows
    shrink beyond `a Z / (1 - a)`. Tied, a momentum goes on where nothing is written, so look at
    `V = |w| + h / (1 - h) |z|`: `V' <= V + s (Z - (1 - a) |w|)`. It grows only while
    `|w| < W = Z / (1 - a)`, and then `V' <= W + Z / (1 - h)`, which bounds V, and |w| with it.

    A gate that shuts (deviation 25) only chooses another s in [0, 1]: nothing above changes.

    For |k| < 1 put `beta |k|^2` for beta and `u / |k|` for u: `beta u^2` stays the same.
    This is exact arithmetic. In float32 a loss below 6e-8 in one update rounds to none; rows could
    then grow beyond the bound, but only by 8 million tokens, one by one, all at right angles to
    the row (64 times as many where chunks are solved together).
    """
    a, c, rate = rule.retain_max, rule.clip, rule.rate_max
    if momentum:
        push = rate * c / (1 - THETA)
        return push / (1 - a) + push / (1 - THETA) if rule.tied else a * push / (1 - a)
    if rate > 1 or not rule.erase or adding:
        return rate * c / (1 - a) * (1.0 if rule.tied else a)
    if rule.tied:
        return c * math.sqrt(rate / (2 * (1 - a)))
    return a * c / math.sqrt(1 - a * a)


def start_gates(readout: Tensor, bias: Tensor, theta: nn.Linear | None, config: Any) -> None:
    """Read-outs near zero, and biases of rate and retention as `config` says."""
    shares = config.rates.spread(config.heads)
    kept = config.retention.spread(shares)
    nn.init.normal_(readout, std=0.1 / math.sqrt(readout.shape[-1]))
    shut = config.rates.shut
    bias[:, 0] = torch.logit(shut + (1 - shut) * shares)
    bias[:, 1] = torch.log(kept / (1 - kept))
    if theta is not None:
        nn.init.normal_(theta.weight, std=0.02)
        nn.init.zeros_(theta.bias)


def start_memories(first: Tensor, second: Tensor | None) -> None:
    """Random memories that keep lengths."""
    nn.init.normal_(first, std=1 / math.sqrt(first.shape[-1]))
    if second is not None:
        nn.init.normal_(second, std=1 / math.sqrt(second.shape[-1]))


def start_weights(
    first: Tensor,
    second: Tensor | None,
    momentum: bool,
    batch: int,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Weights, Weights]:
    """The weights of every sequence before the first token, and where their chunk starts."""

    def started(weight: Tensor) -> Tensor:
        one = weight.to(device, state_dtype(dtype)).unsqueeze(0)
        return one.repeat(batch, *(1 for _ in weight.shape))  # data of its own, no view

    begun = Weights(started(first), None if second is None else started(second))
    moved = tuple(torch.zeros_like(w) for w in begun[:2] if w is not None) if momentum else None
    return begun._replace(moved=moved), begun


def momentum_gate(theta: nn.Linear, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The momentum's gate, [B, T, D] -> [B H, T]."""
    return (THETA * torch.sigmoid(theta(x).to(dtype))).transpose(1, 2).flatten(0, 1)


def for_all(parameter: Tensor, batch: int, like: Tensor) -> Tensor:
    """A parameter of all heads for every sequence: [H, ...] -> [B H, ...]."""
    return parameter.to(like.dtype).expand(batch, *parameter.shape).flatten(0, 1)


def where_heads(position: Tensor, shared: int | None, heads: int) -> int | Tensor:
    """The position of all items of a scan, or of each, [B H]."""
    if shared is None and position.is_meta:  # shapes are the same everywhere
        return 0
    return position.repeat_interleave(heads) if shared is None else shared


def fold(weights: Weights) -> Weights:
    """[B, H, ...] -> [B H, ...]."""
    first, second, moved = weights
    return Weights(
        first.flatten(0, 1),
        None if second is None else second.flatten(0, 1),
        None if moved is None else tuple(part.flatten(0, 1) for part in moved),
    )


def unfold(weights: Weights, batch: int) -> Weights:
    """[B H, ...] -> [B, H, ...]."""
    first, second, moved = weights
    shape = (batch, -1)
    return Weights(
        first.unflatten(0, shape),
        None if second is None else second.unflatten(0, shape),
        None if moved is None else tuple(part.unflatten(0, shape) for part in moved),
    )
