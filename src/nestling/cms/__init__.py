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
]
