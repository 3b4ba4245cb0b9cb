"""Reading and learning from a stream of tokens: segments, caches, padding (Eq. 71).

Segments end at the absolute positions where some level is due. A whole segment is one forward pass
with a graph and one backward pass to the slots' outputs; then the levels that are due step. An
unfinished segment is answered without a graph and read again, from the cache where it began, once
its last target is known: so the fast weights do not depend on how the stream was cut into calls, to
the bit.

The model's own running state (its *cache*) is kept as a tree of tensors, so that it can be kept,
branched and saved. There are two kinds: the memory states of our models, and the keys and values of
Hugging Face decoders, whose cache grows by making new tensors: holding the old ones is a snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nestling.continuum.engine import Engine, Rate, Segment
from nestling.continuum.reading import Reading
from nestling.continuum.state import ContinuumState, LevelState, Output
from nestling.levels import LevelUpdate, boundaries
from nestling.losses import first_loss, pair_losses
from nestling.scan import any_order
from nestling.tree import state_detach

__all__ = [
    "Confine",
    "Metric",
    "TokenStream",
    "align",
    "begin",
    "cache_from",
    "cache_tree",
    "context_limit",
]


Metric = Callable[[list[tuple[Tensor, Tensor]]], list[tuple[Tensor, Tensor]]]
"""`metric(slots)`: other inputs [B, n, Di] and surprises [B, n, Do] in place of every slot's."""

Levels = tuple[LevelState, ...]
Confine = Callable[[Levels, Levels, list[LevelUpdate]], tuple[Levels, list[LevelUpdate]]]
"""`confine(before, after, updates)`: the levels and updates to go on with."""


def begin(engine: Engine, batch: int) -> ContinuumState:
    """The state before the first token: nothing learned, nothing read."""
    levels = engine.init(batch)
    zero = torch.zeros(batch, dtype=torch.int64, device=levels[0].seen.device)
    tokens = zero.new_zeros(batch, 0)
    return ContinuumState(
        levels=levels,
        start=zero,
        begin=zero,
        tokens=tokens,
        wanted=tokens.bool(),
        cache=None,
        ahead=None,
        last=None,
    )


class Piece(NamedTuple):
    """What one forward pass gives."""

    logits: Tensor  # [B, n, V]
    losses: Tensor  # [B, m] of the targets it knows
    cache: Any


class TokenStream:
    """One call over some tokens of a stream: what it reads, and what it gathers from them.

    rates: of every level; tensors under "second_order". context: the cache starts anew every so
    many positions. segment: at most so many pairs in one backward pass. meta: what can be
    differentiated, as for `Continuum.forward`.
    """

    def __init__(
        self,
        engine: Engine,
        rates: Sequence[Rate],
        *,
        context: int | None = None,
        segment: int | None = None,
        meta: str | None = None,
        keep_logits: bool = True,
        measure: bool = True,
        metric: Metric | None = None,
        confine: Confine | None = None,
    ) -> None:
        self.engine, self.wiring, self.model = engine, engine.wiring, engine.model
        self.rates, self.context, self.longest = rates, context, segment
        self.meta, self.keep_logits, self.measure = meta, keep_logits, measure
        self.graph = meta == "second_order" or self.wiring.transfer == "second_order"
        self.constant = meta in (None, "frozen")
        plain = self.wiring.transfer is None and all(self.wiring.plain)
        # No graph, initial state or rule holds differences made here: they may be overwritten.
        self.metric, self.confine = metric, confine
        plain = plain and confine is None  # a trust region compares with what was
        self.made: set[int] | None = set() if meta is None and plain else None
        self.logits: list[Tensor] = []
        self.losses: list[Tensor] = []
        self.updates: list[LevelUpdate] = []

    def read(self, ids: Tensor, state: ContinuumState) -> Output:
        """Only read: one forward pass per context, no level changes."""
        here = int(state.start[0]) + state.tokens.shape[1]
        begin = int(state.begin[0])
        cache = state.ahead if state.tokens.shape[1] else state.cache
        last, limit = state.last, self.context
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
            if self.context is not None and start - begin >= self.context:
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
        ends = [self.wiring.next_boundary(start)]
        if self.context is not None:
            ends.append(begin + self.context)
        if self.longest is not None:
            ends += boundaries(start, start + self.longest, self.longest)[:1]
        return min(end for end in ends if end is not None)

    def _run(self, ids: Tensor, tree: Any, seen: int) -> tuple[Tensor, Any]:
        """The model's own forward pass: logits, and the cache as a tree."""
        cache = cache_from(self.model, tree, seen)
        out = self.model(input_ids=ids, past_key_values=cache, use_cache=True)
        return out.logits, cache_tree(out.past_key_values)

    def _read(
        self, ids: Tensor, levels: tuple[LevelState, ...], tree: Any, seen: int, last: Tensor | None
    ) -> Piece:
        """Answer without learning; the losses of all tokens, the first one by `last`."""
        with torch.set_grad_enabled(self.meta is not None):
            with Reading(self.engine.live(levels), ids.shape[0], constant=self.constant):
                logits, after = self._run(ids, tree, seen)
            losses = pair_losses(logits[:, :-1], ids[:, 1:])
        first = first_loss(ids, last, logits)
        return Piece(logits, torch.cat([first, losses], 1), after)

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
        some, live = bool(wanted.any()), self.engine.live(levels)
        reading = Reading(live, tokens.shape[0], record=some, constant=self.constant)
        segment = None
        with torch.set_grad_enabled(some or self.meta is not None):
            with reading, any_order() if self.graph else nullcontext():
                logits, after = self._run(tokens[:, :-1], tree, seen)
            losses = pair_losses(logits, tokens[:, 1:])  # [B, n]
            if some:
                learned = losses if bool(wanted.all()) else losses * wanted
                keep = self.graph or self.meta is not None
                found = self.engine.surprises(reading, learned.sum(), graph=self.graph, keep=keep)
                found = found if self.metric is None else self.metric(found)
                kept = learned if self.graph else learned.detach()
                count = wanted.sum(1).to(levels[0].seen.dtype)
                segment = Segment(found, count, kept.sum(1).to(count.dtype))
        before = levels
        levels, updates = self.engine.learn(
            levels,
            segment,
            live,
            position,
            self.rates,
            graph=self.graph,
            outer=self.meta == "second_order",
            measure=self.measure,
            owned=self.made,
        )
        if self.confine is not None and updates:
            levels, updates = self.confine(before, levels, updates)
        self.updates += updates
        if self.meta is None:
            logits, losses, after = logits.detach(), losses.detach(), state_detach(after)
        return Piece(logits, losses, after), levels

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


def align(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Move padding from the front to the end: ids [B, T] and what is to be learned, [B, T] bool.

        ids, learn = align(batch.input_ids, batch.attention_mask)
        out = continuum(ids, learn=learn)

    A memory's clock counts from the first token on, for all sequences alike, so they must begin
    together. `mask` is 1 (or True) where there is text; padding inside a text is refused.
    """
    if ids.dim() != 2 or mask.shape != ids.shape:
        raise ValueError(
            f"ids and mask must be [batch, tokens] alike; got {tuple(ids.shape)} and"
            f" {tuple(mask.shape)}"
        )
    text = mask.bool()
    if bool((text[:, 1:] & ~text[:, :-1]).sum(1).gt(1 - text[:, 0].long()).any()):
        raise ValueError("mask: every sequence must be one piece; got padding inside a text")
    first = text.long().argmax(1, keepdim=True)  # [B, 1]: where the text begins
    order = (torch.arange(ids.shape[1], device=ids.device) + first) % ids.shape[1]
    return ids.gather(1, order), text.gather(1, order)


def cache_from(model: nn.Module, tree: Any, seen: int) -> Any:
    """A cache object for the model's next call, after `seen` tokens; None begins a new one."""
    make: Any = getattr(model, "make_cache", None)
    if make is not None:
        return make(tree, seen)
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    if tree is None:
        return cache
    if len(tree) != len(cache.layers):
        raise ValueError(
            f"the state's cache has {len(tree)} layers, the model {len(cache.layers)}: it belongs"
            " to another model"
        )
    for layer, (keys, values) in zip(cache.layers, tree, strict=True):
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = seen
    return cache


def cache_tree(cache: Any) -> Any:
    """The tensors of a cache: one tree per layer."""
    states = getattr(cache, "states", None)
    if states is not None:
        return states
    layers = getattr(cache, "layers", None)
    if not layers or not all(hasattr(layer, "keys") for layer in layers):
        raise TypeError(
            f"{type(cache).__name__}: only caches of keys and values, and the memory states of"
            " nestling's own models, can be carried along"
        )
    return tuple((layer.keys, layer.values) for layer in layers)


def context_limit(model: nn.Module) -> int | None:
    """How many tokens the model can see at once; None without limit."""
    if hasattr(model, "make_cache"):
        return None
    config: Any = model.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = (getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    limit = next(filter(None, found), None)  # MPT calls it max_seq_len
    return int(limit) if limit else None
