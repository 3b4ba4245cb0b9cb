"""The continuum memory system over any causal language model (Eq. 70-74)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nestling.continuum import fast as differences
from nestling.continuum import learning
from nestling.continuum.caches import context_limit
from nestling.continuum.call import Call
from nestling.continuum.core import ContinuumState, LevelState, MemoryLevel, Output, Slot
from nestling.continuum.plan import make_plan
from nestling.continuum.reading import Place
from nestling.continuum.slots import cut, shapes, weight_of

__all__ = ["METAS", "Continuum"]

METAS = (None, "frozen", "first_order", "second_order")
"""What of a call can be differentiated; see `Continuum.forward`."""


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
        for name, value in (("context", context), ("segment", segment)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 position; got {value}")
        self.model = model
        self.slots = tuple(slots)
        self.sizes = shapes(model, self.slots)
        self.plan = make_plan(
            levels, slots, reduce=reduce, transfer=transfer, transfer_rate=transfer_rate
        )
        limit = context_limit(model)
        self.context = min(filter(None, (context, limit)), default=None)
        self.segment = segment
        self.log_rate: nn.Parameter | None = None
        if learn_rates:
            if any(level.rate == 0.0 for level in levels):
                raise ValueError("learn_rates: every level needs a rate above 0 to start from")
            like = weight_of(model, self.slots[0].name)[0]
            exact = torch.promote_types(like.dtype, torch.float32)
            rates = torch.tensor([lv.rate for lv in levels], dtype=exact, device=like.device)
            self.log_rate = nn.Parameter(rates.log())

    @property
    def levels(self) -> tuple[MemoryLevel, ...]:
        """The levels, in the order they were given."""
        return self.plan.levels

    def init(self, batch: int = 1) -> ContinuumState:
        """The state before the first token: nothing learned, nothing read."""
        if batch < 1:
            raise ValueError(f"batch must be at least 1; got {batch}")
        like = self._weights()[0][0].detach()
        zero = torch.zeros(batch, dtype=torch.int64, device=like.device)
        tokens = zero.new_zeros(batch, 0)
        return ContinuumState(
            levels=tuple(self._empty(number, batch, like) for number in range(len(self.levels))),
            start=zero,
            begin=zero,
            tokens=tokens,
            wanted=tokens.bool(),
            cache=None,
            ahead=None,
            last=None,
        )

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
        """Read `ids` [B, T] and learn from every pair whose target is now known (Eq. 71).

        learn: False only reads, with the fast weights as they are: no level changes, and pairs
            still waiting for their segment are dropped. A bool tensor [B, T] says for which
            *targets* the pair is learned (answers only; padding at the end).
        meta: None: no gradients go out. Otherwise `losses` and `logits` can be differentiated by
            the model's parameters: "frozen" by all but the slots, "first_order" with the fast
            weights as constants, "second_order" through every update (also by `log_rate`).
        keep_logits: False gives only the last token's logits.
        measure: norms in `updates` (nan otherwise).
        """
        state = self.init(ids.shape[0]) if state is None and ids.dim() == 2 else state
        state = self._check(ids, state, learn, meta)
        with torch.inference_mode(False):
            call = Call(self, meta, keep_logits, measure)
            if learn is False or not self.plan.order:
                return call.read(ids.clone(), state)
            wanted = torch.ones_like(ids, dtype=torch.bool) if learn is True else learn
            return call.learn(ids.clone(), wanted, state)

    def delta(self, state: ContinuumState, slot: str) -> Tensor | None:
        """All levels' difference on one slot as a matrix [B, Do, Di]; None if nothing learned."""
        number = [each.name for each in self.slots].index(slot)
        place = self.places(state.levels)[number]
        if not place.parts:
            return None
        full = [(part, differences.dense(fast)) for part, fast in place.parts]
        zero = full[0][1].new_zeros(self.sizes[number])
        return differences.merge(zero, full).expand(state.batch, -1, -1)

    def reset(self, state: ContinuumState, *, context: bool = True) -> ContinuumState:
        """Forget what was learned; with `context` also what was read."""
        fresh = self.init(state.batch)
        return fresh if context else self.new_context(state)._replace(levels=fresh.levels)

    def new_context(self, state: ContinuumState) -> ContinuumState:
        """Keep what was learned, but begin a new text: no tokens waiting, empty cache.

        Pairs not yet part of a finished segment are dropped; the clock (position) goes on.
        """
        start = state.start + state.tokens.shape[1]
        return state._replace(
            start=start,
            begin=start,
            tokens=state.tokens[:, :0],
            wanted=state.wanted[:, :0],
            cache=None,
            ahead=None,
            last=None,
        )

    def rate(self, number: int, *, graph: bool = False) -> float | Tensor:
        """A level's rate: a number, or under `graph` what `log_rate` says."""
        if self.log_rate is None:
            return self.levels[number].rate
        rate = self.log_rate[number].exp()
        return rate if graph else float(rate)

    def _weights(self) -> list[tuple[Tensor, bool]]:
        return [weight_of(self.model, slot.name) for slot in self.slots]

    def places(self, levels: tuple[LevelState, ...]) -> list[Place]:
        """Every slot with the differences its levels have now."""
        places = [Place(weight, transposed, []) for weight, transposed in self._weights()]
        for parts, level in zip(self.plan.parts, levels, strict=True):
            for own, fast in zip(parts, level.fast, strict=True):
                if fast is not None:
                    places[own.slot].parts.append((own.part, fast))
        return places

    def _empty(self, number: int, batch: int, like: Tensor) -> LevelState:
        parts = self.plan.parts[number]
        state = learning.empty(len(parts), batch, like)
        nested = self.plan.transfer == "second_order" and number in self.plan.order
        if not nested or self.plan.slower(number) is None:
            return state
        zeros = [
            cut(like.new_zeros(batch, *self.sizes[own.slot], dtype=state.seen.dtype), own.part)
            for own in parts
        ]
        start = tuple(zero.clone().requires_grad_() for zero in zeros)
        return state._replace(fast=start, start=start)

    def _check(
        self, ids: Tensor, state: ContinuumState | None, learn: bool | Tensor, meta: str | None
    ) -> ContinuumState:
        if ids.dim() != 2 or ids.shape[1] == 0 or state is None or state.batch != ids.shape[0]:
            have = "no state" if state is None else f"a state of {state.batch} sequences"
            raise ValueError(
                f"ids must be [batch, tokens] with at least one token, and the state of that batch;"
                f" got ids of shape {tuple(ids.shape)} and {have}"
            )
        if not isinstance(learn, bool) and (learn.dtype != torch.bool or learn.shape != ids.shape):
            raise ValueError(
                f"learn must be True, False or a bool tensor of shape {tuple(ids.shape)}; got"
                f" {learn.dtype} of shape {tuple(learn.shape)}"
            )
        if meta not in METAS:
            raise ValueError(f"meta must be one of {METAS}; got {meta!r}")
        if meta == "second_order" and any(level.rank is not None for level in self.levels):
            raise ValueError("meta='second_order' needs levels with rank=None")
        if meta in ("frozen", "first_order") and self.plan.transfer == "second_order":
            raise ValueError("transfer='second_order' needs meta=None or meta='second_order'")
        if self.model.training and getattr(self.model, "is_gradient_checkpointing", False):
            raise ValueError(
                "the model recomputes activations in the backward pass (gradient checkpointing),"
                " where fast weights are not known; call model.gradient_checkpointing_disable()"
            )
        return state
