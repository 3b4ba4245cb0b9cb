"""Definition 2: which problem is faster, and where gradients must flow through updates."""

from __future__ import annotations

import math
from collections.abc import Mapping

from nestling.levels import multiple, rank
from nestling.paper.nested.problem import Problem


def sort_levels(problems: Mapping[str, Problem]) -> tuple[tuple[Problem, ...], ...]:
    """Sort problems into levels, the slowest first (Definition 2).

    A is faster than B when it updates more often, or equally often and B needs A's state at the
    same item. Equal and independent problems share a level, such as Adam's two moments.
    """
    for problem in problems.values():
        for source in _sources(problem):
            if source not in problems:
                raise ValueError(
                    f"problem {problem.name!r} reads {source!r}, which is not in the system;"
                    f" there are {sorted(problems)}"
                )
    needs = {
        name: [
            read.source
            for read in problem.reads
            if not read.previous and problems[read.source].period == problem.period
        ]
        for name, problem in problems.items()
    }
    for name, problem in problems.items():  # who is made from another at the start is faster
        start = problem.start
        if start and start.source and problems[start.source].period == problem.period:
            needs[start.source].append(name)
    ranks = rank(needs)
    keys = sorted(
        {(problem.period, ranks[name]) for name, problem in problems.items()}, reverse=True
    )
    return tuple(
        tuple(p for n, p in problems.items() if (p.period, ranks[n]) == key) for key in keys
    )


def orders_of(
    problems: Mapping[str, Problem], levels: tuple[tuple[Problem, ...], ...]
) -> tuple[dict[str, int], dict[str, list[str]]]:
    """For each problem: how differentiable its updates must be, and whose history its update ends.

    A slower problem that reads a faster one with its gradient flow asks for differentiable updates
    of the faster one. When the slowest problem of such a flow has changed, everything faster that
    was computed from it is cut off from its history.
    """
    number = {p.name: n for n, level in enumerate(levels) for p in level}
    orders = dict.fromkeys(problems, 0)
    follows: dict[str, set[str]] = {name: set() for name in problems}
    for name, problem in problems.items():
        for read in problem.reads:
            if read.order and number[read.source] > number[name] and problem.chunk != math.inf:
                orders[read.source] = max(orders[read.source], read.order)
                _check_multiple(problem, problems[read.source])
            if read.order and number[read.source] < number[name]:
                follows[read.source].add(name)
        if problem.start and problem.start.source:
            follows[problem.start.source].add(name)
    _spread(orders, problems, number)
    closure = {name: _reachable(name, follows) for name in problems}
    cuts = {name: sorted(closure[name]) if not orders[name] else [] for name in problems}
    return orders, cuts


def _spread(
    orders: dict[str, int], problems: Mapping[str, Problem], number: Mapping[str, int]
) -> None:
    """A differentiable update asks the same of what it was computed from, if that is as fast."""
    waiting = [name for name, order in orders.items() if order]
    while waiting:
        name = waiting.pop()
        for read in problems[name].reads:
            asked = min(read.order, orders[name])
            if number[read.source] >= number[name] and asked > orders[read.source]:
                orders[read.source] = asked
                waiting.append(read.source)


def _sources(problem: Problem) -> list[str]:
    start = [problem.start.source] if problem.start and problem.start.source else []
    return [read.source for read in problem.reads] + start


def _reachable(name: str, edges: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    frontier = set(edges[name])
    while frontier:
        seen |= frontier
        frontier = set().union(*(edges[n] for n in frontier)) - seen
    return seen - {name}


def _check_multiple(slow: Problem, fast: Problem) -> None:
    if math.inf not in (slow.chunk, fast.chunk) and not multiple(slow.chunk, fast.chunk):
        raise ValueError(
            f"{slow.name!r} (chunk {slow.chunk}) takes its gradient through updates of"
            f" {fast.name!r} (chunk {fast.chunk}): the slower chunk must be a"
            " multiple of the faster"
        )
