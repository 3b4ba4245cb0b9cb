"""Consolidation: what a faster level has learned moves into the next slower one.

Besides the nested variant of the engine (Eq. 72), where the slower level learns the initial state
of the faster one, there is the plain move: when the slower level is due, a share of the faster
level's difference is added to it and taken from the faster one. The sum, which is what the model
reads with, stays as it is; but what was moved is then kept by the slower level's retention.

With a small share the slower level is an average over many of the faster one's chunks, and with
rate 0 it is nothing else: what lasts over several texts gathers there, while the faster level
follows the text at hand and, if it retains less than 1, lets go of it again. That is what brings a
text back quickly after another one (docs/adapt.md).
"""

from __future__ import annotations

import itertools
import math

from nestling.continuum import Continuum, ContinuumState, Factors, Fast, LevelState
from nestling.continuum import fast as differences

__all__ = ["check_move", "move", "moving"]


def moving(continuum: Continuum) -> list[int]:
    """The levels between which something moves, fastest first; rate 0 only receives."""
    order = [n for n, level in enumerate(continuum.levels) if level.chunk != math.inf]
    return sorted(order, key=lambda n: continuum.levels[n].chunk)


def check_move(continuum: Continuum) -> None:
    """Refuse levels that do not sit on the same weights: nothing can move between them."""
    owned = [
        [(own.slot, *own.part[1:]) for own in continuum.parts[number]]
        for number in moving(continuum)
    ]
    if any(parts != owned[0] for parts in owned):
        raise ValueError(
            "transfer='move' needs levels on the same weights: assign='share' (for other"
            " assignments use transfer='reptile' or 'first_order')"
        )


def move(continuum: Continuum, state: ContinuumState, share: float) -> ContinuumState:
    """Every level that is due now takes `share` of the next faster one's difference."""
    levels = list(state.levels)
    for fast, slow in reversed(list(itertools.pairwise(moving(continuum)))):
        if continuum.levels[slow].due(state.position):
            rank = continuum.levels[slow].rank
            levels[fast], levels[slow] = _move(levels[fast], levels[slow], share, rank)
            if not continuum.levels[slow].active:  # it has no updates of its own
                updates = levels[slow].updates + 1
                levels[slow] = levels[slow]._replace(updates=updates)
    return state._replace(levels=tuple(levels))


def _move(
    fast: LevelState, slow: LevelState, share: float, rank: int | None
) -> tuple[LevelState, LevelState]:
    given: list[Fast] = []
    kept: list[Fast] = []
    lost = slow.lost
    for mine, its in zip(slow.fast, fast.fast, strict=True):
        total = differences.add(mine, _like(differences.scale(its, share), rank))
        if rank is not None and total is not None:
            total, dropped = differences.truncate(total, rank)
            lost = lost + dropped
        given.append(total)
        kept.append(None if share == 1.0 else differences.scale(its, 1.0 - share))
    return fast._replace(fast=tuple(kept)), slow._replace(fast=tuple(given), lost=lost)


def _like(fast: Fast, rank: int | None) -> Fast:
    """In the form of the slower level: a full matrix, or factors."""
    if rank is None:
        return None if fast is None else differences.dense(fast)
    if fast is None or isinstance(fast, Factors):
        return fast
    raise ValueError("transfer='move': a full level cannot move into one with a rank")
