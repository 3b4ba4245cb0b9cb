"""Continuum memory: levels of fast weights in any causal language model (Eq. 70-74)."""

from nestling.cms.continuum import Continuum
from nestling.cms.core import (
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
from nestling.cms.meta import meta_loss
from nestling.cms.naive import naive
from nestling.cms.padding import align
from nestling.cms.slots import own_slots
from nestling.cms.steps import level_parts

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
