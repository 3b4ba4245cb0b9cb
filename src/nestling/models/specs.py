"""Blocks from names: which memories a configuration may name, and how they are built.

A spec is all a part needs, checked before any weight is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nestling.checks import one_of
from nestling.continuum.layers import (
    ACTIVATIONS,
    GATED,
    Chain,
    Channel,
    FeedForward,
    InContext,
    Parallel,
)
from nestling.levels import Level
from nestling.memories.adaptive import AdaptiveMLP
from nestling.memories.attention import Attention, AttentionConfig
from nestling.memories.core import Memory
from nestling.memories.linear import (
    DeltaNetConfig,
    GatedDeltaConfig,
    LinearAttentionConfig,
    LinearMemory,
    RetentionConfig,
)
from nestling.memories.oja import OjaConfig
from nestling.memories.omega import Omega, OmegaConfig
from nestling.memories.options import configure
from nestling.memories.self_modifying import SelfModifying, SelfModifyingConfig
from nestling.memories.steered import Steered, SteeredConfig
from nestling.memories.titans import Titans, TitansConfig

MemoryKind = tuple[type[Any], type[Memory]]  # a memory's configuration and its class

MIXERS: dict[str, MemoryKind] = {
    "attention": (AttentionConfig, Attention),
    "deltanet": (DeltaNetConfig, LinearMemory),
    "gated_delta": (GatedDeltaConfig, LinearMemory),
    "linear": (LinearAttentionConfig, LinearMemory),
    "oja": (OjaConfig, LinearMemory),
    "omega": (OmegaConfig, Omega),
    "retnet": (RetentionConfig, LinearMemory),
    "self_modifying": (SelfModifyingConfig, SelfModifying),
    "steered": (SteeredConfig, Steered),
    "titans": (TitansConfig, Titans),
}
"""Mixer memories by name."""


@dataclass(frozen=True, kw_only=True)
class MixerSpec:
    """A mixer by name, with its sizes and the options of its own configuration."""

    name: str
    width: int
    heads: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.config()

    def config(self) -> Any:
        """The memory's own configuration; raises ValueError for what it does not allow."""
        kind = MIXERS[self.name][0]
        try:
            return configure(kind, width=self.width, heads=self.heads, **self.options)
        except (TypeError, ValueError) as error:
            raise ValueError(f"mixer {self.name!r}: {error}") from error

    def build(self) -> Memory:
        return MIXERS[self.name][1](self.config())


@dataclass(frozen=True, kw_only=True)
class ChannelSpec:
    """A channel memory by name, with its sizes; `hidden` None is chosen from the width."""

    name: str
    width: int
    heads: int
    levels: tuple[Level, ...]
    hidden: int | None = None
    topology: str = "chain"
    activation: str = "gelu"
    eps: float = 1e-6
    natural: bool = False

    def __post_init__(self) -> None:
        one_of("topology", self.topology, TOPOLOGIES)
        one_of("activation", self.activation, (*ACTIVATIONS, GATED))
        if self.name == "in_context" and self.hidden and self.hidden % self.heads:
            raise ValueError(
                f"heads={self.heads} must divide the in-context channel's hidden width; got"
                f" {self.hidden}"
            )
        names = [level.name for level in self.levels]
        if len(set(names)) < len(names):
            raise ValueError(f"levels must have different names; got {names}")

    def build(self) -> Channel:
        return CHANNELS[self.name](self)


TOPOLOGIES: dict[str, type[Chain | Parallel]] = {"chain": Chain, "parallel": Parallel}


def _continuum(spec: ChannelSpec) -> Channel:
    usual = 8 * spec.width // 3 if spec.activation == GATED else 4 * spec.width
    hidden = spec.hidden or max(1, usual // len(spec.levels))
    return TOPOLOGIES[spec.topology](
        spec.width, hidden, spec.levels,
        activation=spec.activation, eps=spec.eps, natural=spec.natural,
    )  # fmt: skip


CHANNELS: dict[str, Callable[[ChannelSpec], Channel]] = {
    "cms": _continuum,
    "in_context": lambda s: InContext(
        AdaptiveMLP(s.width, s.hidden or 2 * s.width, s.heads), eps=s.eps
    ),
    "swiglu": lambda s: FeedForward(s.width, s.hidden or 8 * s.width // 3, eps=s.eps),
}
"""Channel memories by name."""
