"""The continuum memory system over any causal language model (Eq. 70-74)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from nestling.cms.core import ContinuumState, MemoryLevel, Output, Slot

__all__ = ["Continuum"]


class Continuum(nn.Module):
    """A language model whose chosen weights are memories that learn what it reads (Eq. 71).

        continuum = Continuum(model, levels, slots)
        state = continuum.init(batch=1)
        logits, losses, state, updates = continuum(ids, state)

    Pure: the state goes in and comes out, the model is not changed, and several continua (also in
    several threads) may share one model.

    levels: fastest first by convention; any chunks.
    slots: which matrices, owned by which levels.
    reduce: the gradient of a chunk is the "mean" over its pairs (default: a rate then means the
        same for every chunk size, as in NestedOptimizer) or their "sum", as Eq. 71 is printed.
    transfer: None: the levels' initial states are learned outside, in meta-training (Eq. 73, 74).
        "frozen", "first_order", "reptile", "second_order": nested (Eq. 72), each faster level
        returns to an initial state that the next slower one learns in this way.
    transfer_rate: how strongly; None: 0.5 for "reptile", else the slower level's own rate.
    context: the model's own cache starts anew every so many positions; None: at the model's
        `max_position_embeddings` (a memory model has no limit).
    segment: at most so many pairs in one backward pass; None: as many as the schedule allows.
    learn_rates: the levels' rates become a parameter, `log_rate`.
    """

    def __init__(
        self,
        model: Any,
        levels: Sequence[MemoryLevel],
        slots: Sequence[Slot],
        *,
        reduce: str = "mean",
        transfer: str | None = None,
        transfer_rate: float | None = None,
        context: int | None = None,
        segment: int | None = None,
        learn_rates: bool = False,
    ) -> None:
        super().__init__()
        raise NotImplementedError

    def init(self, batch: int = 1) -> ContinuumState:
        """The state before the first token: nothing learned, nothing read."""
        raise NotImplementedError

    def forward(
        self,
        ids: Tensor,
        state: ContinuumState | None = None,
        *,
        learn: bool | Tensor = True,
        meta: str | None = None,
        keep_logits: bool = True,
        measure: bool = True,
    ) -> Output:
        """Read `ids` [B, T] and learn from every pair whose target is now known.

        learn: False only reads, with the fast weights as they are: no level changes, and pairs
            still waiting for their segment are dropped. A bool tensor [B, T] says for which
            *targets* the pair is learned (answers only; padding at the end).
        meta: None: no gradients go out. Otherwise `losses` and `logits` can be differentiated by
            the model's parameters: "frozen" by all but the slots, "first_order" with the fast
            weights as constants, "second_order" through every update (also by `log_rate`).
        keep_logits: False gives only the last token's logits.
        measure: norms in `updates` (nan otherwise).
        """
        raise NotImplementedError

    def delta(self, state: ContinuumState, slot: str) -> Tensor | None:
        """All levels' difference on one slot as a matrix [B, Do, Di]; None if nothing learned."""
        raise NotImplementedError

    def reset(self, state: ContinuumState, *, context: bool = True) -> ContinuumState:
        """Forget what was learned; with `context` also what was read."""
        raise NotImplementedError

    def new_context(self, state: ContinuumState) -> ContinuumState:
        """Keep what was learned, but begin a new text: no tokens waiting, empty cache.

        Pairs not yet part of a finished segment are dropped; the clock (position) goes on.
        """
        raise NotImplementedError
