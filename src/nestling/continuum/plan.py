"""What is fixed before the first token: who owns what, who feeds whom, and what each rule needs."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nestling.continuum.core import MemoryLevel, Slot
from nestling.continuum.slots import Owned, owned
from nestling.levels import boundaries
from nestling.rules.core import Gates, Rule, Write
from nestling.tree import tree_leaves

__all__ = ["TRANSFERS", "Plan", "is_plain", "make_plan", "needs_pairs"]

TRANSFERS = ("frozen", "first_order", "reptile", "second_order")
"""How an initial state is learned (deviation 14)."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The schedule and the wiring of a continuum."""

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

    def next_boundary(self, start: int) -> int | None:
        """The first position after `start` at which any level is due."""
        ends: list[int] = []
        for number in self.order:
            chunk = int(self.levels[number].chunk)
            ends += boundaries(start, start + chunk, chunk)[:1]
        return min(ends, default=None)


def make_plan(
    levels: Sequence[MemoryLevel],
    slots: Sequence[Slot],
    *,
    reduce: str,
    transfer: str | None,
    transfer_rate: float | None,
) -> Plan:
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
    plain = tuple(is_plain(level.rule) for level in levels)
    pairs = tuple(not simple and needs_pairs(lv.rule) for simple, lv in zip(plain, levels))
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
    return Plan(
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


def is_plain(rule: Rule) -> bool:
    """Whether a rule is gradient descent itself: no state, and the gradient comes out as it is."""
    weight, grad = torch.eye(2), torch.tensor([[0.3, -2.0], [5.0, 0.01]])
    state = rule.init(weight)
    if any(True for _ in tree_leaves(state)):
        return False
    try:
        write, _ = rule.step(Write(grad), state, weight, Gates(rate=0.5, step=3))
    except ValueError:
        return False
    return torch.equal(write.grad, grad)


def needs_pairs(rule: Rule) -> bool:
    """Whether a rule refuses a write without the pairs it came from (DGD and its family)."""
    weight = torch.eye(2)
    try:
        rule.step(Write(torch.ones(2, 2)), rule.init(weight), weight, Gates(rate=0.5))
    except ValueError:
        return True
    return False


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
        and levels[number].chunk % levels[n].chunk == 0
        and [own.key for own in parts[n]] == mine
        and (levels[n].rank is None) == (levels[number].rank is None)
        and pairs[n] == pairs[number]
    ]
    return max(fits, key=lambda n: levels[n].chunk, default=None)


def _check_nested(levels: list[MemoryLevel], transfer: str) -> None:
    for fast, slow in itertools.pairwise(levels):
        if slow.chunk % fast.chunk or slow.chunk == fast.chunk:
            raise ValueError(
                f"transfer={transfer!r}: level {fast.name!r} returns to its initial state when"
                f" level {slow.name!r} is due, so that chunk must be a multiple of"
                f" {fast.chunk}, and larger; got {slow.chunk}"
            )
        if transfer == "second_order" and (fast.rank is not None or slow.rank is not None):
            raise ValueError("transfer='second_order' needs rank=None")
        if math.inf in (fast.chunk, slow.chunk):
            raise ValueError(f"transfer={transfer!r}: every level needs a finite chunk")
