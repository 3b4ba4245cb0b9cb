"""Levels that learn inside the model: the continuum engine under `NestlingForCausalLM.forward`.

Every sequence has its own fast weights, in the cache beside the memories' states. Its clock counts
its own tokens, so sequences that stand at different positions (left padding) are read in groups of
equal position, which is exact because sequences never see each other. A call that keeps no cache
needs no groups: padding is moved behind the texts.

In training the loss and all gradients are computed segment by segment, and `HandOver` gives them
to autograd, so that `loss.backward()`, gradient accumulation, loss scaling and DDP work as ever.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nestling.continuum.assignment import own_slots
from nestling.continuum.engine import Engine
from nestling.continuum.fast import weight_of
from nestling.continuum.stream import ContinuumState, Outer, Run, TokenStream, begin
from nestling.levels import LevelUpdate
from nestling.losses import IGNORE
from nestling.memories.core import pack_rows
from nestling.models.below import Below
from nestling.models.cache import Learned, MemoryCache
from nestling.models.packing import Documents, as_documents, as_rows
from nestling.tree import state_select

__all__ = [
    "HandOver",
    "Request",
    "Result",
    "begin_rows",
    "engine_of",
    "learn_tokens",
    "outer_targets",
]


class Request(NamedTuple):
    """One forward pass over tokens that are learned from."""

    ids: Tensor  # [B, T]
    mask: Tensor | None  # [B, T] bool; None: all tokens are real
    cache: MemoryCache | None  # None: nothing is kept
    targets: Tensor | None  # [B, T] of an outer loss whose gradients are computed on the way
    items: Tensor | float | None  # what the outer loss is divided by; None: its targets
    meta: str | None  # what can be differentiated by autograd
    learn: bool | tuple[str, ...]  # the levels that learn: all, none, or these
    keep_logits: bool
    measure: bool
    hidden: bool = False  # every layer's input, and the last layer's output, are wanted
    embeds: Tensor | None = None  # [B, T, D] read in the place of `ids`
    known: Tensor | None = None  # [B, T] bool: which embeddings are their `ids`; None: all


class Result(NamedTuple):
    """The result of a request."""

    logits: Tensor  # [B, T, V]; [B, 1, V] without `keep_logits`
    loss: Tensor | None  # with `targets`
    updates: tuple[LevelUpdate, ...]
    hidden: tuple[Tensor, ...] | None = None  # [B, T, D] each


class _Group(NamedTuple):
    """Sequences at one position, and their tokens of this call."""

    rows: Tensor  # [b] their places in the batch
    state: ContinuumState | None  # None: before the first token
    ids: Tensor  # [b, n]
    columns: Tensor | None  # [b, n] where the tokens stand; None: one after the other
    valid: Tensor | None  # [b, n] False: padding behind a shorter text

    def of(self, whole: Tensor) -> Tensor:
        """The group's own of what the batch has for every token: [B, T, ...] -> [b, n, ...]."""
        mine = whole[self.rows]
        if self.columns is None:
            return mine
        return mine[torch.arange(len(mine), device=mine.device).unsqueeze(1), self.columns]


def engine_of(model: Any) -> Engine:
    """The engine of a model's own learning levels; the others' weights are left alone."""
    config = model.config
    key = (config.memory_levels, config.first_learning, config.transfer, config.natural)
    kept: Any = model.__dict__.get("_engine")
    if kept is None or kept[0] != key:
        levels = config.memory_levels
        slots = [
            slot
            for slot in own_slots(model, config.first_learning)
            if levels[slot.parts[0].level].active
        ]
        transfer, natural = config.transfer, config.natural
        kept = (key, Engine(model, levels, slots, transfer=transfer, natural=natural))
        model.__dict__["_engine"] = kept
    engine: Engine = kept[1]
    return engine


def without_gradients(model: Any) -> Any:
    """The same model with constants for parameters: what only reads forms no gradients of them.

    It shares the parameters' memory, so it follows their training; it is made anew when they are
    replaced (moved, cast, loaded into other memory). Sharded models are left as they are.
    """
    kept = _CONSTANTS.get(model)
    if kept is not None and kept.fits(model):
        return kept.twin
    if _sharded(model):
        return model
    kept = _CONSTANTS[model] = _Constants(model)
    return kept.twin


class _Constants:
    """A model's twin without gradients, and what tells whether it still is one.

    The model itself is not kept, so that it can be forgotten.
    """

    def __init__(self, model: Any) -> None:
        self.below = [module for module in model.modules() if module is not model]
        self.twin = _copy(model)
        self.made_of = self._signs(model)

    def _signs(self, model: Any) -> list[Any]:
        """Classes, parts and places in memory of all modules and their parameters."""
        signs: list[Any] = [model.training]
        for module in (model, *self.below):
            signs += (type(module), *map(id, module._modules.values()))
            signs += (p.data_ptr() for p in module._parameters.values() if p is not None)
        return signs

    def fits(self, model: Any) -> bool:
        return self._signs(model) == self.made_of


_CONSTANTS: WeakKeyDictionary[Any, _Constants] = WeakKeyDictionary()


def _sharded(model: Any) -> list[Any]:
    """The modules that FSDP2 has sharded."""
    return [module for module in model.modules() if hasattr(type(module), "unshard")]


def _copy(module: Any) -> Any:
    twin = module.__class__.__new__(module.__class__)
    twin.__dict__.update({k: v for k, v in module.__dict__.items() if k != "_engine"})
    parameters = module._parameters.items()
    twin.__dict__["_parameters"] = {n: None if p is None else p.detach() for n, p in parameters}
    children = module._modules.items()
    twin.__dict__["_modules"] = {
        n: None if child is None else _copy(child) for n, child in children
    }
    return twin


def outer_targets(
    ids: Tensor, labels: Tensor | None, shifted: Tensor | None, mask: Tensor | None
) -> Tensor | None:
    """The target of each token's logits, [B, T]: the label after it, or `shift_labels`.

    Padding predicts nothing, not even the first token of a text.
    """
    if shifted is None and labels is not None:
        shifted = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORE)], 1)
    if shifted is None:
        return None
    targets = shifted.reshape(ids.shape).to(ids.device)
    return targets if mask is None else torch.where(mask, targets, IGNORE)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def learn_tokens(model: Any, request: Request, layout: Documents | None = None) -> Result:
    """Read tokens and learn from them; with a `layout` every document of packed rows by itself."""
    if layout is None:
        return _learn(model, request)
    if request.cache is not None and request.cache.batch_size != -1:
        raise ValueError(
            "packed rows (position_ids that restart) cannot go on from past_key_values: put each"
            " document in a row of its own"
        )
    if request.hidden:
        raise ValueError(
            "packed rows (position_ids that restart) give no hidden states: put each document in a"
            " row of its own"
        )
    cache = None if request.cache is None else MemoryCache(len(request.cache))
    targets = request.targets
    made = _learn(
        model,
        request._replace(
            ids=as_documents(request.ids, layout),
            embeds=None if request.embeds is None else as_documents(request.embeds, layout),
            known=None if request.known is None else as_documents(request.known, layout, True),
            mask=layout.mask,
            cache=cache,
            targets=None if targets is None else as_documents(targets, layout, IGNORE),
            keep_logits=True,
        ),
    )
    if request.cache is not None and cache is not None and cache.learned is not None:
        request.cache.advance_learned(cache.learned.select(layout.last), request.ids.shape[1])
    logits = as_rows(made.logits, layout)
    return made._replace(logits=logits if request.keep_logits else logits[:, -1:])


def _learn(model: Any, request: Request) -> Result:
    only_reads = request.meta is None and request.targets is None
    given, model = model, without_gradients(model) if only_reads else model
    parts = _sharded(model) if model is given else []
    recompute = model.training and model.is_gradient_checkpointing and request.embeds is None
    above = model.config.first_learning if _reads_below_once(model, request) else 0
    gathered = _whole(parts, last=only_reads)
    with torch.inference_mode(False), _no_recompute(model, above), gathered:
        engine, cache = engine_of(model), request.cache
        ids = request.ids.clone()
        groups = _groups(engine, request._replace(ids=ids))
        if request.known is not None:
            groups = [part for group in groups for part in _alike(group, request.known)]
        last_only = not request.keep_logits
        if any(_ends_early(group, ids.shape[1]) for group in groups):
            request = request._replace(keep_logits=True)  # texts end in different columns
        outer = None
        if request.targets is not None:
            config = model.config
            outer = Outer(engine, slots=config.learning != "frozen", rates=config.learn_rates)
        reader = _Reader(model, engine, request, outer, recompute)
        logits = [reader.read(group) for group in groups]
        if cache is not None:
            states = [reader.states[place] for place in range(len(groups))]
            rows = [group.rows for group in groups]
            cache.advance_learned(Learned(tuple(rows), tuple(states)), ids.shape[1])
        loss = None
        if outer is not None and request.targets is not None:
            loss = _hand_over(model, engine, outer, request)
    joined = _joined(groups, logits, request)
    updates = _by_position(groups, reader.updates, request)
    hidden = None
    if request.hidden:
        whole, layers = request._replace(keep_logits=True), len(model.model.layers) + 1
        each = [[None if h is None else h[n] for h in reader.hidden] for n in range(layers)]
        hidden = tuple(_joined(groups, found, whole) for found in each)
    return Result(joined[:, -1:] if last_only else joined, loss, updates, hidden)


def _reads_below_once(model: Any, request: Request) -> bool:
    """Whether training reads what lies below the learning levels once for a whole call.

    Only the last layers' levels learn, and one backward pass per segment gives all gradients.
    """
    if not model.config.first_learning or request.targets is None:
        return False
    return request.embeds is None and not request.hidden


def _ends_early(group: _Group, length: int) -> bool:
    """Whether the last column is padding in some row, so that its logits are zeros there."""
    if group.valid is not None:
        return True
    return group.columns is not None and bool((group.columns[:, -1:] != length - 1).any())


class _Reader:
    """Reads the groups of one request."""

    def __init__(
        self, model: Any, engine: Engine, request: Request, outer: Outer | None, recompute: bool
    ) -> None:
        self.model, self.engine, self.request, self.outer = model, engine, request, outer
        self.recompute = recompute
        self.states: list[ContinuumState] = []
        self.updates: list[Sequence[LevelUpdate]] = []  # of every group
        self.hidden: list[list[Tensor] | None] = []  # of every group, if it is wanted
        self._passes: list[list[Tensor]] = []  # the hidden states of every forward pass
        self.below = _reads_below_once(model, request)
        names = request.learn
        self.silent = [
            names is not True and (names is False or level.name not in names)
            for level in engine.levels
        ]

    def read(self, group: _Group) -> Tensor | None:
        """The logits of one group's tokens; its state and updates are kept."""
        state = begin(self.engine, len(group.rows)) if group.state is None else group.state
        if group.ids.shape[1] == 0:
            self.states.append(state)
            self.updates.append(())
            self.hidden.append(None)
            return None
        request, targets, runs = self.request, None, self._runs(group)
        if request.targets is not None:
            targets = group.of(request.targets)
            if group.valid is not None:
                targets = torch.where(group.valid, targets, IGNORE)
        below = None
        if self.outer is not None and self.below:
            read = torch.cat([state.tokens, group.ids], 1)
            kept = request.cache is not None
            below = Below(self.model, self.outer, read, int(state.start[0]), kept=kept)
        stream = TokenStream(
            self.engine,
            self._rates(),
            run=self._run_of(group, state) if below is None else below.run,
            meta=None if self.outer is not None else request.meta,
            truncate=self.model.config.truncate and request.meta != "second_order",
            outer=self.outer,
            targets=targets,
            keep_logits=request.keep_logits,
            measure=request.measure,
            final=request.cache is None and len(runs) == 1,  # else the next run goes on from it
            observe=self.model.training and (request.meta is not None or self.outer is not None),
            recompute=self.recompute,
        )
        wanted = (
            torch.ones_like(group.ids, dtype=torch.bool) if group.valid is None else group.valid
        )
        for part, teaches in runs:
            if teaches:
                out = stream.learn(group.ids[:, part], wanted[:, part], state)
            else:
                out = stream.read(group.ids[:, part], state)
            state = out.state
        if below is not None:
            below.backward()
        self.states.append(out.state)
        self.updates.append(out.updates)
        if request.hidden:  # tokens that are read once more, of an earlier call, come first
            joined = (torch.cat(pieces, 1) for pieces in zip(*self._passes, strict=True))
            self.hidden.append([each[:, -group.ids.shape[1] :] for each in joined])
            self._passes = []
        return out.logits

    def _runs(self, group: _Group) -> list[tuple[slice, bool]]:
        """Which columns are read together, and whether they teach: embeddings of no token do not.

        What waits for its segment to be complete when such embeddings come teaches nothing either.
        """
        length = group.ids.shape[1]
        if all(self.silent):
            return [(slice(0, length), False)]
        if self.request.known is None:
            return [(slice(0, length), True)]
        teaches = _teaching(group, self.request.known)[0].tolist()  # alike in all rows
        begins = [n for n in range(length) if n == 0 or teaches[n] != teaches[n - 1]]
        ends = [*begins[1:], length]
        return [(slice(n, m), teaches[n]) for n, m in zip(begins, ends, strict=True)]

    def _run_of(self, group: _Group, state: ContinuumState) -> Run:
        """The forward pass: embeddings where this call gives them, else those of the tokens."""
        if self.request.embeds is None:
            return self._run
        given, here = group.of(self.request.embeds), int(state.start[0]) + state.tokens.shape[1]

        def run(ids: Tensor, tree: Any, seen: int) -> tuple[Tensor, Any]:
            before = min(max(here - seen, 0), ids.shape[1])  # tokens of an earlier call
            first = max(seen - here, 0)
            x = given[:, first : first + ids.shape[1] - before]
            if before:
                x = torch.cat([self.model.model.embed_tokens(ids[:, :before]).to(x.dtype), x], 1)
            return self._run(ids, tree, seen, x)

        return run

    def _run(
        self, ids: Tensor, tree: Any, seen: int, embeds: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        cache = self.model.make_cache(tree, seen)
        options: dict[str, Any] = {"past_key_values": cache, "use_cache": True, "hooks": False}
        if self.request.hidden:
            options["gather"] = []
        given = {"input_ids": ids} if embeds is None else {"inputs_embeds": embeds}
        x = self.model.model(**given, **options)
        if self.request.hidden:
            constant = self.request.meta is None
            self._passes.append([h.detach() if constant else h for h in options["gather"]])
        return self.model.lm_head(x.last_hidden_state), cache

    def _rates(self) -> list[Any]:
        """Every level's rate: a number, or what the model has learned it to be."""
        learned = self.model.rates
        if learned is None:
            rates: list[Any] = [level.rate for level in self.engine.levels]
        elif self.request.meta in ("first_order", "second_order") and self.outer is None:
            rates = list(learned().unbind())
        else:
            rates = learned().tolist()
        return [0.0 if silent else r for silent, r in zip(self.silent, rates, strict=True)]


def _groups(engine: Engine, request: Request) -> list[_Group]:
    """Sequences of equal position and as many tokens, in the order of the batch."""
    ids, mask, cache = request.ids, request.mask, request.cache
    everyone = torch.arange(ids.shape[0], device=ids.device)
    learned = None if cache is None else cache.learned
    if cache is not None and learned is None and cache.states is not None:
        learned = _adopted(engine, cache)
    if learned is None and mask is None:
        return [_Group(everyone, None, ids, None, None)]
    if cache is None and mask is not None:
        packed = pack_rows(mask)
        valid = None if bool(packed.valid.all()) else packed.valid
        return [_Group(everyone, None, ids.gather(1, packed.order), packed.order, valid)]
    found = []
    for rows, state in zip(*learned, strict=True) if learned is not None else [(everyone, None)]:
        if mask is None:
            found.append(_Group(rows, state, ids[rows], None, None))
            continue
        counts = mask[rows].sum(1)
        for many in counts.unique().tolist():
            some = (counts == many).nonzero()[:, 0]
            order = mask[rows[some]].nonzero()[:, 1].view(len(some), many)
            part = state if state is None or len(some) == len(rows) else state_select(state, some)
            found.append(_Group(rows[some], part, ids[rows[some]].gather(1, order), order, None))
    return found


def _teaching(group: _Group, known: Tensor) -> Tensor:
    """Which of a group's columns teach, [b, n]: where its embeddings are tokens (or padding)."""
    mine = group.of(known)
    return mine if group.valid is None else mine | ~group.valid


def _alike(group: _Group, known: Tensor) -> list[_Group]:
    """A group in parts whose sequences have embeddings of no token at the same places."""
    patterns, number = _teaching(group, known).unique(dim=0, return_inverse=True)
    if len(patterns) == 1:
        return [group]
    parts = []
    for each in range(len(patterns)):
        some = (number == each).nonzero()[:, 0]
        parts.append(
            _Group(
                group.rows[some],
                None if group.state is None else state_select(group.state, some),
                group.ids[some],
                None if group.columns is None else group.columns[some],
                None if group.valid is None else group.valid[some],
            )
        )
    return parts


def _adopted(engine: Engine, cache: MemoryCache) -> Learned:
    """Sequences read so far without learning: nothing is learned yet, and their clock goes on."""
    states, places = cache.states, cache.position
    if states is None or places is None:
        raise ValueError("past_key_values is empty")
    rows, found = [], []
    for here in places.unique().tolist():
        some = (places == here).nonzero()[:, 0]
        fresh = begin(engine, len(some))
        part = fresh._replace(start=torch.full_like(fresh.start, here), cache=states)
        rows.append(some)
        found.append(part._replace(cache=state_select(states, some)))
    return Learned(tuple(rows), tuple(found))


def begin_rows(model: Any, cache: MemoryCache, fresh: Tensor) -> None:
    """Let the sequences `fresh` ([B] bool) of a cache begin anew: nothing read, nothing learned."""
    engine, learned = engine_of(model), cache.learned
    learned = _adopted(engine, cache) if learned is None else learned
    rows, states = [], []
    for mine, state in zip(*learned, strict=True):
        stay = (~fresh.to(mine.device)[mine]).nonzero()[:, 0]
        if len(stay):
            rows.append(mine[stay])
            states.append(state if len(stay) == len(mine) else state_select(state, stay))
    new = fresh.nonzero()[:, 0].to(learned.rows[0].device)
    if len(new):
        rows.append(new)
        states.append(begin(engine, len(new)))
    cache.advance_learned(Learned(tuple(rows), tuple(states)), 0)


def _joined(groups: list[_Group], logits: list[Tensor | None], request: Request) -> Tensor:
    """The groups' logits in the order of the batch: [B, T, V], zeros at padding."""
    first = next((each for each in logits if each is not None), None)
    if first is None:
        raise ValueError("attention_mask leaves no token to read")
    if len(groups) == 1 and groups[0].columns is None:
        return first
    batch, length = request.ids.shape
    full = first.new_zeros(batch, length if request.keep_logits else 1, first.shape[-1])
    for group, found in zip(groups, logits, strict=True):
        if found is None:
            continue
        if group.valid is not None and request.keep_logits:
            found = found * group.valid.unsqueeze(-1)
        columns = group.columns
        if columns is None or not request.keep_logits:
            columns = torch.arange(found.shape[1], device=found.device).expand(len(found), -1)
        full = full.index_put((group.rows.unsqueeze(1), columns), found)
    return full


def _by_position(
    groups: Sequence[_Group], found: Sequence[Sequence[LevelUpdate]], request: Request
) -> tuple[LevelUpdate, ...]:
    """The groups' updates by position, one for each position and level, with measures [B].

    A sequence that was not there has nan; what nobody measured is the number nan.
    """
    merged: dict[tuple[Any, ...], LevelUpdate] = {}
    batch = len(request.ids)
    for group, updates in zip(groups, found, strict=True):
        told = Counter[tuple[int, str]]()
        for update in updates:
            told[update[:2]] += 1
            key = (*update[:2], told[update[:2]])
            before = merged.get(key, LevelUpdate(*update[:2], *[math.nan] * 4))
            measured = 4 if request.measure else 1  # the loss alone
            measures: list[Any] = list(before[2:])
            given: list[Any] = list(update[2 : 2 + measured])
            for place, new in enumerate(given):
                measures[place] = _rows_set(measures[place], new, group.rows, batch)
            merged[key] = LevelUpdate(*update[:2], *measures)
    return tuple(sorted(merged.values(), key=lambda update: update.position))


def _rows_set(old: Tensor | float, new: Tensor, rows: Tensor, batch: int) -> Tensor:
    """A batch's measure [B] with one group's numbers [b] in their rows."""
    full = old if isinstance(old, Tensor) else new.new_full((batch,), old)
    return full.index_put((rows.to(new.device),), new)


class HandOver(torch.autograd.Function):
    """A loss whose gradients are known already: the backward pass hands them to the parameters."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: Sequence[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *(each * grad.to(each.dtype) for each in ctx.gradients))


def _hand_over(model: Any, engine: Engine, outer: Outer, request: Request) -> Tensor:
    targets = request.targets
    if targets is None:
        raise ValueError("an outer loss needs targets")
    if not isinstance(outer.loss, Tensor):
        return targets.new_zeros((), dtype=torch.float32) / 0.0  # no target: as cross-entropy says
    items = (targets != IGNORE).sum() if request.items is None else request.items
    share = 1.0 / torch.as_tensor(items, device=outer.loss.device, dtype=outer.loss.dtype)
    pairs: list[tuple[Tensor, Tensor | None]] = [
        *zip(outer.parameters, outer.gradients, strict=True)
    ]
    for slot, gradient in zip(engine.slots, outer.slot_gradients, strict=True):
        weight, transposed = weight_of(model, slot.name)
        pairs.append((weight, gradient.mT if transposed and gradient is not None else gradient))
    if model.rates is not None and model.rates.log_rate.requires_grad:
        log_rate = model.rates.log_rate
        found = [torch.as_tensor(each, device=log_rate.device) for each in outer.rate_gradients]
        pairs = [pair for pair in pairs if pair[0] is not log_rate]
        pairs.append((log_rate, torch.stack([each.to(log_rate.dtype) for each in found])))
    known = [(p, g.to(p.dtype).mul_(share.to(p.dtype))) for p, g in pairs if g is not None]
    loss: Tensor = HandOver.apply(outer.loss * share, [g for _, g in known], *[p for p, _ in known])
    return loss


@contextlib.contextmanager
def _no_recompute(model: Any, first: int) -> Iterator[None]:
    """No layer from `first` on computes again: only one segment's activations are alive at a time,
    or (at second order) whole segments are computed again."""
    layers = [layer for layer in model.model.layers[first:] if layer.gradient_checkpointing]
    for layer in layers:
        layer.gradient_checkpointing = False
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = True


@contextlib.contextmanager
def _whole(parts: Sequence[Any], *, last: bool) -> Iterator[None]:
    """Whole weights, where FSDP2 has sharded them: every segment reads them, and so does the rule.

    They are sharded again by the backward pass, or here when there will be none (`last`).
    """
    for part in parts:
        part.unshard()
    try:
        yield
    finally:
        for part in parts if last else ():
            part.reshard()
