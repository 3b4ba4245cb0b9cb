"""Memories: sequence layers with explicit state that read and write in context (Eq. 5, 14-18,
61-69, 76-93). `core` says what a memory is."""

from nestling.memories.attention import Attention, AttentionConfig
from nestling.memories.core import Memory
from nestling.memories.linear import (
    DeltaNetConfig,
    GatedDeltaConfig,
    LinearAttentionConfig,
    LinearConfig,
    LinearMemory,
    RetentionConfig,
)
from nestling.memories.oja import OjaConfig
from nestling.memories.omega import Omega, OmegaConfig
from nestling.memories.options import configure
from nestling.memories.self_modifying import (
    Learning,
    Projections,
    Rates,
    Retention,
    SelfModifying,
    SelfModifyingConfig,
)
from nestling.memories.steered import Steered, SteeredConfig
from nestling.memories.titans import Titans, TitansConfig
from nestling.tree import (
    state_detach,
    state_repeat,
    state_select,
    state_stack,
    state_to,
    tree_leaves,
    tree_map,
)

__all__ = [
    "Attention",
    "AttentionConfig",
    "DeltaNetConfig",
    "GatedDeltaConfig",
    "Learning",
    "LinearAttentionConfig",
    "LinearConfig",
    "LinearMemory",
    "Memory",
    "OjaConfig",
    "Omega",
    "OmegaConfig",
    "Projections",
    "Rates",
    "Retention",
    "RetentionConfig",
    "SelfModifying",
    "SelfModifyingConfig",
    "Steered",
    "SteeredConfig",
    "Titans",
    "TitansConfig",
    "configure",
    "state_detach",
    "state_repeat",
    "state_select",
    "state_stack",
    "state_to",
    "tree_leaves",
    "tree_map",
]
