"""The memories that a configuration may name, and how they are built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nestling.continuum.layers import (
    GATED,
    Chain,
    Channel,
    FeedForward,
    InContext,
    Parallel,
)
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


def mixer_config(name: str, width: int, heads: int, options: Mapping[str, Any]) -> Any:
    """A mixer's own configuration; raises ValueError for what it does not allow."""
    try:
        return configure(MIXERS[name][0], width=width, heads=heads, **options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"mixer {name!r}: {error}") from error


TOPOLOGIES: dict[str, type[Chain | Parallel]] = {"chain": Chain, "parallel": Parallel}


def _continuum(config: Any) -> Channel:
    width, levels = config.hidden_size, config.level_list
    usual = 8 * width // 3 if config.activation == GATED else 4 * width
    return TOPOLOGIES[config.topology](
        width, config.intermediate_size or max(1, usual // len(levels)), levels,
        activation=config.activation, eps=config.rms_norm_eps, natural=config.natural,
    )  # fmt: skip


def _in_context(config: Any) -> Channel:
    width = config.hidden_size
    mlp = AdaptiveMLP(width, config.intermediate_size or 2 * width, config.num_attention_heads)
    return InContext(mlp, eps=config.rms_norm_eps)


def _feed_forward(config: Any) -> Channel:
    width = config.hidden_size
    return FeedForward(width, config.intermediate_size or 8 * width // 3, eps=config.rms_norm_eps)


CHANNELS: dict[str, Callable[[Any], Channel]] = {
    "cms": _continuum,
    "in_context": _in_context,
    "swiglu": _feed_forward,
}
"""Channel memories by name, each made from a `NestlingConfig`."""
