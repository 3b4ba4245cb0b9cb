"""The engine: any set of problems run as one nested system, fastest first (Eq. 19-20, 98-99).

At each item every problem computes its context from what it sees; the problems that are due are
solved, level by level. Faster levels go first because slower ones may need their state; problems of
one level do not need each other, so all of them see the state from before the level changed.

`sort_levels` says which problem is faster (Definition 2), `orders_of` where gradients must flow
through updates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nestling.description import Component
from nestling.levels import LevelUpdate, multiple, rank
from nestling.paper.nested.problem import Problem, View
from nestling.paper.nested.solve import Due, leaf
from nestling.paper.nested.transfer import Parameters
from nestling.rules import State
from nestling.tree import state_detach


class Tick(NamedTuple):
    """One item's events: the context of each problem, and the updates, named by problem."""

    contexts: Mapping[str, Any]
    updates: tuple[LevelUpdate, ...]


class SystemState(NamedTuple):
    """Everything that changes: parameters, the solvers' state, waiting contexts, the position."""

    parameters: Mapping[str, Parameters]
    solvers: Mapping[str, State]
    waiting: Mapping[str, tuple[Any, ...]]
    position: int


def distance(after: Parameters, before: Parameters) -> float:
    """How far the parameters moved; a non-parametric box counts what it took in."""
    moved = torch.zeros(())
    for name, value in after.items():
        old = before[name].detach()
        change = value.detach() - old if value.shape == old.shape else value.detach()
        moved = moved + change.double().square().sum()
    return float(moved.sqrt())


class NestedSystem:
    """A nested system of associative memories: problems, ordered by frequency, run as one.

    `levels[0]` is the slowest (level 1); the last is the fastest. The system holds no state: `init`
    makes it and `step` returns it.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: dict[str, Problem] = {}
        for problem in problems:
            if problem.name in self.problems:
                raise ValueError(f"two problems are called {problem.name!r}")
            self.problems[problem.name] = problem
        self.levels = sort_levels(self.problems)
        self._orders, self._cuts = orders_of(self.problems, self.levels)

    def init(self) -> SystemState:
        """The state before the first item."""
        return SystemState(
            parameters={name: leaf(p.parameters) for name, p in self.problems.items()},
            solvers={name: p.solver.init(p.parameters) for name, p in self.problems.items()},
            waiting=dict.fromkeys(self.problems, ()),
            position=0,
        )

    def step(self, state: SystemState, item: Any) -> tuple[SystemState, Tick]:
        """Take in one item: every level that is due updates once (Eq. 19-20, 98-99)."""
        position = state.position + 1
        solvers, waiting = dict(state.solvers), dict(state.waiting)
        before = self._begin(state.parameters, solvers, item, position)
        now, contexts, updates = dict(before), {}, []
        for number in range(len(self.levels), 0, -1):
            fresh = {}
            for problem in self.levels[number - 1]:
                name, view = problem.name, View(problem, item, position, before, now)
                contexts[name] = problem.context(view)
                waiting[name] = self._waiting(problem, waiting[name], contexts[name])
                if not (view.due and waiting[name]):
                    continue
                asked = self._due(problem, view, before[name], solvers[name], waiting[name])
                solved = problem.solver.solve(asked)
                updates.append(
                    LevelUpdate(
                        position,
                        name,
                        *solved.before,
                        step=distance(solved.parameters, before[name]),
                        distance=distance(solved.parameters, problem.parameters),
                    )
                )
                kept = asked.order > 0
                fresh[name] = solved.parameters if kept else leaf(solved.parameters)
                solvers[name] = solved.state if kept else state_detach(solved.state)
                waiting[name] = ()
            now.update(fresh)
        for faster in {cut for update in updates for cut in self._cuts[update.level]}:
            now[faster], solvers[faster] = leaf(now[faster]), state_detach(solvers[faster])
        return SystemState(now, solvers, waiting, position), Tick(contexts, tuple(updates))

    def run(
        self, items: Iterable[Any], state: SystemState | None = None
    ) -> tuple[SystemState, list[Tick]]:
        """Take in a stream of items; any split of the stream into runs gives the same result."""
        state, ticks = self.init() if state is None else state, []
        for item in items:
            state, tick = self.step(state, item)
            ticks.append(tick)
        return state, ticks

    def _begin(
        self,
        parameters: Mapping[str, Parameters],
        solvers: dict[str, State],
        item: Any,
        position: int,
    ) -> dict[str, Parameters]:
        """Make anew the parameters of every problem whose context begins, the slowest first."""
        begun = dict(parameters)
        for problem in (p for level in self.levels for p in level):
            if problem.start and problem.start.due(position):
                view = View(problem, item, position, begun, begun)
                made = problem.start.make(view)
                ready = all(value.requires_grad for value in made.values())
                begun[problem.name] = dict(made) if ready else leaf(made)
                solvers[problem.name] = problem.solver.init(begun[problem.name])
        return begun

    @staticmethod
    def _waiting(problem: Problem, old: tuple[Any, ...], context: Any) -> tuple[Any, ...]:
        nothing = context is None or problem.chunk == math.inf
        return old if nothing else (*old, context)

    def _due(
        self,
        problem: Problem,
        view: View,
        parameters: Parameters,
        state: State,
        contexts: tuple[Any, ...],
    ) -> Due:
        def loss(candidate: Parameters) -> Tensor:
            if problem.objective is None:
                raise ValueError(f"problem {problem.name!r} needs an objective to take steps")
            total = problem.objective(candidate, contexts[0])
            for context in contexts[1:]:
                total = total + problem.objective(candidate, context)
            return total

        if any(read.source == problem.name for read in problem.reads):  # its context is given
            parameters = {name: value.view_as(value) for name, value in parameters.items()}
        gates = problem.gates_at(view)
        return Due(loss, contexts, parameters, state, gates, self._orders[problem.name])

    def describe_levels(self, name: str = "") -> list[Component]:
        """Every problem as a component, for `nestling.describe`."""
        return [_component(problem, self) for level in self.levels for problem in level]


def _component(problem: Problem, system: NestedSystem) -> Component:
    reads = [f"{read.kind} from {read.source}" for read in problem.reads]
    if problem.start:
        source = f" from {problem.start.source}" if problem.start.source else ""
        reads.append(problem.start.kind + source)
    size = sum(value.numel() for value in problem.parameters.values())
    number = {p.name: n for n, level in enumerate(system.levels) for p in level}
    needs = tuple(
        read.source
        for read in problem.reads
        if not read.previous and number[read.source] > number[problem.name]
    )
    made = [
        p.name
        for p in system.problems.values()
        if p.start and p.start.source == problem.name and p.period == problem.period
    ]
    parametric = problem.solver.name != "non-parametric"
    return Component(
        name=problem.name,
        kind="problem" if parametric else "non-parametric",
        clock="item" if problem.period != math.inf else "never",
        chunk=problem.period,
        parameters=size if parametric else 0,
        state=size,
        objective=problem.objective_text or getattr(problem.objective, "__name__", ""),
        context=problem.context_text,
        transfer="; ".join(reads),
        needs=tuple(dict.fromkeys((*needs, *made))),
    )


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
