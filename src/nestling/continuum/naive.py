"""Eq. 71-73 by loops: one sequence, one token at a time, plain weights, autograd by the weights.

What the engine does at once is here done literally: every position runs the model with the weights
in force, its loss is added up, and a level that is due takes the gradient of its chunk's losses by
its own weights. As in the engine, a segment's gradient does not reach back through the model's
cache: each segment reads with copies of its own, by which the gradient is taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from nestling.continuum.assignment import Slot, owned, shapes
from nestling.continuum.engine import MemoryLevel
from nestling.continuum.fast import Owned, cut, weight_of
from nestling.continuum.stream import cache_from, cache_tree
from nestling.rules.core import Gates, Write
from nestling.tree import state_detach


class NaiveResult(NamedTuple):
    """Everything a run leaves behind."""

    logits: Tensor  # [1, T, V]
    losses: Tensor  # [T - 1]
    fast: list[list[Tensor]]  # per level, per part: the difference at the end
    changed: list[list[int]]  # per level: the positions at which it changed


@dataclass
class _Level:
    """One level while it runs; lists have one entry per part."""

    level: MemoryLevel
    rate: Tensor | float
    own: tuple[Owned, ...]
    start: list[Tensor]
    fast: list[Tensor]
    copies: list[Tensor]
    sums: list[Tensor]
    outer: list[Tensor]
    outer_loss: Tensor
    memory: list[Any]
    step: int = 0
    changed: list[int] = field(default_factory=list)


def naive(
    model: Any,
    levels: Sequence[MemoryLevel],
    slots: Sequence[Slot],
    ids: Tensor,
    *,
    mean: bool = True,
    rates: Sequence[Tensor | float] | None = None,
    transfer: str | None = None,
    transfer_rate: float | None = None,
    second_order: bool = False,
    outer: bool = False,
    natural: Callable[[str], Tensor] | None = None,
) -> NaiveResult:
    """Read ids [1, T]; level l changes at the multiples of its chunk, by its chunk's gradient.

    `theta_l <- retain theta_l - rate f(sum of the chunk's gradients)` (Eq. 71), from initial states
    that are learned outside (Eq. 73) or, with `transfer`, at the next slower level (Eq. 72).
    `second_order` keeps the history of every update for the gradient of the meta-objective; `outer`
    keeps the graph of every segment, with fast weights and the cache before it as constants.
    `natural` gives what the gradient of a slot is multiplied with, [Di, Di].
    """
    graph = second_order or transfer == "second_order"
    running = _begin(model, levels, slots, rates)
    by_speed = sorted(running, key=lambda each: each.level.chunk)
    due: list[_Level] = []
    cache, segment = None, torch.zeros(())
    weights: dict[str, Tensor] = {}
    logits, losses = [], []
    for t in range(ids.shape[1]):
        if t == 0 or due:
            for each in running:
                each.copies = [fast.clone() for fast in each.fast]
            weights = _weights(model, slots, running)
        out = functional_call(
            model,
            weights,
            kwargs={
                "input_ids": ids[:, t : t + 1],
                "past_key_values": cache_from(model, cache, t),
                "use_cache": True,
            },
        )
        cache = cache_tree(out.past_key_values)
        logits.append(out.logits)
        if t + 1 == ids.shape[1]:
            break
        losses.append(functional.cross_entropy(out.logits[0, -1:], ids[0, t + 1 : t + 2]))
        segment = segment + losses[-1]
        due = [each for each in by_speed if each.level.due(t + 1)]
        if due:
            _collect(running, segment, graph, retain=second_order or outer)
            for each in due:
                _update(each, slots, weights, model, t + 1, mean, graph, natural)
            for faster, slower in itertools.pairwise(by_speed):
                if transfer is not None and slower in due:
                    _return(faster, slower, transfer, transfer_rate, mean, second_order)
            segment = torch.zeros_like(segment)
            cache = cache if second_order else state_detach(cache)
    fast = [each.fast for each in running]
    return NaiveResult(
        torch.cat(logits, 1), torch.stack(losses), fast, [each.changed for each in running]
    )


def _begin(
    model: Any,
    levels: Sequence[MemoryLevel],
    slots: Sequence[Slot],
    rates: Sequence[Tensor | float] | None,
) -> list[_Level]:
    """Every level with all differences zero."""
    sizes, parts = shapes(model, slots), owned(slots, levels)
    like = weight_of(model, slots[0].name)[0].detach()
    running = []
    for number, (level, own) in enumerate(zip(levels, parts, strict=True)):
        zeros = [cut(like.new_zeros(sizes[each.slot]), each.part).clone() for each in own]
        start = [zero.clone().requires_grad_() for zero in zeros]
        rate = level.rate if rates is None else rates[number]
        nothing: list[Any] = [None] * len(own)
        outer, loss = list(zeros), like.new_zeros(())
        running.append(
            _Level(level, rate, own, start, list(start), [], list(zeros), outer, loss, nothing)
        )
    return running


def _weights(model: Any, slots: Sequence[Slot], running: list[_Level]) -> dict[str, Tensor]:
    """`W0 + sum_l Delta_l` of every slot, by name."""
    weights = {}
    for number, slot in enumerate(slots):
        base, transposed = weight_of(model, slot.name)
        total = base.mT if transposed else base
        for each in running:
            for own, fast in zip(each.own, each.copies, strict=True):
                if own.slot == number:
                    axis, size = own.part.axis, total.shape
                    ahead = 0 if axis is None else own.part.start
                    behind = 0 if axis is None else size[axis] - own.part.stop
                    pad = (ahead, behind) if axis == 1 else (0, 0, ahead, behind)
                    total = total + functional.pad(fast, pad)
        weights[slot.name] = total.mT if transposed else total
    return weights


def _collect(running: list[_Level], segment: Tensor, graph: bool, *, retain: bool) -> None:
    """A segment's gradient by the weights of every level."""
    leaves = [part for each in running for part in each.copies]
    keep = graph or retain
    grads = iter(torch.autograd.grad(segment, leaves, create_graph=graph, retain_graph=keep))
    for each in running:
        each.sums = [total + next(grads) for total in each.sums]
        each.outer_loss = each.outer_loss + segment


def _update(
    each: _Level,
    slots: Sequence[Slot],
    weights: dict[str, Tensor],
    model: Any,
    position: int,
    mean: bool,
    graph: bool,
    natural: Callable[[str], Tensor] | None,
) -> None:
    """One update of one level (Eq. 71); the rule sees the weight the model has read with."""
    each.step += 1
    count = position - (each.changed[-1] if each.changed else 0) if mean else 1
    each.changed.append(position)
    gates = Gates(each.rate, each.level.retain, each.step)
    for place, own in enumerate(each.own):
        name = slots[own.slot].name
        whole = weights[name].mT if weight_of(model, name)[1] else weights[name]
        weight = cut(whole if graph else whole.detach(), own.part)
        memory = each.memory[place]
        memory = each.level.rule.init(weight) if memory is None else memory
        gradient = each.sums[place] if natural is None else each.sums[place] @ natural(name)
        write = Write(gradient / count)
        write, each.memory[place] = each.level.rule.step(write, memory, weight, gates)
        moved = gates.retain * each.fast[place] - gates.rate * write.grad
        each.fast[place] = moved if graph else moved.detach().requires_grad_()
    each.outer = [old + new for old, new in zip(each.outer, each.sums, strict=True)]
    each.sums = [torch.zeros_like(total) for total in each.sums]


def _return(
    faster: _Level,
    slower: _Level,
    transfer: str,
    transfer_rate: float | None,
    mean: bool,
    second_order: bool,
) -> None:
    """The faster level's initial state is learned at the slower one, and it returns to it (72)."""
    count = slower.level.chunk if mean else 1
    rate = slower.rate if transfer_rate is None else transfer_rate
    starts, graph = faster.start, second_order
    if transfer == "reptile":
        eps = 0.5 if transfer_rate is None else transfer_rate
        new = [s + eps * (f - s) for s, f in zip(starts, faster.fast, strict=True)]
    elif transfer == "first_order":
        new = [s - rate * g / count for s, g in zip(starts, faster.outer, strict=True)]
    elif transfer == "second_order":
        loss = faster.outer_loss / count
        grads = torch.autograd.grad(loss, starts, create_graph=graph, retain_graph=True)
        new = [s - rate * g for s, g in zip(starts, grads, strict=True)]
    else:
        new = list(starts)
    faster.start = new if graph else [start.detach().requires_grad_() for start in new]
    faster.fast = list(faster.start)
    faster.memory, faster.step = [None] * len(faster.own), 0
    faster.outer = [torch.zeros_like(o) for o in faster.outer]
    faster.outer_loss = torch.zeros_like(faster.outer_loss)
