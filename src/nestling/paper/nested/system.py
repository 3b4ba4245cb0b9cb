"""The engine: any set of problems run as one nested system, fastest first (Eq. 19-20, 98-99).

At each item every problem computes its context from what it sees; the problems that are due are
solved, level by level. Faster levels go first because slower ones may need their state; problems of
one level do not need each other, so all of them see the state from before the level changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nestling.description import Component
from nestling.levels import LevelUpdate
from nestling.paper.nested.order import orders_of, sort_levels
from nestling.paper.nested.problem import Problem, View
from nestling.paper.nested.solve import Due, leaf
from nestling.paper.nested.transfer import Parameters
from nestling.rules import State
from nestling.tree import tree_map


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


def detached(state: State) -> State:
    """A solver's state, cut off from its history."""
    return tree_map(lambda leaf: leaf.detach(), state, plain=True)


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
                        *solved.met,
                        step=distance(solved.parameters, before[name]),
                        distance=distance(solved.parameters, problem.parameters),
                    )
                )
                kept = asked.order > 0
                fresh[name] = solved.parameters if kept else leaf(solved.parameters)
                solvers[name] = solved.state if kept else detached(solved.state)
                waiting[name] = ()
            now.update(fresh)
        for faster in {cut for update in updates for cut in self._cuts[update.level]}:
            now[faster], solvers[faster] = leaf(now[faster]), detached(solvers[faster])
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
