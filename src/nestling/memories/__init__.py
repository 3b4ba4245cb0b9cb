"""Memories: sequence layers with explicit state that read and write in context (Eq. 5, 14-18,
61-69, 76-93)."""

from nestling.memories.core import Memory
from nestling.memories.state import (
    state_detach,
    state_repeat,
    state_select,
    state_stack,
    state_to,
    tree_leaves,
    tree_map,
)

__all__ = [
    "Memory",
    "state_detach",
    "state_repeat",
    "state_select",
    "state_stack",
    "state_to",
    "tree_leaves",
    "tree_map",
]
