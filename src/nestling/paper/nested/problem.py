"""One box of a nested system: an objective, a context flow and parameters (Def. 3-4, 6-7)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from nestling.levels import Level, due, multiple
from nestling.paper.nested.solve import Solver, proximal_step
from nestling.paper.nested.transfer import Parameters, Start, Transfer
from nestling.rules import Gates

ONE = Gates()
"""Rate 1, retain 1: the gates of linear attention."""

Loss = Callable[[Parameters, Any], Tensor]
"""A scalar loss of the problem's parameters on one context."""


class View(Mapping[str, Parameters]):
    """A problem's view of one item: the item, and the state of the problems it reads.

    Only declared reads are visible, so the picture of a system is the truth about it.
    """

    def __init__(
        self,
        problem: Problem,
        item: Any,
        position: int,
        before: Mapping[str, Parameters],
        now: Mapping[str, Parameters],
    ) -> None:
        self.item, self.position = item, position
        self._problem, self._before, self._now = problem, before, now
        self._reads = {read.source: read for read in problem.reads}

    @property
    def own(self) -> Parameters:
        """The problem's own parameters before this item."""
        return self._before[self._problem.name]

    @property
    def due(self) -> bool:
        """True when the problem updates at this item."""
        return due(self.position, self._problem.chunk)

    @property
    def step(self) -> int:
        """How many updates the problem has made in this context, this item's included."""
        problem = self._problem
        every = problem.start.every if problem.start else math.inf
        place = self.position if every == math.inf else (self.position - 1) % int(every) + 1
        return 0 if problem.chunk == math.inf else place // int(problem.chunk)

    def __getitem__(self, source: str) -> Parameters:
        start = self._problem.start
        if start and source == start.source and source not in self._reads:
            return self._before[source]
        if source not in self._reads:
            raise ValueError(
                f"problem {self._problem.name!r} looked at {source!r} without declaring it;"
                f" its reads are {sorted(self._reads)}"
            )
        read = self._reads[source]
        return read.see((self._before if read.previous else self._now)[source])

    def __iter__(self) -> Iterator[str]:
        return iter(self._reads)

    def __len__(self) -> int:
        return len(self._reads)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One optimization problem `(objective, context, parameters)` of a nested system.

    `context` turns what the problem sees into the data it compresses: for an associative memory,
    a pair of keys and values; None where there is nothing to learn. Every `chunk` items the solver
    updates the parameters on the contexts since the last update. `gates` are fixed or computed from
    the view. A problem that reads itself (to make its own targets) takes its context as given: its
    gradient does not flow through what it read. The two texts say in words what flows in and what
    is minimised, for tables and pictures.
    """

    name: str
    parameters: Parameters
    context: Callable[[View], Any]
    objective: Loss | None = None
    solver: Solver = field(default_factory=proximal_step)
    gates: Gates | Callable[[View], Gates] = ONE
    chunk: int | float = 1
    reads: tuple[Transfer, ...] = ()
    start: Start | None = None
    objective_text: str = ""
    context_text: str = ""

    def __post_init__(self) -> None:
        Level(name=self.name, chunk=self.chunk)  # checks the chunk
        sources = [read.source for read in self.reads]
        if len(set(sources)) < len(sources):
            raise ValueError(f"problem {self.name!r} reads a source twice: {sources}")
        every = self.start.every if self.start else math.inf
        if math.inf not in (self.chunk, every) and not multiple(every, self.chunk):
            raise ValueError(
                f"problem {self.name!r}: its context of {every} items must be a whole number of"
                f" chunks of {self.chunk}"
            )

    @property
    def period(self) -> int | float:
        """Items between two changes of state: the chunk, or how often its weights are generated."""
        generated = self.start is not None and self.start.kind.startswith("generation")
        return min(self.chunk, self.start.every) if generated and self.start else self.chunk

    def gates_at(self, view: View) -> Gates:
        """The gates of this update, with the clock set to the problem's own count of updates."""
        gates = self.gates(view) if not isinstance(self.gates, Gates) else self.gates
        return gates._replace(step=view.step)
