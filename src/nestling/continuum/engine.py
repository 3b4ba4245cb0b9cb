"""How levels learn, whatever is read: collect the chunk's gradient, step when due (Eq. 71-73).

A *slot* is one weight matrix of a model. Every level owns some slots, or parts of them, and keeps
for each sequence a *difference* from the model's weight there: the level's fast weights. The model
reads with `W0 + sum_l Delta_l`; the model itself is never changed.

`Wiring` is fixed before the first pair: who owns what, who feeds whom. `collect`, `feed`,
`release`, `remember`, `transfer` and `move` are pure functions of a level's state; under `graph`
all of it can be differentiated, otherwise no history is kept. `Engine` puts them together: `learn`
takes what one segment brought and lets every level that is due step.

Shapes: B sequences, n pairs, Do x Di a weight (outputs first), R rank.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nestling.continuum import fast as differences
from nestling.continuum.assignment import Slot, owned, shapes
from nestling.continuum.fast import Factors, Fast, LiveSlot, Owned, Reading, cut, weight_of
from nestling.continuum.natural import moments_of, natural_step
from nestling.levels import Level, LevelUpdate, multiple
from nestling.rules.core import Gates, Pairs, Rule, Write, identity
from nestling.tree import state_detach, tree_map

Rate = float | Tensor

TRANSFERS = ("frozen", "first_order", "reptile", "second_order")
"""How an initial state is learned (deviation 14)."""

_DESCENDING = ("first_order", "second_order")


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


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """Fixed before the first pair: who owns which part, who feeds whom, what each rule needs."""

    levels: tuple[MemoryLevel, ...]
    parts: tuple[tuple[Owned, ...], ...]  # per level
    order: tuple[int, ...]  # the active levels, fastest first
    feeder: tuple[int | None, ...]  # per level: the faster one whose chunks add up to its own
    plain: tuple[bool, ...]  # per level: gradient descent and nothing else
    pairs: tuple[bool, ...]  # per level: the rule needs the pairs
    readers: Mapping[Any, int]  # per part (its key): levels of full rank that collect there
    mean: bool
    transfer: str | None
    transfer_rate: float | None

    def slower(self, level: int) -> int | None:
        """The next slower level, which learns this one's initial state (Eq. 72)."""
        place = self.order.index(level) + 1
        return self.order[place] if self.transfer and place < len(self.order) else None

    @property
    def moving(self) -> list[int]:
        """The levels between which something moves (`move`), fastest first; rate 0 receives."""
        order = [n for n, level in enumerate(self.levels) if level.finite]
        return sorted(order, key=lambda n: self.levels[n].chunk)

    def needed(self, position: int, last: int) -> set[int]:
        """The levels that will be due at or after `position`, in a stream that ends at `last`."""
        if self.transfer is not None:
            return set(self.order)
        ends = {number: self.levels[number].next_due(position - 1) for number in self.order}
        return {number for number, end in ends.items() if end is not None and end <= last}

    def next_boundary(self, start: int) -> int | None:
        """The first position after `start` at which any level is due."""
        ends = (self.levels[number].next_due(start) for number in self.order)
        return min((end for end in ends if end is not None), default=None)


def wire(
    levels: Sequence[MemoryLevel],
    slots: Sequence[Slot],
    *,
    reduce: str,
    transfer: str | None,
    transfer_rate: float | None,
) -> Wiring:
    """Check a configuration and work out its wiring; what cannot work is a ValueError."""
    levels = tuple(levels)
    names = [level.name for level in levels]
    if not levels or len(set(names)) < len(names):
        raise ValueError(f"levels: at least one, each with a name of its own; got {names}")
    if reduce not in ("mean", "sum"):
        raise ValueError(f"reduce must be 'mean' or 'sum'; got {reduce!r}")
    if transfer is not None and transfer not in TRANSFERS:
        raise ValueError(f"transfer must be None or one of {TRANSFERS}; got {transfer!r}")
    parts = owned(slots, levels)
    active = [n for n, level in enumerate(levels) if level.active and parts[n]]
    order = tuple(sorted(active, key=lambda n: levels[n].chunk))
    plain = tuple(level.rule.plain for level in levels)
    pairs = tuple(level.rule.needs_pairs for level in levels)
    for level, simple in zip(levels, plain, strict=True):
        if level.rank is not None and not simple:
            raise ValueError(
                f"level {level.name!r}: rank={level.rank} needs a rule that is linear in the"
                " gradient, which is plain gradient descent (rules.identity); use rank=None with"
                " other rules"
            )
    if transfer is not None:
        _check_nested([levels[n] for n in order], transfer)
    feeder = tuple(_feeder(n, levels, parts, active, pairs) for n in range(len(levels)))
    full = [n for n in order if feeder[n] is None and levels[n].rank is None]
    return Wiring(
        levels=levels,
        parts=parts,
        order=order,
        feeder=feeder,
        plain=plain,
        pairs=pairs,
        readers=Counter(own.key for n in full for own in parts[n]),
        mean=reduce == "mean",
        transfer=transfer,
        transfer_rate=transfer_rate,
    )


def _feeder(
    number: int,
    levels: tuple[MemoryLevel, ...],
    parts: tuple[tuple[Owned, ...], ...],
    active: list[int],
    pairs: tuple[bool, ...],
) -> int | None:
    """The slowest faster level with the same parts and kind whose chunk divides this one's.

    The fastest of all feeds nobody: its chunk is a segment, whose gradient is at hand.
    """
    if number not in active:
        return None
    fastest = min(levels[n].chunk for n in active)
    mine = [own.key for own in parts[number]]
    fits = [
        n
        for n in active
        if fastest < levels[n].chunk < levels[number].chunk
        and not (levels[n].early or levels[number].early)
        and multiple(levels[number].chunk, levels[n].chunk)
        and [own.key for own in parts[n]] == mine
        and (levels[n].rank is None) == (levels[number].rank is None)
        and pairs[n] == pairs[number]
    ]
    return max(fits, key=lambda n: levels[n].chunk, default=None)


def _check_nested(levels: list[MemoryLevel], transfer: str) -> None:
    for fast, slow in itertools.pairwise(levels):
        if not multiple(slow.chunk, fast.chunk) or slow.chunk == fast.chunk:
            raise ValueError(
                f"transfer={transfer!r}: level {fast.name!r} returns to its initial state when"
                f" level {slow.name!r} is due, so that chunk must be a multiple of"
                f" {fast.chunk}, and larger; got {slow.chunk}"
            )
        if transfer == "second_order" and (fast.rank is not None or slow.rank is not None):
            raise ValueError("transfer='second_order' needs rank=None")
        if fast.early or slow.early:
            raise ValueError(f"transfer={transfer!r}: nested levels have one chunk each, no early")
        if math.inf in (fast.chunk, slow.chunk):
            raise ValueError(f"transfer={transfer!r}: every level needs a finite chunk")


class Segment:
    """One segment of the text: each slot's inputs x and surprises `delta = dL/dy`.

    Gradients are formed when first asked for, and only once.
    """

    def __init__(self, slots: list[tuple[Tensor, Tensor]], seen: Tensor, surprise: Tensor) -> None:
        self.slots = [(x, d.to(x.dtype)) for x, d in slots]  # x [B, n, Di], delta [B, n, Do]
        self.seen, self.surprise = seen, surprise  # [B], [B]
        self._formed: dict[Any, Tensor] = {}

    def gradient(self, own: Owned, dtype: torch.dtype) -> Tensor:
        """`sum_n delta_n x_n^T` of each sequence: [B, Do, Di]."""
        if own.key not in self._formed:
            x, surprise = self._part(own)
            self._formed[own.key] = torch.bmm(surprise.mT, x).to(dtype)
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

    def total(self, slot: int) -> Tensor:
        """The gradient of a whole slot, summed over the sequences: [Do, Di]."""
        x, surprise = self.slots[slot]
        return surprise.flatten(0, 1).mT @ x.flatten(0, 1)

    def along(self, own: Owned, fast: Tensor | Factors) -> Tensor:
        """`<G, Delta>`, summed over the sequences: a number."""
        if own.key in self._formed:
            return (self._formed[own.key] * differences.dense(fast)).sum()
        x, surprise = self._part(own)
        return (surprise * differences.read(x, fast)).sum()

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


def collect(state: LevelState, segment: Segment, wiring: Wiring, number: int) -> LevelState:
    """Add a segment's gradient to the level's unfinished chunk."""
    level, dtype = wiring.levels[number], state.seen.dtype
    sums: list[Fast] = []
    pairs: list[Pairs | None] = []
    lost = state.lost
    for own, old, old_pairs in zip(wiring.parts[number], state.sums, state.pairs, strict=True):
        readers = wiring.readers[own.key] if level.rank is None else 0
        new = differences.add(old, segment.compact(own, dtype, readers))
        if level.rank is not None and old is not None and new is not None:
            new, dropped = _shorten(new, level.rank)
            lost = lost + dropped
        sums.append(new)
        pairs.append(_join(old_pairs, segment.pairs(own)) if wiring.pairs[number] else None)
    return state._replace(
        sums=tuple(sums),
        pairs=tuple(pairs),
        seen=state.seen + segment.seen,
        surprise=state.surprise + segment.surprise,
        lost=lost,
    )


def _shorten(fast: Tensor | Factors, rank: int) -> tuple[Tensor | Factors, Tensor | float]:
    """A growing sum, cut to four times the rank once it has eight times as many columns."""
    if isinstance(fast, Factors) and fast.left.shape[-1] <= 8 * rank:
        return fast, 0.0
    return differences.truncate(fast, 4 * rank)


def feed(state: LevelState, faster: LevelState, rank: int | None) -> LevelState:
    """Add the chunk a faster level has just finished to this level's own."""
    sums = [differences.add(mine, its) for mine, its in zip(state.sums, faster.sums, strict=True)]
    lost = state.lost
    if rank is not None:
        for place, new in enumerate(sums):
            if new is not None:
                sums[place], dropped = _shorten(new, rank)
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
    wiring: Wiring,
    number: int,
    *,
    rate: Rate,
    weight: Callable[[Owned], Tensor],
    position: int,
    measure: bool,
    in_place: bool = False,
    natural: Callable[[Owned], Tensor] | None = None,
) -> tuple[LevelState, LevelUpdate | None]:
    """One update of a level with the chunk it has collected (Eq. 71), and a new chunk.

    `theta <- retain theta - rate f(...)` on the difference, with f the rule's direction for the
    mean (or sum) of the chunk's gradients. Sequences that collected nothing stay as they are.
    in_place: nobody else holds the level's differences, so they may be overwritten.
    natural: what turns each part's gradient into a natural step, [Di, Di].
    """
    level, counts = wiring.levels[number], state.seen.tolist()  # (one look at the device)
    if not any(counts):
        return state, None
    some, everyone = state.seen > 0, all(counts)
    if natural is not None:
        both = zip(wiring.parts[number], state.sums, strict=True)
        state = state._replace(
            sums=tuple(differences.turn(total, natural(own)) for own, total in both)
        )
    factor = _factor(state.seen, wiring.mean, counts)
    if wiring.plain[number] and level.rank is not None:
        moved = _ranked(state, level, level.rank, rate, factor, measure)
    elif wiring.plain[number]:
        strength: float | None = None
        if isinstance(rate, float) and isinstance(factor, float) and everyone:
            strength = None if torch.is_grad_enabled() else -rate * factor
        places = range(len(state.fast))
        moved = [_plain(state, level, n, rate, factor, strength, measure, in_place) for n in places]
    else:
        owned = enumerate(wiring.parts[number])
        moved = [_by_rule(state, level, n, weight(own), rate, factor, measure) for n, own in owned]
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
    gradient = step = distance = torch.full_like(state.seen, torch.nan)
    if measure:
        zero = torch.zeros_like(gradient)
        gradient = (zero + sum(each.gradient2 for each in moved)).sqrt() * _flat(factor)
        step = (zero + sum(each.step2 for each in moved)).sqrt()
        distance = zero + _norm(each.fast for each in moved)
    return new, LevelUpdate(
        position, level.name, mean_loss, gradient.detach(), step.detach(), distance.detach()
    )


class _Moved(NamedTuple):
    """One part after an update, with what was measured: each a number or [B]."""

    fast: Fast
    rule: Any
    lost: Tensor | float
    gradient2: Tensor | float  # squared norm of the chunk's summed gradient
    step2: Tensor | float  # squared norm of the change


_NONE: tuple[Tensor | float, Tensor | float] = (0.0, 0.0)


def _plain(
    state: LevelState,
    level: MemoryLevel,
    place: int,
    rate: Rate,
    factor: Rate,
    strength: float | None,
    measure: bool,
    in_place: bool,
) -> _Moved:
    """One part's step by gradient descent, on a full difference.

    strength: what the summed gradient is multiplied by, where that is one number for all sequences
        and nobody will differentiate it.
    """
    old, total = state.fast[place], differences.handy(state.sums[place])
    squares = _squares(state, level, place, total, rate, factor) if measure else _NONE
    if strength is not None and total is not None and not isinstance(old, Factors):
        after: Fast = differences.step(old, total, strength, level.retain, in_place=in_place)
    else:
        after, _ = _shape(_descend(old, total, rate, factor, _retain(state, level)), None)
    return _Moved(after, None, 0.0, *squares)


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
        squares = _squares(state, level, place, total, rate, factor) if measure else _NONE
        moved.append(_Moved(fast, None, lost, *squares))
    return moved


def _retain(state: LevelState, level: MemoryLevel) -> Rate:
    """Each sequence's retention; those that collected nothing keep everything."""
    some = state.seen > 0
    return level.retain if bool(some.all()) else torch.where(some, level.retain, 1.0)


def _shape(fast: Fast, rank: int | None) -> tuple[Fast, Tensor | float]:
    """A difference as its level keeps it, full or of a rank, and the norm of what that drops."""
    if fast is None:
        return None, 0.0
    return (differences.dense(fast), 0.0) if rank is None else differences.truncate(fast, rank)


def _squares(
    state: LevelState, level: MemoryLevel, place: int, total: Fast, rate: Rate, factor: Rate
) -> tuple[Tensor | float, Tensor | float]:
    """Squared norms, [B]: of the gradient, and of the step `(retain - 1) Delta - rate factor G`."""
    gradient2, old = differences.norm2(total), state.fast[place]
    if old is None or level.retain == 1.0:
        strength = _flat(factor) * (rate.detach() if isinstance(rate, Tensor) else rate)
        return gradient2, gradient2 * strength**2
    change = _descend(old, total, rate, factor, _retain(state, level) - 1.0)
    return gradient2, differences.norm2(change)


def _norm(fasts: Iterable[Fast]) -> Tensor | float:
    """The norm of all parts of a level together: [B], or 0.0 for nothing."""
    total: Tensor | float = sum(differences.norm2(fast) for fast in fasts)
    return total.sqrt() if isinstance(total, Tensor) else total**0.5


def _by_rule(
    state: LevelState,
    level: MemoryLevel,
    place: int,
    weight: Tensor,
    rate: Rate,
    factor: Rate,
    measure: bool,
) -> _Moved:
    """One part's step by any rule."""
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

    def pick(new: Tensor, kept: Tensor) -> Tensor:
        return torch.where(some.view(-1, *[1] * (new.dim() - 1)), new, kept)

    if not bool(some.all()):
        after, later = pick(after, old), tree_map(pick, later, memory)
    squares = (differences.norm2(total), differences.norm2(after - old)) if measure else _NONE
    return _Moved(after, later, 0.0, *squares)


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
            outer[place], _ = _shorten(new, rank)
    return state._replace(
        outer=tuple(outer),
        outer_seen=state.outer_seen + state.seen,
        outer_surprise=state.outer_surprise + state.surprise,
    )


def transfer(
    state: LevelState, wiring: Wiring, number: int, *, rate: Rate, graph: bool
) -> LevelState:
    """The end of a level's context (Eq. 72): its initial state is learned, and it returns to it.

    Called when the next slower level is due, whose `rate` is used: by gradient descent on the mean
    loss of the slower level's chunk, first-order (the gradient at the adapted weights) or
    second-order (by the initial state, through the updates), or by Reptile, a step towards where
    the level has ended.
    """
    starts: list[Fast] = list(state.start)
    rank, lost = wiring.levels[number].rank, state.lost
    strength: Rate = rate if wiring.transfer_rate is None else wiring.transfer_rate
    if wiring.transfer == "reptile":
        eps = 0.5 if wiring.transfer_rate is None else wiring.transfer_rate
        starts = [
            differences.add(differences.scale(s, 1.0 - eps), differences.scale(f, eps))
            for s, f in zip(state.start, state.fast, strict=True)
        ]
    elif wiring.transfer == "first_order":
        factor = _factor(state.outer_seen, wiring.mean)
        both = zip(state.start, state.outer, strict=True)
        starts = [_descend(s, g, strength, factor, 1.0) for s, g in both]
    elif wiring.transfer == "second_order":
        starts = _second_order(state, wiring, strength, graph)
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


def _second_order(state: LevelState, wiring: Wiring, rate: Rate, graph: bool) -> list[Fast]:
    """`Phi - rate d/dPhi (loss of the slower level's chunk)`, through every update since."""
    leaves = [start for start in state.start if isinstance(start, Tensor)]
    factor = _factor(state.outer_seen, wiring.mean)
    grads = torch.autograd.grad(
        state.outer_surprise.sum(), leaves, create_graph=graph, retain_graph=True
    )
    new = [_descend(s, g, rate, factor, 1.0) for s, g in zip(leaves, grads, strict=True)]
    return [s.detach().requires_grad_() if isinstance(s, Tensor) and not graph else s for s in new]


def check_move(wiring: Wiring) -> None:
    """Refuse levels that do not sit on the same weights: nothing can move between them."""
    owned = [[own.key for own in wiring.parts[number]] for number in wiring.moving]
    if any(parts != owned[0] for parts in owned):
        raise ValueError(
            "transfer='move' needs levels on the same weights: assign='share' (for other"
            " assignments use transfer='reptile' or 'first_order')"
        )


def move(
    levels: tuple[LevelState, ...], wiring: Wiring, position: int, share: float
) -> tuple[LevelState, ...]:
    """Consolidation: every level due at `position` takes `share` of the next faster's difference.

    Beside the nested variant (Eq. 72) this is the plain move: what the slower level is given is
    taken from the faster one. The sum, which is what the model reads with, stays as it is; but what
    was moved is then kept by the slower level's retention. With a small share the slower level is
    an average over many of the faster one's chunks, and with rate 0 it is nothing else: what lasts
    over several texts gathers there, while the faster level follows the text at hand and, if it
    retains less than 1, lets go of it again. That is what brings a text back quickly after another
    one (docs/adapt.md).
    """
    new = list(levels)
    for fast, slow in reversed(list(itertools.pairwise(wiring.moving))):
        level = wiring.levels[slow]
        if level.due(position):
            new[fast], new[slow] = _move(new[fast], new[slow], share, level.rank)
            if not level.active:  # it has no updates of its own
                new[slow] = new[slow]._replace(updates=new[slow].updates + 1)
    return tuple(new)


def _move(
    fast: LevelState, slow: LevelState, share: float, rank: int | None
) -> tuple[LevelState, LevelState]:
    given: list[Fast] = []
    kept: list[Fast] = []
    lost = slow.lost
    for mine, its in zip(slow.fast, fast.fast, strict=True):
        moved = differences.scale(its, share)
        if rank is not None and isinstance(moved, Tensor):
            raise ValueError("transfer='move': a full level cannot move into one with a rank")
        total, dropped = _shape(differences.add(mine, moved), rank)
        lost = lost + dropped
        given.append(total)
        kept.append(None if share == 1.0 else differences.scale(its, 1.0 - share))
    return fast._replace(fast=tuple(kept)), slow._replace(fast=tuple(given), lost=lost)


def _factor(seen: Tensor, mean: bool, counts: Sequence[float] | None = None) -> Rate:
    """The factor from the chunk's sum to what the rule sees: a number, or [B, 1, 1].

    counts: `seen` as numbers, where they are at hand.
    """
    if not mean:
        return 1.0
    counts = seen.tolist() if counts is None else counts
    if len(set(counts)) == 1:
        return 1.0 / max(counts[0], 1.0)
    return (1.0 / seen.clamp(min=1)).view(-1, 1, 1)


def _flat(factor: Rate) -> Rate:
    return factor.view(-1) if isinstance(factor, Tensor) else factor


def _join(old: Pairs | None, new: Pairs) -> Pairs:
    if old is None:
        return new
    return Pairs(torch.cat([old.x, new.x], 1), torch.cat([old.u, new.u], 1))


class Engine:
    """The levels of one model: what it reads with, and how a segment teaches them.

    Pure: level states go in and come out, the model is not changed. The model may be any module
    whose slots are weights of linear layers. With `natural` its channels say what a step costs
    (`nestling.continuum.natural`).
    """

    def __init__(
        self,
        model: nn.Module,
        levels: Sequence[MemoryLevel],
        slots: Sequence[Slot],
        *,
        reduce: str = "mean",
        transfer: str | None = None,
        transfer_rate: float | None = None,
        natural: bool = False,
    ) -> None:
        self.model, self.slots, self.natural = model, tuple(slots), natural
        self.sizes = shapes(model, self.slots)
        self.places = [differences.place_of(model, slot.name) for slot in self.slots]
        for slot in self.slots if natural else ():
            moments_of(model, slot.name)  # (raises where there are none)
        self.wiring = wire(
            levels, slots, reduce=reduce, transfer=transfer, transfer_rate=transfer_rate
        )

    @property
    def levels(self) -> tuple[MemoryLevel, ...]:
        """The levels, in the order they were given."""
        return self.wiring.levels

    @property
    def like(self) -> Tensor:
        """A tensor with the device and dtype of the slots."""
        return weight_of(self.model, self.slots[0].name)[0].detach()

    def init(self, batch: int) -> tuple[LevelState, ...]:
        """Every level before the first pair: nothing learned."""
        return tuple(self._empty(number, batch) for number in range(len(self.levels)))

    def bases(self) -> list[LiveSlot]:
        """Every slot without differences: looked up once for many segments."""
        return [place.slot() for place in self.places]

    def live(
        self,
        levels: tuple[LevelState, ...],
        lifts: Sequence[Rate] | None = None,
        bases: Sequence[LiveSlot] | None = None,
    ) -> list[LiveSlot]:
        """Every slot with the differences its levels have now, each times its level's lift."""
        found = [base._replace(parts=[]) for base in bases or self.bases()]
        for number, (parts, level) in enumerate(zip(self.wiring.parts, levels, strict=True)):
            lift = 1.0 if lifts is None else lifts[number]
            for own, fast in zip(parts, level.fast, strict=True):
                if isinstance(lift, Tensor):
                    fast = differences.scale(fast, lift)
                if fast is not None:
                    found[own.slot].parts.append((own.part, fast))
        return found

    def delta(self, levels: tuple[LevelState, ...], slot: str) -> Tensor | None:
        """All levels' difference on one slot as a matrix [B, Do, Di]; None if nothing learned."""
        names = [each.name for each in self.slots]
        if slot not in names:
            raise ValueError(f"no slot {slot!r}; the slots are {', '.join(names)}")
        number = names.index(slot)
        parts = self.live(levels)[number].parts
        if not parts:
            return None
        full = [(part, differences.dense(fast)) for part, fast in parts]
        zero = full[0][1].new_zeros(self.sizes[number])
        return differences.merge(zero, full).expand(levels[0].seen.shape[0], -1, -1)

    def surprises(
        self, reading: Reading, loss: Tensor, *, graph: bool, keep: bool
    ) -> list[tuple[Tensor, Tensor]]:
        """Every slot's inputs and `dL/dy`, by one backward pass to the slots' outputs."""
        grads = torch.autograd.grad(
            loss, self.outputs(reading), create_graph=graph, retain_graph=keep
        )
        return pair_up(reading, grads, graph=graph)

    def outputs(self, reading: Reading) -> list[Tensor]:
        """The output of every call of a slot's layer, in the order of the slots."""
        for slot, records in zip(self.slots, reading.records, strict=True):
            if not records:
                raise ValueError(
                    f"slot {slot.name!r}: the model did not read this weight through a linear layer"
                    " (compiled, wrapped or unused?), so it cannot learn"
                )
        return [record.y for records in reading.records for record in records]

    def learn(
        self,
        levels: tuple[LevelState, ...],
        segment: Segment | None,
        live: list[LiveSlot],
        position: int,
        rates: Sequence[Rate],
        *,
        graph: bool = False,
        outer: bool = False,
        measure: bool = True,
        owned: set[int] | None = None,
        needed: set[int] | None = None,
    ) -> tuple[tuple[LevelState, ...], list[LevelUpdate]]:
        """Every level after a segment that ends at `position` (Eq. 71-72).

        Levels that are due update, fastest first, all from the weights the segment was read with.
        segment: None when there was nothing to learn. needed: the levels that must collect it
        (None: all). live: the slots as the segment read them.
        rates: of every level. graph: keep the history of every update. outer: an outer loss will be
        differentiated through all of it, so no level's history ends here. owned: the levels whose
        differences nobody else holds, which may be overwritten; levels that step are added.
        """
        new = list(levels)
        with torch.set_grad_enabled(graph):
            if segment is not None:
                for number in self.wiring.order:
                    if self.wiring.feeder[number] is None and (needed is None or number in needed):
                        new[number] = collect(new[number], segment, self.wiring, number)
            return self._step(new, live, position, rates, graph, outer, measure, owned)

    def _step(
        self,
        new: list[LevelState],
        live: list[LiveSlot],
        position: int,
        rates: Sequence[Rate],
        graph: bool,
        outer: bool,
        measure: bool,
        mine: set[int] | None,
    ) -> tuple[tuple[LevelState, ...], list[LevelUpdate]]:
        wiring, batch = self.wiring, new[0].seen.shape[0]
        updates: list[LevelUpdate] = []

        def weight(own: Owned) -> Tensor:
            now = live[own.slot].whole(constant=not graph)
            exact = torch.promote_types(now.dtype, torch.float32)
            return cut(now.to(exact), own.part).expand(batch, -1, -1)

        def natural(own: Owned) -> Tensor:
            return natural_step(self.model, self.slots[own.slot].name)

        due = [number for number in wiring.order if wiring.levels[number].due(position)]
        for number in due:
            for other in wiring.order:
                if wiring.feeder[other] == number:
                    new[other] = feed(new[other], new[number], wiring.levels[other].rank)
            if wiring.slower(number) is not None and wiring.transfer in _DESCENDING:
                new[number] = remember(new[number], wiring.levels[number].rank)
            new[number], update = release(
                new[number],
                wiring,
                number,
                rate=rates[number],
                weight=weight,
                position=position,
                measure=measure,
                in_place=mine is not None and number in mine,
                natural=natural if self.natural else None,
            )
            if update is not None:
                updates.append(update)
                if mine is not None:
                    mine.add(number)
            if graph and not outer and wiring.slower(number) is None:
                new[number] = state_detach(new[number])
        for number in wiring.order:
            slower = wiring.slower(number)
            if slower is not None and slower in due:
                before = new[number].fast
                new[number] = transfer(new[number], wiring, number, rate=rates[slower], graph=outer)
                _note_return(updates, wiring.levels[number].name, before, new[number], measure)
        return tuple(new), updates

    def _empty(self, number: int, batch: int) -> LevelState:
        parts, like = self.wiring.parts[number], self.like
        state = empty(len(parts), batch, like)
        nested = self.wiring.transfer == "second_order" and number in self.wiring.order
        if not nested or self.wiring.slower(number) is None:
            return state
        zeros = [
            cut(like.new_zeros(batch, *self.sizes[own.slot], dtype=state.seen.dtype), own.part)
            for own in parts
        ]
        start = tuple(zero.clone().requires_grad_() for zero in zeros)
        return state._replace(fast=start, start=start)


def pair_up(
    reading: Reading, grads: Sequence[Tensor], *, graph: bool
) -> list[tuple[Tensor, Tensor]]:
    """Every slot's inputs [B, n, Di] and surprises [B, n, Do], from its outputs' gradients."""
    found, slots = iter(grads), []

    def like(d: Tensor, x: torch.Size) -> Tensor:
        return d if d.shape[:-1] == x[:-1] else d.reshape(*x[:-1], -1)

    for records in reading.records:
        xs = [record.x if graph else record.x.detach() for record in records]
        ds = [like(next(found), record.x.shape) for record in records]
        once = len(records) == 1  # more often when layers share a weight
        slots.append((xs[0], ds[0]) if once else (torch.cat(xs, 1), torch.cat(ds, 1)))
    return slots


def _note_return(
    updates: list[LevelUpdate],
    name: str,
    before: tuple[Fast, ...],
    after: LevelState,
    measure: bool,
) -> None:
    """A level that returned to its initial state: its record tells where it stands after that."""
    for place, update in enumerate(updates):
        if update.level == name and measure:
            back = _norm(
                differences.add(new, differences.scale(old, -1.0))
                for new, old in zip(after.fast, before, strict=True)
            )
            far = _norm(after.fast) + torch.zeros_like(after.seen)
            updates[place] = update._replace(step=update.step + back, distance=far)
