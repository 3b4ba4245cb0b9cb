"""What the self-modifying scan works on (Eq. 76-93): the rule's options and the stacked memories.

Legend: b = sequences x heads, T tokens, C tokens of a segment, N memories, d head width,
F hidden width of a 2-layer memory.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "ADAPTIVE",
    "RETAIN_MIN",
    "Inputs",
    "SelfRule",
    "Weights",
    "clip",
    "restart",
    "take",
    "whole",
]

ADAPTIVE = ("k", "v", "eta", "alpha", "q")
"""The projections that may be memories themselves, in the order in which they are stacked."""


RETAIN_MIN = 1e-4
"""The least retention; it keeps products of retentions in range of their logarithms."""


class Weights(NamedTuple):
    """All memories of a block, stacked: first `mem`, then the adaptive projections.

    A matrix memory is `M(x) = first x`. A 2-layer memory is `M(x) = x + second silu(first x)`
    (Eq. 89, 91). `moved` holds the momenta of `first` and `second` where the rule has momentum.
    """

    first: Tensor  # [b, N, d or F, d]
    second: Tensor | None = None  # [b, N, d, F]
    moved: tuple[Tensor, ...] | None = None  # like first (and second)


class Inputs(NamedTuple):
    """What is known before the scan: tokens, and the static parts of the projections.

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


@dataclass(frozen=True, kw_only=True)
class SelfRule:
    """How the memories of a block learn (Eq. 83-93); one instance is one variant.

    objective `dot` (Eq. 92) writes `vhat`, `l2` (Eq. 93) writes `vhat - M(k)`, both at the state
    where the chunk starts. `own_values`: stage 3, `vhat = M(v)`; otherwise stage 2, `vhat = v`.
    `erase`: delta gradient descent; False is plain gradient descent with retention.
    Retention lies in (0, retain_max], `rate = retain rate_max sigmoid(.)`: `rate_max = 2` allows
    negative eigenvalues. `clip` bounds the error signal of every layer (deviation 8).
    `read_start`: read at the chunk's start (Eq. 90) instead of the state before each token.
    """

    adaptive: tuple[str, ...] = ("k", "v", "eta", "alpha")
    objective: str = "dot"
    own_values: bool = True
    erase: bool = True
    rate_max: float = 1.0
    retain_max: float = 0.9999
    clip: float = 1.0
    chunk: int = 64
    chunk_others: int = 64
    read_start: bool = False
    text: str = field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        unknown = [name for name in self.adaptive if name not in ADAPTIVE]
        if unknown or list(self.adaptive) != [n for n in ADAPTIVE if n in self.adaptive]:
            raise ValueError(
                f"adaptive must be some of {ADAPTIVE}, each once, in this order;"
                f" got {self.adaptive}"
            )
        if self.objective not in ("dot", "l2"):
            raise ValueError(f"objective must be 'dot' or 'l2'; got {self.objective!r}")
        if not 0 < self.rate_max <= 2:
            raise ValueError(f"rate_max must be in (0, 2]; got {self.rate_max}")
        if not 0 < self.retain_max < 1:
            raise ValueError(f"retain_max must be in (0, 1); got {self.retain_max}")
        if not self.clip > 0:
            raise ValueError(f"clip must be positive; got {self.clip}")
        small, large = sorted((self.chunk, self.chunk_others))
        if small < 1 or large % small:
            raise ValueError(
                "chunk and chunk_others must be at least 1 and one a multiple of the other;"
                f" got {self.chunk} and {self.chunk_others}"
            )
        options = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        object.__setattr__(self, "text", json.dumps(options))

    @staticmethod
    def of(text: str) -> SelfRule:
        """The rule that has this `text`: operators take plain values only."""
        options = json.loads(text)
        return SelfRule(**options | {"adaptive": tuple(options["adaptive"])})

    @property
    def names(self) -> tuple[str, ...]:
        """The stacked memories in order."""
        return ("mem", *self.adaptive)

    @property
    def chunks(self) -> tuple[int, ...]:
        """The chunk of every stacked memory."""
        return (self.chunk, *(self.chunk_others for _ in self.adaptive))

    @property
    def segment(self) -> int:
        """Tokens between two moments at which some memory may start a chunk."""
        return min(self.chunks)

    def retain(self, raw: Tensor) -> Tensor:
        """Retention from its read-out, between `RETAIN_MIN` and `retain_max` (deviation 7)."""
        return RETAIN_MIN + (self.retain_max - RETAIN_MIN) * torch.sigmoid(raw)

    def slot(self, name: str) -> int | None:
        """Where a memory stands in the stack; None for a static projection."""
        return self.names.index(name) if name in self.names else None


def whole(weights: Weights, initial: Weights | None) -> Weights:
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
    length = ((u * u).sum(-1, keepdim=True) + 1e-16).sqrt()
    return u * (most / length.clamp_min(most))


def restart(rule: SelfRule, weights: Weights, start: Weights, position: Tensor) -> Weights:
    """The weights where each memory's chunk starts: the running ones at multiples of its chunk.

    `position` [b] counts the tokens each item has seen (Eq. 90 with deviation 2).
    """
    chunks = torch.tensor(rule.chunks, device=position.device)
    due = (position[:, None] % chunks == 0)[:, :, None, None]
    second = None
    if weights.second is not None and start.second is not None:
        second = torch.where(due, weights.second, start.second)
    return Weights(torch.where(due, weights.first, start.first), second)


def take(inputs: Inputs, tokens: slice) -> Inputs:
    """The inputs of some tokens."""

    def cut(part: Tensor | None) -> Tensor | None:
        return None if part is None else part[:, tokens]

    return Inputs(
        inputs.x[:, tokens],
        inputs.readout,
        inputs.bias,
        cut(inputs.k),
        cut(inputs.v),
        cut(inputs.q),
        cut(inputs.gates),
        inputs.erase,
        cut(inputs.theta),
        cut(inputs.valid),
        inputs.initial,
    )
