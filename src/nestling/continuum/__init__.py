"""Continuum memory: levels of fast weights in any causal language model (Eq. 70-74)."""

from nestling.continuum.continuum import Continuum
from nestling.continuum.core import (
    ContinuumState,
    Factors,
    Fast,
    LevelState,
    MemoryLevel,
    Output,
    Pairs,
    Part,
    Slot,
    Update,
)
from nestling.continuum.meta import meta_loss
from nestling.continuum.naive import naive
from nestling.continuum.padding import align
from nestling.continuum.slots import own_slots
from nestling.continuum.steps import level_parts

__all__ = [
    "Continuum",
    "ContinuumState",
    "Factors",
    "Fast",
    "LevelState",
    "MemoryLevel",
    "Output",
    "Pairs",
    "Part",
    "Slot",
    "Update",
    "align",
    "level_parts",
    "meta_loss",
    "naive",
    "own_slots",
]
