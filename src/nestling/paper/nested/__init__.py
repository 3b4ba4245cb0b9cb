"""Nested systems that run: problems, ordered by how often they change (Eq. 19-28, 98-99)."""

from nestling.paper.nested.problem import Problem, View
from nestling.paper.nested.solve import (
    Solver,
    descend,
    keep_context,
    minimise,
    proximal_step,
    solution,
)
from nestling.paper.nested.system import NestedSystem, SystemState, Tick
from nestling.paper.nested.transfer import (
    Parameters,
    Start,
    Transfer,
    backpropagation,
    context_generation,
    direct,
    generation,
    initialisation,
    reset,
)

__all__ = [
    "NestedSystem",
    "Parameters",
    "Problem",
    "Solver",
    "Start",
    "SystemState",
    "Tick",
    "Transfer",
    "View",
    "backpropagation",
    "context_generation",
    "descend",
    "direct",
    "generation",
    "initialisation",
    "keep_context",
    "minimise",
    "proximal_step",
    "reset",
    "solution",
]
