"""Continuum memory: levels of weights that learn while they read, each at its own pace (Eq. 70-74).

`layers` has the MLPs and channels that are levels, `assignment` says which level owns which weight,
`engine` how levels learn, `stream` how tokens are read; `Continuum` puts them over any model.
"""

from nestling.continuum.assignment import (
    Slot,
    level_names,
    level_parts,
    own_slots,
    shared_slots,
)
from nestling.continuum.continuum import Continuum, meta_loss
from nestling.continuum.engine import LevelState, MemoryLevel
from nestling.continuum.fast import Factors, Fast, Part
from nestling.continuum.layers import (
    MLP,
    Block,
    BlockState,
    Chain,
    Channel,
    FeedForward,
    InContext,
    Parallel,
    SwiGLU,
)
from nestling.continuum.naive import naive
from nestling.continuum.stream import ContinuumState, Output, align
from nestling.rules.core import Pairs

__all__ = [
    "MLP",
    "Block",
    "BlockState",
    "Chain",
    "Channel",
    "Continuum",
    "ContinuumState",
    "Factors",
    "Fast",
    "FeedForward",
    "InContext",
    "LevelState",
    "MemoryLevel",
    "Output",
    "Pairs",
    "Parallel",
    "Part",
    "Slot",
    "SwiGLU",
    "align",
    "level_names",
    "level_parts",
    "meta_loss",
    "naive",
    "own_slots",
    "shared_slots",
]
