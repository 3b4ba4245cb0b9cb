"""How levels learn: collect the chunk's gradient, step when due, return to the start (Eq. 71-73).

Everything here is a pure function of a level's state. Under `graph` all of it can be
differentiated; otherwise no history is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nestling.continuum import fast as differences
from nestling.continuum.core import Factors, Fast, LevelState, MemoryLevel, Pairs, Update
from nestling.continuum.plan import Plan
from nestling.continuum.slots import Owned
from nestling.rules.core import Gates, Write
from nestling.tree import tree_map

__all__ = ["Segment", "collect", "empty", "feed", "release", "remember", "transfer"]

Rate = float | Tensor


class Segment:
    """What one segment of the text brings: each slot's inputs x and surprises `delta = dL/dy`.

    Gradients are formed when first asked for, and only once.
    """

    def __init__(self, slots: list[tuple[Tensor, Tensor]], seen: Tensor, surprise: Tensor) -> None:
        self.slots = slots  # per slot: x [B, n, Di], delta [B, n, Do]
        self.seen, self.surprise = seen, surprise  # [B], [B]
        self._formed: dict[Any, Tensor] = {}

    def gradient(self, own: Owned, dtype: torch.dtype) -> Tensor:
        """`sum_n delta_n x_n^T` of each sequence: [B, Do, Di]."""
        if own.key not in self._formed:
            x, surprise = self._part(own)
            self._formed[own.key] = (surprise.mT @ x).to(dtype)
        return self._formed[own.key]

    def compact(self, own: Owned, dtype: torch.dtype, readers: int) -> Tensor | Factors:
        """The same gradient as factors, unless the matrix is smaller, or handier for its readers.

        readers: how many levels keep full differences there; 0: factors as long as they are small.
        """
        x, surprise = self._part(own)
        shape = x.shape[1], surprise.shape[-1], x.shape[-1]
        formed = (
            differences.handier(*shape, readers) if readers else not differences.smaller(*shape)
        )
        if formed:
            return self.gradient(own, dtype)
        return Factors(surprise.mT.to(dtype), x.mT.to(dtype))

    def pairs(self, own: Owned) -> Pairs:
        """Inputs and targets `u = -delta` of one part."""
        x, surprise = self._part(own)
        return Pairs(x, -surprise)

    def _part(self, own: Owned) -> tuple[Tensor, Tensor]:
        x, surprise = self.slots[own.slot]
        _, axis, start, stop = own.part
        if axis == 0:
            surprise = surprise[..., start:stop]
        if axis == 1:
            x = x[..., start:stop]
        return x, surprise


def empty(count: int, batch: int, like: Tensor) -> LevelState:
    """A level that has learned nothing, with `count` parts."""
    none: tuple[None, ...] = (None,) * count
    zero = torch.zeros(batch, dtype=torch.float32, device=like.device)
    zero = zero.to(torch.promote_types(like.dtype, torch.float32))
    updates = torch.zeros(batch, dtype=torch.int64, device=like.device)
    return LevelState(
        fast=none,
        rule=none,
        sums=none,
        pairs=none,
        seen=zero,
        surprise=zero,
        updates=updates,
        lost=zero,
        start=none,
        outer=none,
        outer_seen=zero,
        outer_surprise=zero,
    )


def collect(state: LevelState, segment: Segment, plan: Plan, number: int) -> LevelState:
    """Add a segment's gradient to the level's unfinished chunk."""
    level, dtype = plan.levels[number], state.seen.dtype
    sums: list[Fast] = []
    pairs: list[Pairs | None] = []
    lost = state.lost
    for own, old, old_pairs in zip(plan.parts[number], state.sums, state.pairs, strict=True):
        readers = plan.readers[own.key] if level.rank is None else 0
        new = differences.add(old, segment.compact(own, dtype, readers))
        if level.rank is not None and old is not None and new is not None:
            new, dropped = differences.truncate(new, 4 * level.rank)
            lost = lost + dropped
        sums.append(new)
        pairs.append(_join(old_pairs, segment.pairs(own)) if plan.pairs[number] else None)
    return state._replace(
        sums=tuple(sums),
        pairs=tuple(pairs),
        seen=state.seen + segment.seen,
        surprise=state.surprise + segment.surprise,
        lost=lost,
    )


def feed(state: LevelState, faster: LevelState, rank: int | None) -> LevelState:
    """Add the chunk a faster level has just finished to this level's own."""
    sums = [differences.add(mine, its) for mine, its in zip(state.sums, faster.sums, strict=True)]
    lost = state.lost
    if rank is not None:
        for place, new in enumerate(sums):
            if new is not None:
                sums[place], dropped = differences.truncate(new, 4 * rank)
                lost = lost + dropped
    both = zip(state.pairs, faster.pairs, strict=True)
    return state._replace(
        sums=tuple(sums),
        pairs=tuple(mine if its is None else _join(mine, its) for mine, its in both),
        seen=state.seen + faster.seen,
        surprise=state.surprise + faster.surprise,
        lost=lost,
    )


def release(
    state: LevelState,
    plan: Plan,
    number: int,
    *,
    rate: Rate,
    weight: Callable[[Owned], Tensor],
    position: int,
    measure: bool,
    in_place: bool = False,
) -> tuple[LevelState, Update | None]:
    """One update of a level with the chunk it has collected (Eq. 71), and a new chunk.

    `theta <- retain theta - rate f(...)` on the difference, with f the rule's direction for the
    mean (or sum) of the chunk's gradients. Sequences that collected nothing stay as they are.
    in_place: nobody else holds the level's differences, so they may be overwritten.
    """
    level, some = plan.levels[number], state.seen > 0
    if not bool(some.any()):
        return state, None
    factor = _factor(state.seen, plan.mean)
    moved: list[_Moved] = []
    if plan.plain[number] and level.rank is not None:
        moved = _ranked(state, level, level.rank, rate, factor, measure)
    for place, own in enumerate(plan.parts[number][len(moved) :]):
        if plan.plain[number]:
            total = differences.handy(state.sums[place])
            after = _plain(state, level, place, total, rate, factor, in_place)
            moved.append(_Moved(after, None, 0.0, *_squares(total, after, measure)))
        else:
            after, memory = _by_rule(state, level, place, weight(own), rate, factor)
            moved.append(_Moved(after, memory, 0.0, *_squares(state.sums[place], after, measure)))
    nothing = (None,) * len(state.fast)
    new = state._replace(
        fast=tuple(each.fast for each in moved),
        rule=tuple(each.rule for each in moved),
        sums=nothing,
        pairs=nothing,
        seen=torch.zeros_like(state.seen),
        surprise=torch.zeros_like(state.surprise),
        updates=state.updates + some,
        lost=state.lost + sum(each.lost for each in moved),
    )
    mean_loss = (state.surprise / state.seen.clamp(min=1)).detach()
    gradient = norm = torch.full_like(state.seen, torch.nan)
    if measure:
        squares = norms = torch.zeros_like(norm)
        for each in moved:
            squares, norms = squares + each.gradient2, norms + each.norm2
        gradient, norm = (squares.sqrt() * _flat(factor)).detach(), norms.sqrt().detach()
    return new, Update(position, level.name, mean_loss, gradient, norm)


class _Moved(NamedTuple):
    """One part after an update, with what was measured: each a number or [B]."""

    fast: Fast
    rule: Any
    lost: Tensor | float
    gradient2: Tensor | float
    norm2: Tensor | float


def _plain(
    state: LevelState,
    level: MemoryLevel,
    place: int,
    total: Fast,
    rate: Rate,
    factor: Rate,
    in_place: bool,
) -> Fast:
    """One part's step by gradient descent, on a full difference."""
    old, some = state.fast[place], state.seen > 0
    numbers = isinstance(rate, float) and isinstance(factor, float) and bool(some.all())
    numbers = numbers and not torch.is_grad_enabled()
    if numbers and total is not None and not isinstance(old, Factors):
        strength = float(-rate * factor)
        return differences.step(old, total, strength, level.retain, in_place=in_place)
    after, _ = _shape(_descend(old, total, rate, factor, _retain(state, level)), None)
    return after


def _ranked(
    state: LevelState, level: MemoryLevel, rank: int, rate: Rate, factor: Rate, measure: bool
) -> list[_Moved]:
    """All parts' steps by gradient descent, on factors."""
    retain = _retain(state, level)
    both = zip(state.fast, state.sums, strict=True)
    after = [_descend(old, total, rate, factor, retain) for old, total in both]
    some = [place for place, fast in enumerate(after) if fast is not None]
    short = differences.truncate_all([fast for fast in after if fast is not None], rank)
    kept = dict(zip(some, short, strict=True))
    moved = []
    for place, total in enumerate(state.sums):
        fast, lost = kept.get(place, (None, 0.0))
        moved.append(_Moved(fast, None, lost, *_squares(total, fast, measure)))
    return moved


def _retain(state: LevelState, level: MemoryLevel) -> Rate:
    """What each sequence retains; those that collected nothing keep everything."""
    some = state.seen > 0
    return level.retain if bool(some.all()) else torch.where(some, level.retain, 1.0)


def _shape(fast: Fast, rank: int | None) -> tuple[Fast, Tensor | float]:
    """As a level keeps it, a matrix or factors of its rank, and the norm of what that drops."""
    if fast is None:
        return None, 0.0
    return (differences.dense(fast), 0.0) if rank is None else differences.truncate(fast, rank)


def _squares(total: Fast, after: Fast, measure: bool) -> tuple[Tensor | float, Tensor | float]:
    return (differences.norm2(total), differences.norm2(after)) if measure else (0.0, 0.0)


def _by_rule(
    state: LevelState, level: MemoryLevel, place: int, weight: Tensor, rate: Rate, factor: Rate
) -> tuple[Tensor, Any]:
    """One part's step by any rule: its difference and the rule's state."""
    total, old, memory = state.sums[place], state.fast[place], state.rule[place]
    if total is None or isinstance(old, Factors):
        raise TypeError("a rule other than gradient descent needs a full gradient (rank=None)")
    total = differences.dense(total)
    pairs = state.pairs[place]
    write = Write(total * factor)
    if pairs is not None:
        write = Write(write.grad, pairs.x.to(total.dtype), pairs.u.to(total.dtype) * factor)
    memory = level.rule.init(weight) if memory is None else memory
    gates = Gates(rate=rate, retain=level.retain, step=int(state.updates.max()) + 1)
    write, later = level.rule.step(write, memory, weight, gates)
    old = torch.zeros_like(write.grad) if old is None else old
    after = level.retain * old - rate * write.grad
    some = state.seen > 0
    if bool(some.all()):
        return after, later

    def pick(new: Tensor, kept: Tensor) -> Tensor:
        return torch.where(some.view(-1, *[1] * (new.dim() - 1)), new, kept)

    return pick(after, old), tree_map(pick, later, memory)


def _descend(old: Fast, total: Fast, rate: Rate, factor: Rate, retain: Rate) -> Fast:
    """`retain Delta - rate factor sum`."""
    if isinstance(retain, Tensor):
        retain = retain.to(factor.dtype if isinstance(factor, Tensor) else retain.dtype)
        retain = retain.view(-1, 1, 1)
    kept = old if isinstance(retain, float) and retain == 1.0 else differences.scale(old, retain)
    strength: Rate = -rate * factor
    if isinstance(kept, Tensor) and isinstance(total, Tensor):
        if isinstance(strength, Tensor):
            return kept + strength * total
        return torch.add(kept, total, alpha=strength)
    return differences.add(kept, differences.scale(total, strength))


def remember(state: LevelState, rank: int | None) -> LevelState:
    """Keep a finished chunk for the slower level, which learns the initial state from it."""
    outer = [differences.add(old, new) for old, new in zip(state.outer, state.sums, strict=True)]
    for place, new in enumerate(outer):
        if rank is not None and new is not None:
            outer[place], _ = differences.truncate(new, 4 * rank)
    return state._replace(
        outer=tuple(outer),
        outer_seen=state.outer_seen + state.seen,
        outer_surprise=state.outer_surprise + state.surprise,
    )


def transfer(state: LevelState, plan: Plan, number: int, *, rate: Rate, graph: bool) -> LevelState:
    """The end of a level's context (Eq. 72): its initial state is learned, and it returns to it.

    Called when the next slower level is due, whose `rate` is used: by gradient descent on the mean
    loss of the slower level's chunk, first-order (the gradient at the adapted weights) or
    second-order (by the initial state, through the updates), or by Reptile, a step towards where
    the level has ended.
    """
    starts: list[Fast] = list(state.start)
    rank, lost = plan.levels[number].rank, state.lost
    strength: Rate = rate if plan.transfer_rate is None else plan.transfer_rate
    if plan.transfer == "reptile":
        eps = 0.5 if plan.transfer_rate is None else plan.transfer_rate
        starts = [
            differences.add(differences.scale(s, 1.0 - eps), differences.scale(f, eps))
            for s, f in zip(state.start, state.fast, strict=True)
        ]
    elif plan.transfer == "first_order":
        factor = _factor(state.outer_seen, plan.mean)
        both = zip(state.start, state.outer, strict=True)
        starts = [_descend(s, g, strength, factor, 1.0) for s, g in both]
    elif plan.transfer == "second_order":
        starts = _second_order(state, plan, strength, graph)
    for place, new in enumerate(starts):
        starts[place], dropped = _shape(new, rank)
        lost = lost + dropped
    nothing = (None,) * len(state.fast)
    return state._replace(
        fast=tuple(starts),
        start=tuple(starts),
        rule=nothing,
        outer=nothing,
        outer_seen=torch.zeros_like(state.outer_seen),
        outer_surprise=torch.zeros_like(state.outer_surprise),
        updates=torch.zeros_like(state.updates),
        lost=lost,
    )


def _second_order(state: LevelState, plan: Plan, rate: Rate, graph: bool) -> list[Fast]:
    """`Phi - rate d/dPhi (loss of the slower level's chunk)`, through every update since."""
    leaves = [start for start in state.start if isinstance(start, Tensor)]
    factor = _factor(state.outer_seen, plan.mean)
    grads = torch.autograd.grad(
        state.outer_surprise.sum(), leaves, create_graph=graph, retain_graph=True
    )
    new = [_descend(s, g, rate, factor, 1.0) for s, g in zip(leaves, grads, strict=True)]
    return [s if graph or s is None else _leaf(s) for s in new]


def _leaf(start: Fast) -> Fast:
    return start.detach().requires_grad_() if isinstance(start, Tensor) else start


def _factor(seen: Tensor, mean: bool) -> Rate:
    """What turns the chunk's sum into what the rule sees: a number, or [B, 1, 1]."""
    if not mean:
        return 1.0
    first = float(seen[0])
    if seen.shape[0] == 1 or bool((seen == first).all()):
        return 1.0 / max(first, 1.0)
    return (1.0 / seen.clamp(min=1)).view(-1, 1, 1)


def _flat(factor: Rate) -> Rate:
    return factor.view(-1) if isinstance(factor, Tensor) else factor


def _join(old: Pairs | None, new: Pairs) -> Pairs:
    if old is None:
        return new
    return Pairs(torch.cat([old.x, new.x], 1), torch.cat([old.u, new.u], 1))
