"""What a continuum memory is made of: levels, slots, and a state that is plain data (Eq. 70-74).

A *slot* is one weight matrix of a language model. Every level owns some slots, or parts of them,
and keeps for each sequence a *difference* from the model's weight there: the level's fast weights.
The model reads with `W0 + sum_l Delta_l`; the model itself is never changed.

The clock counts (input, target) pairs. A pair is consumed once its target is known, so feeding a
stream in any pieces gives the same fast weights. `n` tokens are `n - 1` pairs.

Shapes: B sequences, T tokens, V vocabulary, Do x Di a weight (outputs first), R rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from nestling.continuum.fast import Fast
from nestling.levels import Level, LevelUpdate
from nestling.rules.core import Rule, identity

__all__ = ["ContinuumState", "LevelState", "MemoryLevel", "Output", "Pairs"]


@dataclass(frozen=True, kw_only=True)
class MemoryLevel(Level):
    """A level of memory: how often it changes (Eq. 71), by which rule, and how strongly.

    rule: any rule of `nestling.rules`; plain gradient descent by default.
    rate: eta; 0 (with `retain` 1) never changes, and costs nothing.
    retain: alpha, on the *difference*: below 1 the level drifts back to its initial weights.
    rank: None keeps a full matrix; a number keeps `U V^T` with at most so many columns: exact until
        it is exceeded, then the best approximation; plain gradient descent only.
    """

    rule: Rule = identity
    rate: float = 1e-2
    retain: float = 1.0
    rank: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.rate) and self.rate >= 0.0):
            raise ValueError(f"level {self.name!r}: rate must be a number >= 0; got {self.rate!r}")
        if not 0.0 <= self.retain <= 1.0:
            raise ValueError(f"level {self.name!r}: retain must lie in [0, 1]; got {self.retain!r}")
        whole = isinstance(self.rank, int) and not isinstance(self.rank, bool)
        if self.rank is not None and not (whole and self.rank >= 1):
            raise ValueError(
                f"level {self.name!r}: rank must be None or a whole number of at least 1; got"
                f" {self.rank!r}"
            )

    @property
    def active(self) -> bool:
        """False when this level can never change."""
        return self.chunk != math.inf and (self.rate != 0.0 or self.retain != 1.0)


class Pairs(NamedTuple):
    """The pairs a gradient came from: inputs, and targets `u = -dL/dy` of the summed loss."""

    x: Tensor  # [B, n, Di]
    u: Tensor  # [B, n, Do]


class LevelState(NamedTuple):
    """One level for every sequence; tuples have one entry per part the level owns, in slot order.

    `sums` and `pairs` collect the unfinished chunk (a level whose chunk is a multiple of another's
    is fed by that one when it is due); `pairs` only for rules that need them. `start`, `outer`,
    `outer_seen` and `outer_surprise` serve the nested variant (Eq. 72): the initial state the level
    returns to, and what the next slower level has collected to learn it from.
    """

    fast: tuple[Fast, ...]
    rule: tuple[Any, ...]  # the rule's own state; None before the first update
    sums: tuple[Fast, ...]  # gradient of the summed loss
    pairs: tuple[Pairs | None, ...]
    seen: Tensor  # [B] pairs collected
    surprise: Tensor  # [B] their summed loss
    updates: Tensor  # [B] int64: updates so far (since the level's context began, Eq. 72)
    lost: Tensor  # [B] norm of what truncation to `rank` has dropped so far (summed)
    start: tuple[Fast, ...]  # None is zero
    outer: tuple[Fast, ...]  # gradient of the summed loss
    outer_seen: Tensor  # [B]
    outer_surprise: Tensor  # [B]


class ContinuumState(NamedTuple):
    """All that one continuum remembers; every tensor has the batch in front.

    `start` inputs are behind the last segment; `tokens` came after it and wait for their segment
    to be complete. `cache` is the model's own state before `tokens`, `ahead` after them (trees of
    tensors; None is empty). What was *learned* is `levels`; the rest is the running context.
    """

    levels: tuple[LevelState, ...]
    start: Tensor  # [B] int64, the same for all sequences
    begin: Tensor  # [B] int64: where the model's cache begins, the same for all sequences
    tokens: Tensor  # [B, P] int64
    wanted: Tensor  # [B, P] bool: is the pair whose target is this token to be learned
    cache: Any
    ahead: Any
    last: Tensor | None  # [B, V] logits after the last token

    @property
    def position(self) -> int:
        """How many (input, target) pairs were consumed."""
        return max(int(self.start[0]) + self.tokens.shape[1] - 1, 0)

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.start.shape[0]


class Output(NamedTuple):
    """What reading (and learning from) some tokens gives."""

    logits: Tensor  # [B, T, V] for the token after each; [B, 1, V] with keep_logits=False
    losses: Tensor  # [B, T] each token's loss given all before it; nan for the very first
    state: ContinuumState
    updates: tuple[LevelUpdate, ...]  # in the order in which they happened
