"""Reading and learning from a stream of tokens: segments, caches, padding (Eq. 71).

The clock counts (input, target) pairs. A pair is consumed once its target is known, so feeding a
stream in any pieces gives the same fast weights; `n` tokens are `n - 1` pairs. Segments end at the
absolute positions where some level is due. A whole segment is one forward pass
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

from nestling.continuum.engine import Engine, LevelState, Rate, Segment, pair_up
from nestling.continuum.fast import LiveSlot, Reading, weight_of
from nestling.continuum.natural import observe_inputs
from nestling.continuum.recompute import again
from nestling.levels import LevelUpdate, boundaries
from nestling.losses import IGNORE, first_loss, pair_losses
from nestling.scan import any_order
from nestling.tree import state_detach

Precondition = Callable[[list[tuple[Tensor, Tensor]]], list[tuple[Tensor, Tensor]]]
"""`metric(slots)`: other inputs [B, n, Di] and surprises [B, n, Do] in place of every slot's."""

Levels = tuple[LevelState, ...]
Confine = Callable[[Levels, Levels, list[LevelUpdate]], tuple[Levels, list[LevelUpdate]]]
"""`confine(before, after, updates)`: the levels and updates to go on with."""
Run = Callable[[Tensor, Any, int], tuple[Tensor, Any]]
"""A model's forward pass: tokens [B, n], cache tree and tokens in it -> logits, cache."""


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
    """The result of reading (and learning from) some tokens."""

    logits: Tensor  # [B, T, V] for the token after each; [B, 1, V] with keep_logits=False
    losses: Tensor  # [B, T] each token's loss given all before it; nan for the very first
    state: ContinuumState
    updates: tuple[LevelUpdate, ...]  # in the order in which they happened


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
    """The result of one forward pass."""

    logits: Tensor  # [B, n, V]
    losses: Tensor  # [B, m] of the targets it knows
    cache: Any


class Outer:
    """The gradients of an outer loss, gathered segment by segment while a stream is read.

    First order, in one pass: with fast weights as constants, the inner gradient of a segment
    (`delta^T x` of each sequence), summed over the sequences, *is* the outer gradient of the slot.
    So one backward pass per segment gives both, and the gradients of all other parameters with
    them. The cache is a constant at the start of every segment (truncated backpropagation).

    A model may read what lies below its learning levels once for many segments: then it says where
    the graph of each segment begins (`edge`, a leaf that collects its gradient), and goes on below
    by itself.

    The gradient by a level's log-rate is `sum_b <G_b, Delta_b>`: with past gradients as constants
    the level's difference is proportional to its rate.
    """

    def __init__(self, engine: Engine, *, slots: bool = True, rates: bool = False) -> None:
        weights = [weight_of(engine.model, slot.name)[0] for slot in engine.slots]
        own = {id(weight) for weight in weights}
        self.engine, self.slots, self.rates = engine, slots, rates
        self.parameters = [
            p for p in engine.model.parameters() if p.requires_grad and id(p) not in own
        ]
        self.trained = [slots and weight.requires_grad for weight in weights]
        self.gradients: list[Tensor | None] = [None] * len(self.parameters)
        self.slot_gradients: list[Tensor | None] = [None] * len(weights)  # [Do, Di]
        self.rate_gradients: list[Tensor | float] = [0.0] * len(engine.levels)
        self.loss: Tensor | float = 0.0  # summed over all targets
        self.edge: Tensor | None = None  # where a segment's graph begins below its weights

    def same(self, targets: Tensor, tokens: Tensor, wanted: Tensor) -> bool:
        """Whether the outer loss of a segment is the loss its levels learn from."""
        if targets.shape != tokens.shape:
            return False
        return bool((torch.where(wanted, tokens, IGNORE) == targets).all())

    def backward(self, loss: Tensor, reading: Reading) -> list[tuple[Tensor, Tensor]]:
        """Add the gradients of all parameters but the slots; every slot's inputs and surprises."""
        outputs = self.engine.outputs(reading)
        self.loss = self.loss + loss.detach()
        edge = [] if self.edge is None else [self.edge]
        with _exact(loss):
            wanted = [*edge, *outputs, *self.parameters]
            grads = torch.autograd.grad(loss, wanted, allow_unused=True)
        for leaf, grad in zip(edge, grads, strict=False):
            leaf.grad = _added(leaf.grad, grad)
        grads = grads[len(edge) :]
        self.add(grads[len(outputs) :])
        surprises = [
            torch.zeros_like(y) if grad is None else grad
            for y, grad in zip(outputs, grads, strict=False)
        ]
        return pair_up(reading, surprises, graph=False)

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add gradients of all parameters but the slots; None is zero."""
        for place, grad in enumerate(gradients):
            self.gradients[place] = _added(self.gradients[place], grad)

    def credit(self, segment: Segment, levels: tuple[LevelState, ...], needed: set[int]) -> None:
        """Add the gradients of the slots and of the levels' rates.

        needed: the levels that will collect the segment, whose gradients are formed in any case.
        """
        wiring, dtype = self.engine.wiring, levels[0].seen.dtype
        formed: dict[int, Tensor] = {}
        for number in wiring.order:
            for own, fast in zip(wiring.parts[number], levels[number].fast, strict=True):
                readers = wiring.readers[own.key] + 1
                if number in needed and wiring.levels[number].rank is None:
                    gradient = segment.compact(own, dtype, readers)
                    if isinstance(gradient, Tensor) and own.part.axis is None:
                        formed[own.slot] = gradient
                if self.rates and fast is not None:
                    new = self.rate_gradients[number] + segment.along(own, fast)
                    self.rate_gradients[number] = new
        for place, trained in enumerate(self.trained):
            if trained:
                total = formed[place].sum(0) if place in formed else segment.total(place)
                self.slot_gradients[place] = _added(self.slot_gradients[place], total)


def _added(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    """The sum, in place: gradients may share memory at first, so the first one is copied."""
    if new is None:
        return old
    return new.clone() if old is None else old.add_(new)


def _number(rate: Rate) -> float:
    """The rate without its history."""
    return float(rate.detach()) if isinstance(rate, Tensor) else rate


def _exact(like: Tensor) -> Any:
    """No autocast: gradients keep the precision their forward pass had."""
    return torch.autocast(like.device.type, enabled=False)


class TokenStream:
    """One call over some tokens of a stream: what it reads, and what it gathers from them.

    rates: of every level; tensors under "second_order". run: the model's forward pass; by default
    its own. context: the cache starts anew every so many positions. segment: at most so many pairs
    in one backward pass. meta: what can be differentiated, as for `Continuum.forward`; with
    `truncate` the cache is a constant at the start of every segment. outer: gathers the gradients
    of an outer loss, whose targets [B, T] (IGNORE: none) are those of the new tokens' logits.
    final: nobody goes on from the state afterwards, so levels collect only what they will use.
    observe: what natural steps cost is learned from the first segment.
    recompute: under "second_order" keep where each segment begins, and compute it again in the
    backward pass.
    """

    def __init__(
        self,
        engine: Engine,
        rates: Sequence[Rate],
        *,
        run: Run | None = None,
        context: int | None = None,
        segment: int | None = None,
        meta: str | None = None,
        truncate: bool = False,
        outer: Outer | None = None,
        targets: Tensor | None = None,
        keep_logits: bool = True,
        measure: bool = True,
        final: bool = False,
        metric: Precondition | None = None,
        confine: Confine | None = None,
        observe: bool = False,
        recompute: bool = False,
    ) -> None:
        self.observe = observe and engine.natural
        self.engine, self.wiring, self.model = engine, engine.wiring, engine.model
        self.rates, self.context, self.longest = rates, context, segment
        self.bases = engine.bases()
        self.run = run or _own_run(engine.model)
        self.cut = meta is None or truncate  # the cache is a constant between segments
        self.outer, self.targets = outer, targets
        self.final, self.last = final, 0  # the last pair's position, known once reading begins
        self.meta, self.keep_logits, self.measure = meta, keep_logits, measure
        self.graph = meta == "second_order" or self.wiring.transfer == "second_order"
        # A nested level's initial state is learned through the segments' own graphs.
        self.again = recompute and self.graph and self.wiring.transfer != "second_order"
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
        self.last = start + tokens.shape[1] - 1
        if waiting == 0:
            self.losses.append(first_loss(ids, last))
        while True:
            if self.context is not None and start - begin >= self.context:
                begin, cache = start, None
            end = self._end(start, begin)
            many = end - start
            if tokens.shape[1] <= many:
                break
            piece, levels = (self._segment_again if self.again else self._segment)(
                tokens[:, : many + 1],
                wanted[:, 1 : many + 1],
                levels,
                cache,
                start - begin,
                end,
                waiting,
            )
            self._keep(piece, waiting, piece.losses[:, max(waiting - 1, 0) :])
            cache, ahead, waiting, start = piece.cache, None, 0, end
            tokens, wanted = tokens[:, many:], wanted[:, many:]
        if waiting and ahead is not None:
            new, before, seen = tokens[:, waiting:], ahead, start - begin + waiting
            piece = self._read(new, levels, before, seen, last)
            self._keep(piece, 0, piece.losses)
        else:
            piece = self._read(tokens, levels, cache, start - begin, None, waiting)
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

    def _read(
        self,
        ids: Tensor,
        levels: tuple[LevelState, ...],
        tree: Any,
        seen: int,
        last: Tensor | None,
        skip: int = 0,
    ) -> Piece:
        """Answer without learning; the losses of all tokens, the first one by `last`."""
        record, live = self.outer is not None, self._live(levels)
        reading = Reading(live, ids.shape[0], record=record, constant=self.constant)
        with torch.set_grad_enabled(self.meta is not None or record):
            with reading:
                logits, cache = self.run(ids, tree, seen)
            losses = pair_losses(logits[:, :-1], ids[:, 1:])
        first = first_loss(ids, last, logits)
        if self.outer is not None:
            self._outer_pass(logits, reading, levels, skip)
            logits, losses = logits.detach(), losses.detach()
        after = cache_tree(cache, constant=self.meta is None)
        return Piece(logits, torch.cat([first, losses], 1), after)

    def _live(self, levels: tuple[LevelState, ...]) -> list[LiveSlot]:
        """The slots as they stand; first-order rates are differentiated through the differences."""
        lifts: list[Rate] = [1.0] * len(levels)
        if self.meta == "first_order":
            lifts = [r / r.detach() if isinstance(r, Tensor) else 1.0 for r in self.rates]
        return self.engine.live(levels, lifts, self.bases)

    def _outer_pass(
        self, logits: Tensor, reading: Reading, levels: tuple[LevelState, ...], skip: int
    ) -> None:
        """One backward pass of the outer loss of a piece that is not learned from alike."""
        outer, targets = self.outer, self._take(logits.shape[1] - skip)
        if outer is None or not bool((targets != IGNORE).any()):
            return
        with torch.enable_grad():
            loss = pair_losses(logits[:, skip:], targets).sum()
        found = outer.backward(loss, reading)
        none = torch.zeros_like(levels[0].seen)
        with torch.no_grad(), _exact(loss):
            outer.credit(Segment(found, none, none), levels, set())

    def _take(self, many: int) -> Tensor:
        """The outer targets of the next tokens: [B, many]."""
        if self.targets is None:
            raise ValueError("an outer loss needs the targets of every token")
        taken, self.targets = self.targets[:, :many], self.targets[:, many:]
        return taken

    def _segment(
        self,
        tokens: Tensor,
        wanted: Tensor,
        levels: tuple[LevelState, ...],
        tree: Any,
        seen: int,
        position: int,
        skip: int,
    ) -> tuple[Piece, tuple[LevelState, ...]]:
        """Read one whole segment ([B, n + 1] tokens), and let the levels learn from it.

        skip: tokens at its front that were answered in an earlier call.
        """
        outer, graph = self.outer, self.graph
        needed = self.wiring.needed(position, self.last) if self.final else set(self.wiring.order)
        some, live = bool(wanted.any()), self._live(levels)
        record = some or outer is not None
        reading = Reading(live, tokens.shape[0], record=record, constant=self.constant)
        segment = None
        with torch.set_grad_enabled(record or self.meta is not None):
            with reading, any_order() if graph else nullcontext():
                logits, cache = self.run(tokens[:, :-1], tree, seen)
            losses = pair_losses(logits, tokens[:, 1:])  # [B, n]
            learned = losses if bool(wanted.all()) else losses * wanted
        count = wanted.sum(1).to(levels[0].seen.dtype)
        total = (learned if graph else learned.detach()).sum(1).to(count.dtype)
        alike = outer is not None and skip == 0
        if alike and outer is not None and self.targets is not None:
            alike = outer.same(self.targets[:, : tokens.shape[1] - 1], tokens[:, 1:], wanted)
        if outer is not None and alike and some:
            self._take(tokens.shape[1] - 1)
            segment = Segment(outer.backward(learned.sum(), reading), count, total)
            with torch.no_grad(), _exact(logits):
                outer.credit(segment, levels, needed)
        elif some:
            keep = graph or self.meta is not None or outer is not None
            with torch.enable_grad(), _exact(logits):
                found = self.engine.surprises(reading, learned.sum(), graph=graph, keep=keep)
            segment = Segment(found if self.metric is None else self.metric(found), count, total)
        if outer is not None and not (alike and some):
            self._outer_pass(logits, reading, levels, skip)
        if self.observe and segment is not None:
            self._observe(segment)
        before = levels
        with _exact(logits):
            levels, updates = self.engine.learn(
                levels,
                segment,
                live,
                position,
                self.rates if graph else [_number(rate) for rate in self.rates],
                graph=graph,
                outer=self.meta == "second_order",
                measure=self.measure,
                owned=self.made,
                needed=needed,
            )
        if self.confine is not None and updates:
            levels, updates = self.confine(before, levels, updates)
        self.updates += updates
        if self.meta is None:
            logits, losses = logits.detach(), losses.detach()
        return Piece(logits, losses, cache_tree(cache, constant=self.cut)), levels

    def _observe(self, segment: Segment) -> None:
        """Let the model see what its levels read; tokens that teach nothing are left out."""
        self.observe = False
        inputs = {}
        for slot, (x, surprise) in zip(self.engine.slots, segment.slots, strict=True):
            inputs[slot.name] = x.detach()[(surprise.detach() != 0).any(-1)]
        observe_inputs(self.model, inputs)

    def _segment_again(
        self, tokens: Tensor, wanted: Tensor, levels: Levels, tree: Any, *rest: int
    ) -> tuple[Piece, Levels]:
        """`_segment`, of which only the beginning is kept until the backward pass."""

        def segment(state: tuple[Levels, Any, tuple[Tensor, ...]]) -> tuple[Piece, Levels]:
            del self.updates[told:]  # what is computed again is not told again
            given, learned = self.rates, iter(state[2])
            self.rates = [next(learned) if isinstance(r, Tensor) else r for r in given]
            try:
                return self._segment(tokens, wanted, *state[:2], *rest)
            finally:
                self.rates = given

        told, rates = len(self.updates), tuple(r for r in self.rates if isinstance(r, Tensor))
        others = list(self.model.parameters())
        found: tuple[Piece, Levels] = again(segment, (levels, tree, rates), others)
        return found

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


def _own_run(model: Any) -> Run:
    """The forward pass of a causal language model; one whose levels learn by themselves stays as
    it is."""
    options = {"learn": False} if getattr(model, "learns", False) else {}

    def run(ids: Tensor, tree: Any, seen: int) -> tuple[Tensor, Any]:
        cache = cache_from(model, tree, seen)
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, **options)
        return out.logits, out.past_key_values

    return run


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


def cache_tree(cache: Any, *, constant: bool = False) -> Any:
    """The tensors of a cache, one tree per layer; with `constant` no gradient goes into them."""
    states = getattr(cache, "states", None)
    if states is not None:
        return state_detach(states) if constant else states
    layers = getattr(cache, "layers", None)
    if not layers or not all(hasattr(layer, "keys") for layer in layers):
        raise TypeError(
            f"{type(cache).__name__}: only caches of keys and values, and the memory states of"
            " nestling's own models, can be carried along"
        )
    if constant:
        return tuple((layer.keys.detach(), layer.values.detach()) for layer in layers)
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
