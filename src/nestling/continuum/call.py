"""One call of a continuum: the stream cut into segments, each read and learned from (Eq. 71).

Segments end at the absolute positions where some level is due. A whole segment is one forward pass
with a graph and one backward pass to the slots' outputs; then the levels that are due step. An
unfinished segment is answered without a graph and read again, from the cache where it began, once
its last target is known: so the fast weights do not depend on how the stream was cut into calls, to
the bit.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from nestling.continuum import fast as differences
from nestling.continuum import learning
from nestling.continuum.caches import cache_from, cache_tree
from nestling.continuum.core import ContinuumState, LevelState, Output, Update
from nestling.continuum.reading import Place, Reading
from nestling.continuum.slots import Owned, cut
from nestling.losses import first_loss, pair_losses
from nestling.scan import any_order
from nestling.tree import state_detach

if TYPE_CHECKING:
    from nestling.continuum.continuum import Continuum

__all__ = ["Call", "Piece"]


class Piece(NamedTuple):
    """What one forward pass gives."""

    logits: Tensor  # [B, n, V]
    losses: Tensor  # [B, m] of the targets it knows
    cache: Any


class Call:
    """One call of a continuum: the pieces of text it reads, and what it gathers from them."""

    def __init__(
        self, owner: Continuum, meta: str | None, keep_logits: bool, measure: bool
    ) -> None:
        self.owner, self.plan, self.model = owner, owner.plan, owner.model
        self.meta, self.keep_logits, self.measure = meta, keep_logits, measure
        self.graph = meta == "second_order" or self.plan.transfer == "second_order"
        self.constant = meta in (None, "frozen")
        plain = self.plan.transfer is None and all(self.plan.plain)
        self.in_place = meta is None and plain  # no graph, initial state or rule holds differences
        self.made: set[int] = set()  # levels whose differences this call has made
        self.logits: list[Tensor] = []
        self.losses: list[Tensor] = []
        self.updates: list[Update] = []

    def read(self, ids: Tensor, state: ContinuumState) -> Output:
        """Only read: one forward pass per context, no level changes."""
        here = int(state.start[0]) + state.tokens.shape[1]
        begin = int(state.begin[0])
        cache = state.ahead if state.tokens.shape[1] else state.cache
        last, limit = state.last, self.owner.context
        rest = ids
        while rest.shape[1]:
            if limit is not None and here - begin >= limit:
                begin, cache = here, None
            many = rest.shape[1] if limit is None else min(rest.shape[1], limit - (here - begin))
            piece = self._read(rest[:, :many], state.levels, cache, here - begin, last)
            self._keep(piece, 0, piece.losses)
            last, cache, here = piece.logits[:, -1], piece.cache, here + many
            rest = rest[:, many:]
        state = state._replace(
            start=torch.full_like(state.start, here),
            begin=torch.full_like(state.begin, begin),
            tokens=state.tokens[:, :0],
            wanted=state.wanted[:, :0],
            cache=cache,
            ahead=None,
        )
        return self._output(state, last)

    def learn(self, ids: Tensor, wanted: Tensor, state: ContinuumState) -> Output:
        """Read and learn: finished segments with a graph, the rest without."""
        tokens = torch.cat([state.tokens, ids], 1)
        wanted = torch.cat([state.wanted, wanted], 1)
        waiting = state.tokens.shape[1]  # tokens at the front whose logits were given already
        start, begin = int(state.start[0]), int(state.begin[0])
        levels, cache, ahead, last = state.levels, state.cache, state.ahead, state.last
        if waiting == 0:
            self.losses.append(first_loss(ids, last))
        while True:
            if self.owner.context is not None and start - begin >= self.owner.context:
                begin, cache = start, None
            end = self._end(start, begin)
            many = end - start
            if tokens.shape[1] <= many:
                break
            piece, levels = self._segment(
                tokens[:, : many + 1], wanted[:, 1 : many + 1], levels, cache, start - begin, end
            )
            self._keep(piece, waiting, piece.losses[:, max(waiting - 1, 0) :])
            cache, ahead, waiting, start = piece.cache, None, 0, end
            tokens, wanted = tokens[:, many:], wanted[:, many:]
        if waiting and ahead is not None:
            new, before, seen = tokens[:, waiting:], ahead, start - begin + waiting
            piece = self._read(new, levels, before, seen, last)
            self._keep(piece, 0, piece.losses)
        else:
            piece = self._read(tokens, levels, cache, start - begin, None)
            self._keep(piece, waiting, piece.losses[:, max(waiting, 1) :])
        state = state._replace(
            levels=levels,
            start=torch.full_like(state.start, start),
            begin=torch.full_like(state.begin, begin),
            tokens=tokens,
            wanted=wanted,
            cache=cache,
            ahead=piece.cache,
        )
        return self._output(state, piece.logits[:, -1])

    def _end(self, start: int, begin: int) -> int:
        """Where the segment that begins at `start` ends."""
        ends = [self.plan.next_boundary(start)]
        if self.owner.context is not None:
            ends.append(begin + self.owner.context)
        if self.owner.segment is not None:
            ends.append(start + self.owner.segment - start % self.owner.segment)
        return min(end for end in ends if end is not None)

    def _read(
        self, ids: Tensor, levels: tuple[LevelState, ...], tree: Any, seen: int, last: Tensor | None
    ) -> Piece:
        """Answer without learning; the losses of all tokens, the first one by `last`."""
        places = self.owner.places(levels)
        cache = cache_from(self.model, tree, seen)
        with torch.set_grad_enabled(self.meta is not None):
            with Reading(places, ids.shape[0], constant=self.constant):
                out = self.model(input_ids=ids, past_key_values=cache, use_cache=True)
            losses = pair_losses(out.logits[:, :-1], ids[:, 1:])
        first = first_loss(ids, last, out.logits)
        return Piece(out.logits, torch.cat([first, losses], 1), cache_tree(out.past_key_values))

    def _segment(
        self,
        tokens: Tensor,
        wanted: Tensor,
        levels: tuple[LevelState, ...],
        tree: Any,
        seen: int,
        position: int,
    ) -> tuple[Piece, tuple[LevelState, ...]]:
        """Read one whole segment ([B, n + 1] tokens), and let the levels learn from it."""
        batch = tokens.shape[0]
        some = bool(wanted.any())
        places = self.owner.places(levels)
        reading = Reading(places, batch, record=some, constant=self.constant)
        cache = cache_from(self.model, tree, seen)
        with torch.set_grad_enabled(some or self.meta is not None):
            with reading, any_order() if self.graph else nullcontext():
                out = self.model(input_ids=tokens[:, :-1], past_key_values=cache, use_cache=True)
            losses = pair_losses(out.logits, tokens[:, 1:])  # [B, n]
            learned = losses if bool(wanted.all()) else losses * wanted
            found = self._surprises(reading, learned.sum()) if some else None
        kept = learned if self.graph else learned.detach()
        if found is not None:
            count = wanted.sum(1).to(levels[0].seen.dtype)
            segment = learning.Segment(found, count, kept.sum(1).to(count.dtype))
            levels = self._collect(levels, segment)
        with torch.set_grad_enabled(self.graph):
            levels = self._step(levels, places, position)
        logits, after = out.logits, cache_tree(out.past_key_values)
        if self.meta is None:
            logits, losses, after = logits.detach(), losses.detach(), state_detach(after)
        return Piece(logits, losses, after), levels

    def _surprises(self, reading: Reading, loss: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Every slot's inputs and `dL/dy`, by one backward pass to the slots' outputs."""
        for slot, records in zip(self.owner.slots, reading.records, strict=True):
            if not records:
                raise ValueError(
                    f"slot {slot.name!r}: the model did not read this weight through a linear layer"
                    " (compiled, wrapped or unused?), so it cannot learn"
                )
        outputs = [record.y for records in reading.records for record in records]
        keep = self.graph or self.meta is not None
        grads = torch.autograd.grad(loss, outputs, create_graph=self.graph, retain_graph=keep)
        found, slots = iter(grads), []
        for records in reading.records:
            xs = [record.x if self.graph else record.x.detach() for record in records]
            ds = [next(found).reshape(*record.x.shape[:2], -1) for record in records]
            once = len(records) == 1  # more often when layers share a weight
            slots.append((xs[0], ds[0]) if once else (torch.cat(xs, 1), torch.cat(ds, 1)))
        return slots

    def _collect(
        self, levels: tuple[LevelState, ...], segment: learning.Segment
    ) -> tuple[LevelState, ...]:
        new = list(levels)
        with torch.set_grad_enabled(self.graph):
            for number in self.plan.order:
                if self.plan.feeder[number] is None:
                    new[number] = learning.collect(new[number], segment, self.plan, number)
        return tuple(new)

    def _step(
        self, levels: tuple[LevelState, ...], places: list[Place], position: int
    ) -> tuple[LevelState, ...]:
        """Every level that is due updates, fastest first, all from the same weights (Eq. 71-72)."""
        plan, new = self.plan, list(levels)

        def weight(own: Owned) -> Tensor:
            place = places[own.slot]
            base = place.base(constant=not self.graph)
            full = [
                (part, dense)
                for part, f in place.parts
                if (dense := differences.dense(f)) is not None
            ]
            now = differences.merge(base, full) if full else base
            exact = torch.promote_types(now.dtype, torch.float32)
            return cut(now.to(exact), own.part).expand(levels[0].seen.shape[0], -1, -1)

        due = [number for number in plan.order if plan.levels[number].due(position)]
        for number in due:
            for other in plan.order:
                if plan.feeder[other] == number:
                    rank = plan.levels[other].rank
                    new[other] = learning.feed(new[other], new[number], rank)
            if plan.slower(number) is not None and plan.transfer in ("first_order", "second_order"):
                new[number] = learning.remember(new[number], plan.levels[number].rank)
            rate = self.owner.rate(number, graph=self.graph)
            new[number], update = learning.release(
                new[number],
                plan,
                number,
                rate=rate,
                weight=weight,
                position=position,
                measure=self.measure,
                in_place=self.in_place and number in self.made,
            )
            if update is not None:
                self.made.add(number)
                self.updates.append(update)
            if self.meta is None and self.graph and plan.slower(number) is None:
                new[number] = state_detach(new[number])
        for number in plan.order:
            slower = plan.slower(number)
            if slower is not None and slower in due:
                rate = self.owner.rate(slower, graph=self.graph)
                outer = self.meta == "second_order"
                new[number] = learning.transfer(new[number], plan, number, rate=rate, graph=outer)
                self._note_reset(plan.levels[number].name, position)
        return tuple(new)

    def _note_reset(self, name: str, position: int) -> None:
        for place, update in enumerate(self.updates):
            if update.level == name and update.position == position:
                self.updates[place] = update._replace(reset=True)

    def _keep(self, piece: Piece, skip: int, losses: Tensor) -> None:
        if self.keep_logits:
            self.logits.append(piece.logits[:, skip:])
        self.losses.append(losses)

    def _output(self, state: ContinuumState, last: Tensor | None) -> Output:
        if last is None:
            raise ValueError("no tokens were read")
        logits = torch.cat(self.logits, 1) if self.keep_logits else last.unsqueeze(1)
        dtype = torch.promote_types(last.dtype, torch.float32)
        losses = torch.cat([each.to(dtype) for each in self.losses], 1)
        state = state._replace(last=last.clone())  # not a view of all logits
        return Output(logits, losses, state, tuple(self.updates))
