"""The self-modifying scan's arguments (Eq. 76-93): the rule, its gates, the stacked memories.

Legend: b = sequences x heads, T tokens, C tokens of a segment, N memories, d head width,
F hidden width of a 2-layer memory.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softshrink

from nestling.objectives import Objective, dot, l2
from nestling.scan.checks import is_l2

__all__ = [
    "ADAPTIVE",
    "PLAIN",
    "RETAIN_MIN",
    "GateTerms",
    "Inputs",
    "SelfRule",
    "Weights",
    "clip",
    "with_initial",
]

ADAPTIVE = ("k", "v", "eta", "alpha", "q")
"""The projections that may be memories themselves, in the order in which they are stacked."""

RETAIN_MIN = 1e-4
"""The least retention; it keeps products of retentions in range of their logarithms."""


PLAIN = {
    "adaptive": "bool[]", "squared": "bool", "own_values": "bool", "erase": "bool",
    "rate_max": "float", "shut": "float", "retain_max": "float", "tied": "bool", "clip": "float",
    "chunk": "int", "chunk_others": "int", "read_start": "bool",
}  # fmt: skip
"""A rule's options as operators take them, with their types in an operator's schema."""


class Weights(NamedTuple):
    """All memories of a block, stacked: first `mem`, then the adaptive projections.

    A matrix memory is `M(x) = first x`. A 2-layer memory is `M(x) = x + second silu(first x)`
    (Eq. 89, 91). `moved` holds the momenta of `first` and `second` where the rule has momentum.
    """

    first: Tensor  # [b, N, d or F, d]
    second: Tensor | None = None  # [b, N, d, F]
    moved: tuple[Tensor, ...] | None = None  # like first (and second)


class Inputs(NamedTuple):
    """The inputs known before the scan: tokens, and the static parts of the projections.

    `k`, `v` and `q` are given where they are no memories; where they are, what is given is added to
    what the memory says. The gates are read out of `M_eta(x)` and `M_alpha(x)` by `readout`, or out
    of `x` itself where they are no memories, and added to `bias` and `gates`. With `initial` the
    weights are differences from it (deviation 22).
    """

    x: Tensor  # [b, T, d]
    readout: Tensor  # [b, 2, d]: of eta, of alpha
    bias: Tensor  # [b, 2]
    k: Tensor | None = None  # [b, T, d] unit or zero
    v: Tensor | None = None  # [b, T, d] unit or zero
    q: Tensor | None = None  # [b, T, d] unit or zero
    gates: Tensor | None = None  # [b, T, 2]: of eta, of alpha
    erase: Tensor | None = None  # [b]: the share of a write's rate that erases, a constant (1)
    theta: Tensor | None = None  # [b, T] in [0, 1): the momentum's gate
    valid: Tensor | None = None  # [b, T] bool: False neither writes nor decays
    initial: Weights | None = None  # trained, where the weights are differences (deviation 22)

    def at(self, tokens: slice | int) -> Inputs:
        """The inputs of some tokens, or of one."""

        def cut(part: Any) -> Any:
            return None if part is None else part[:, tokens]

        x, readout, bias, k, v, q, gates, erase, theta, valid, initial = self
        return Inputs(
            cut(x), readout, bias, cut(k), cut(v), cut(q), cut(gates), erase, cut(theta),
            cut(valid), initial,
        )  # fmt: skip


class GateTerms(NamedTuple):
    """Rate and retention of tokens [...], and the sigmoids they are made of."""

    write: Tensor  # in [0, 1): how strongly a token writes
    keep: Tensor  # in (0, 1): how much a token keeps
    rate: Tensor  # eta
    log_retain: Tensor  # log alpha


@dataclass(frozen=True, kw_only=True)
class SelfRule:
    """How the memories of a block learn (Eq. 83-93); one instance is one variant.

    adaptive: the projections that are memories, some of `ADAPTIVE` in that order.
    objective: `dot` (Eq. 92) writes `vhat`, `l2` (Eq. 93) writes `vhat - M(k)`, both at the state
        where the chunk starts.
    own_values: stage 3, `vhat = M(v)`; otherwise stage 2, `vhat = v`.
    erase: delta gradient descent; False is plain gradient descent with retention.
    rate_max: the largest rate as a share of the retention; 2 allows negative eigenvalues.
    shut: below this value the sigmoid of a rate counts as zero (deviation 25); see `gates`.
    retain_max: the largest retention (of a full write where retention is tied).
    tied: nothing fades where nothing is written (deviation 24); see `gates`.
    clip: bound on the error signal of every layer (deviation 8).
    chunk, chunk_others: tokens between two starts of the main memory, and of the others (Eq. 90).
    read_start: read at the chunk's start (Eq. 90) instead of the state before each token.
    """

    adaptive: tuple[str, ...] = ("k", "v", "eta", "alpha")
    objective: Objective = dot
    own_values: bool = True
    erase: bool = True
    rate_max: float = 1.0
    shut: float = 0.0
    retain_max: float = 0.9999
    tied: bool = False
    clip: float = 1.0
    chunk: int = 64
    chunk_others: int = 64
    read_start: bool = False
    names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """The stacked memories in order."""
    chunks: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The chunk of every stacked memory."""
    segment: int = field(init=False, repr=False, compare=False)
    """Tokens between two moments at which some memory may start a chunk."""
    squared: bool = field(init=False, repr=False, compare=False)
    """Whether the objective is `l2`."""
    plain: tuple[Any, ...] = field(init=False, repr=False, compare=False)
    """The rule as plain values, as operators take them; `PLAIN` names their types."""

    def __post_init__(self) -> None:
        if list(self.adaptive) != [name for name in ADAPTIVE if name in self.adaptive]:
            raise ValueError(
                f"adaptive must be some of {ADAPTIVE}, each once, in this order;"
                f" got {self.adaptive}"
            )
        if not 0 < self.rate_max <= 2:
            raise ValueError(f"rate_max must be in (0, 2]; got {self.rate_max}")
        if not 0 <= self.shut < 1:
            raise ValueError(f"shut must be in [0, 1); got {self.shut}")
        if not RETAIN_MIN < self.retain_max < 1:
            raise ValueError(
                f"retain_max must be in (0, 1), above {RETAIN_MIN:g}; got {self.retain_max}"
            )
        if not self.clip > 0:
            raise ValueError(f"clip must be positive; got {self.clip}")
        small, large = sorted((self.chunk, self.chunk_others))
        if small < 1 or large % small:
            raise ValueError(
                "chunk and chunk_others must be at least 1 and one a multiple of the other;"
                f" got {self.chunk} and {self.chunk_others}"
            )
        chunks = (self.chunk, *(self.chunk_others for _ in self.adaptive))
        for name, value in (
            ("names", ("mem", *self.adaptive)),
            ("chunks", chunks),
            ("segment", min(chunks)),
            ("squared", is_l2(self.objective)),
        ):
            object.__setattr__(self, name, value)
        options = (getattr(self, name) for name in PLAIN if name not in ("adaptive", "squared"))
        adaptive = tuple(name in self.adaptive for name in ADAPTIVE)
        object.__setattr__(self, "plain", (adaptive, self.squared, *options))

    @staticmethod
    @functools.cache
    def of(adaptive: tuple[bool, ...], squared: bool, *options: Any) -> SelfRule:
        """The rule of these `plain` values."""
        names = tuple(name for name, on in zip(ADAPTIVE, adaptive, strict=True) if on)
        rest = dict(zip(list(PLAIN)[2:], options, strict=True))
        return SelfRule(adaptive=names, objective=l2 if squared else dot, **rest)

    def slot(self, name: str) -> int | None:
        """Where a memory stands in the stack; None for a static projection."""
        return self.names.index(name) if name in self.names else None

    def gates(self, raw: Tensor, valid: Tensor | None = None) -> GateTerms:
        """Rate and retention from their read-outs `raw` [..., 2]; the one place that knows how.

        With s and f the sigmoids of the two read-outs, retention lies between `RETAIN_MIN` and
        `retain_max`, and rates below retention (deviation 7):

            a = RETAIN_MIN + (retain_max - RETAIN_MIN) f      alpha = a      eta = alpha rate_max s

        `tied` (deviation 24): `alpha = 1 - s (1 - a)`. Retention is `a` only for a full write, and
        a token that writes nothing (s = 0) leaves the memory exactly as it was.
        `shut` (deviation 25): with c = shut, `max(0, (s - c) / (1 - c))` stands for s, so that a
        gate can close for good; it has no gradient where it is closed.
        Where `valid` is False nothing is written and nothing fades.
        """
        write, keep = torch.sigmoid(raw).unbind(-1)
        if self.shut:
            write = torch.relu(write - self.shut) / (1 - self.shut)
        retain = RETAIN_MIN + (self.retain_max - RETAIN_MIN) * keep
        if self.tied:
            lost = write * (1 - retain)
            retain, log_retain = 1 - lost, torch.log1p(-lost)
        else:
            log_retain = retain.log()
        rate = retain * write * self.rate_max
        if valid is not None:
            rate = rate.masked_fill(~valid, 0.0)
            log_retain = log_retain.masked_fill(~valid, 0.0)
        return GateTerms(write, keep, rate, log_retain)

    def rate_and_retain(self, raw: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """eta and alpha of `gates` in half the operations: constants are put together.

        For scans that take the retention itself.
        """
        write, keep = torch.sigmoid(raw).unbind(-1)
        span, scale = self.retain_max - RETAIN_MIN, 1 / (1 - self.shut)
        if self.shut:
            write = softshrink(write, self.shut)  # for numbers above 0 it is relu(write - shut)
        if self.tied:
            lost = torch.rsub(keep, (1 - RETAIN_MIN) * scale, alpha=span * scale)  # over `write`
            retain = 1 - write * lost
        else:
            retain = RETAIN_MIN + span * keep
        rate = retain * write * (self.rate_max * scale)
        if valid is not None:
            rate, retain = rate.masked_fill(~valid, 0.0), retain.masked_fill(~valid, 1.0)
        return rate, retain

    def gates_backward(
        self,
        write: Tensor,
        keep: Tensor,
        dlog_share: Tensor,
        dlog_retain: Tensor,
        valid: Tensor | None,
    ) -> Tensor:
        """The gradient of `raw` [..., 2], from those of `log(rate / retain)` at fixed retention and
        of `log retain` at a fixed share."""
        span = self.retain_max - RETAIN_MIN
        retain = RETAIN_MIN + span * keep
        slope = 1 - write  # of log write
        if self.shut:
            opened = write > 0
            slope = slope * (1 - self.shut + self.shut / write.where(opened, 1)) * opened
        draw = dlog_share * slope
        dkeep = dlog_retain * span * keep * (1 - keep)
        if self.tied:
            lost = write * (1 - retain)
            draw = draw - dlog_retain * lost * slope / (1 - lost)
            dkeep, retain = dkeep * write, 1 - lost
        both = torch.stack([draw, dkeep / retain], -1)
        return both if valid is None else both.masked_fill_(~valid.unsqueeze(-1), 0.0)

    def fresh(self, position: int) -> tuple[bool, ...]:
        """Which memories start a chunk at this position."""
        return tuple(position % chunk == 0 for chunk in self.chunks)

    def begin(self, weights: Weights, start: Weights, position: int | Tensor) -> Weights:
        """Where each memory's chunk starts: the running weights at multiples of its chunk.

        `position` counts the tokens seen, for all items or [b] (Eq. 90 with deviation 2).
        """
        if isinstance(position, Tensor):
            chunks = torch.tensor(self.chunks).to(position.device, non_blocking=True)
            due = (position[:, None] % chunks == 0)[:, :, None, None]
        else:
            fresh = self.fresh(position)
            if not any(fresh):
                return start
            if all(fresh):
                return Weights(weights.first, weights.second)
            due = _flags(fresh, weights.first.device).view(1, -1, 1, 1)
        second = None
        if weights.second is not None and start.second is not None:
            second = torch.where(due, weights.second, start.second)
        return Weights(torch.where(due, weights.first, start.first), second)


def _flags(fresh: tuple[bool, ...], device: torch.device) -> Tensor:
    return torch.tensor(fresh).to(device, non_blocking=True)


def with_initial(weights: Weights, initial: Weights | None) -> Weights:
    """The memories themselves, where the weights are differences from `initial`."""
    if initial is None:
        return weights
    second = None
    if weights.second is not None and initial.second is not None:
        second = initial.second + weights.second
    return Weights(initial.first + weights.first, second)


def clip(u: Tensor, most: float) -> Tensor:
    """Shortened to the length `most` along the last dimension where longer; differentiable to any
    order at zero too."""
    longer = (u * u).sum(-1, keepdim=True) * (1 / (most * most))
    return u * longer.clamp_min(1.0).rsqrt()
