"""The paper executed: nested systems that run (Eq. 19-28, 98-99) and the index of equations."""

from nestling.paper.problem import Problem, View
from nestling.paper.solve import (
    Solver,
    descend,
    minimise,
    proximal_step,
    remember,
    solution,
)
from nestling.paper.system import NestedSystem, SystemState, Tick, Update
from nestling.paper.transfer import (
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
    "Update",
    "View",
    "backpropagation",
    "context_generation",
    "descend",
    "direct",
    "generation",
    "initialisation",
    "minimise",
    "proximal_step",
    "remember",
    "reset",
    "solution",
]
