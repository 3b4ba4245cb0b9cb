"""The continuum memory system over any causal language model, or any module with a loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nestling.checks import one_of
from nestling.continuum.assignment import Slot
from nestling.continuum.engine import TRANSFERS, Engine, MemoryLevel, Rate
from nestling.continuum.fast import Owned, weight_of
from nestling.continuum.stream import (
    Confine,
    ContinuumState,
    Output,
    Precondition,
    TokenStream,
    begin,
    context_limit,
)
from nestling.continuum.supervised import Loss, PairStream

METAS = (None, "frozen", "first_order", "second_order")
"""The kinds of differentiation through a call; see `Continuum.forward`."""


class Continuum(nn.Module):
    """A model whose chosen weights are memories that learn what it reads (Eq. 71).

        continuum = Continuum(model, levels, slots)              a causal language model
        state = continuum.init(batch=1)
        logits, losses, state, updates = continuum(ids, state)

        continuum = Continuum(net, levels, slots, loss=loss)     any module with a loss
        outputs, losses, state, updates = continuum(inputs, state, targets=targets)

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
    loss: for a module that is no language model, `loss(outputs, targets)` of N examples, not
        reduced: [N] or more dimensions. The module then sees plain batches of examples, and the
        stream consists of (input, target) pairs [B, T, ...].
    metric: maps every slot's inputs and surprises of a segment, [B, n, Di] and [B, n, Do], to those
        whose products are the gradient the levels see: a preconditioner.
    confine: called after every segment with the levels before and after it and their updates, it
        returns levels and updates to go on with: a trust region.
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
        loss: Loss | None = None,
        metric: Precondition | None = None,
        confine: Confine | None = None,
        natural: bool = False,
    ) -> None:
        super().__init__()
        if loss is None and not hasattr(model, "config"):
            raise ValueError(
                f"{type(model).__name__} is no language model: give a loss, as in Continuum(model,"
                " levels, slots, loss=lambda outputs, targets: ...)"
            )
        if loss is not None and (context is not None or segment is not None):
            raise ValueError("context and segment belong to token streams; got them with a loss")
        self.loss = loss
        for name, value in (("context", context), ("segment", segment)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 position; got {value}")
        self.model = model
        self.engine = Engine(
            model, levels, slots, reduce=reduce, transfer=transfer, transfer_rate=transfer_rate,
            natural=natural,
        )  # fmt: skip
        self.metric, self.confine = metric, confine
        limit = None if loss is not None else context_limit(model)
        self.context = min(filter(None, (context, limit)), default=None)
        self.segment = segment
        self.log_rate: nn.Parameter | None = None
        if learn_rates:
            if any(level.rate == 0.0 for level in levels):
                raise ValueError("learn_rates: every level needs a rate above 0 to start from")
            like = self.engine.like
            exact = torch.promote_types(like.dtype, torch.float32)
            rates = torch.tensor([lv.rate for lv in levels], dtype=exact, device=like.device)
            self.log_rate = nn.Parameter(rates.log())

    @property
    def levels(self) -> tuple[MemoryLevel, ...]:
        """The levels, in the order they were given."""
        return self.engine.levels

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The matrices that hold memory."""
        return self.engine.slots

    @property
    def parts(self) -> tuple[tuple[Owned, ...], ...]:
        """For every level the parts it owns, in the order of the slots."""
        return self.engine.wiring.parts

    def init(self, batch: int = 1) -> ContinuumState:
        """The state before the first token: nothing learned, nothing read."""
        if batch < 1:
            raise ValueError(f"batch must be at least 1; got {batch}")
        return begin(self.engine, batch)

    def forward(
        self,
        ids: Tensor,
        state: ContinuumState | None = None,
        *,
        learn: bool | Tensor = True,
        meta: str | None = None,
        keep_logits: bool = True,
        measure: bool = True,
        targets: Tensor | None = None,
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
        targets: with a `loss`: what the inputs `ids` [B, T, ...] are to give, [B, T, ...].
        """
        if meta not in METAS:
            one_of("meta", meta, METAS)
        if self.loss is not None:
            return self._pairs(self.loss, ids, targets, state, learn, meta, measure)
        if targets is not None:
            raise ValueError(
                "targets belong to a module with a loss; a stream of tokens has its own"
            )
        state = self.init(ids.shape[0]) if state is None and ids.dim() == 2 else state
        state = self._check(ids, state, learn, meta)
        with torch.inference_mode(False):
            stream = TokenStream(
                self.engine,
                self.rates(graph=meta == "second_order"),
                context=self.context,
                segment=self.segment,
                meta=meta,
                keep_logits=keep_logits,
                measure=measure,
                metric=self.metric,
                confine=self.confine,
            )
            if learn is False or not self.engine.wiring.order:
                return stream.read(ids.clone(), state)
            wanted = torch.ones_like(ids, dtype=torch.bool) if learn is True else learn
            return stream.learn(ids.clone(), wanted, state)

    def _pairs(
        self,
        loss: Loss,
        inputs: Tensor,
        targets: Tensor | None,
        state: ContinuumState | None,
        learn: bool | Tensor,
        meta: str | None,
        measure: bool,
    ) -> Output:
        """`forward` for a module with a loss."""
        if targets is None:
            raise ValueError("a module with a loss learns from pairs: give targets=")
        if inputs.dim() < 2 or inputs.shape[1] == 0 or targets.shape[:2] != inputs.shape[:2]:
            raise ValueError(
                "inputs and targets must be [batch, pairs, ...] with at least one pair; got"
                f" {tuple(inputs.shape)} and {tuple(targets.shape)}"
            )
        state = self.init(inputs.shape[0]) if state is None else state
        if state.batch != inputs.shape[0]:
            raise ValueError(f"the state holds {state.batch} streams, the inputs {inputs.shape[0]}")
        wanted = torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
        if isinstance(learn, Tensor):
            wanted = learn.to(torch.bool).expand_as(wanted)
        with torch.inference_mode(False):
            rates = self.rates(graph=meta == "second_order")
            stream = PairStream(self.engine, loss, rates, meta=meta, measure=measure)
            learning = learn is not False and bool(self.engine.wiring.order)
            return stream.learn(inputs, targets, wanted, state, learn=learning)

    def delta(self, state: ContinuumState, slot: str) -> Tensor | None:
        """All levels' difference on one slot as a matrix [B, Do, Di]; None if nothing learned."""
        return self.engine.delta(state.levels, slot)

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

    def rates(self, *, graph: bool = False) -> list[Rate]:
        """The levels' rates: numbers, or under `graph` what `log_rate` says."""
        if self.log_rate is None:
            return [level.rate for level in self.levels]
        rates = self.log_rate.exp()
        return list(rates.unbind()) if graph else rates.tolist()

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
        if meta == "second_order" and any(level.rank is not None for level in self.levels):
            raise ValueError("meta='second_order' needs levels with rank=None")
        if meta in ("frozen", "first_order") and self.engine.wiring.transfer == "second_order":
            raise ValueError("transfer='second_order' needs meta=None or meta='second_order'")
        if self.model.training and getattr(self.model, "is_gradient_checkpointing", False):
            raise ValueError(
                "the model recomputes activations in the backward pass (gradient checkpointing),"
                " where fast weights are not known; call model.gradient_checkpointing_disable()"
            )
        return state


def meta_loss(
    continuum: Continuum,
    ids: Tensor,
    state: ContinuumState | None = None,
    *,
    meta: str = "first_order",
    learn: bool | Tensor = True,
) -> tuple[Tensor, Output]:
    """The mean loss of text that is learned while it is read; call `.backward()` on it (Eq. 73).

    The initial state of every level is the model's own weight there; `meta` says how it learns
    (deviation 14). All other parameters are trained by the plain gradient in any case.

    frozen: it does not. first_order: by the gradient at the adapted weights. reptile: towards the
    adapted weights (its gradient is `-mean_b Delta` at the end). second_order: by the true
    gradient, through every update, as are the rates.
    """
    one_of("meta", meta, TRANSFERS)
    output = continuum(ids, state, learn=learn, meta="frozen" if meta == "reptile" else meta)
    loss = output.losses[~output.losses.isnan()].mean()
    if meta != "reptile":
        return loss, output
    pull = torch.zeros_like(loss)
    for slot in continuum.slots:
        delta = continuum.delta(output.state, slot.name)
        weight, transposed = weight_of(continuum.model, slot.name)
        if delta is not None and weight.requires_grad:
            end = delta.detach().mean(0)
            pull = pull - (weight * (end.mT if transposed else end).to(weight.dtype)).sum()
    return loss + (pull - pull.detach()), output
