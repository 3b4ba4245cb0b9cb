"""Nested systems: run them (Eq. 19-28, 98-99), transfer knowledge between levels, see them."""

from nestling.nested.describe import describe
from nestling.nested.description import Component, Description
from nestling.nested.problem import Problem, View
from nestling.nested.solve import (
    Solver,
    descend,
    minimise,
    proximal_step,
    remember,
    solution,
)
from nestling.nested.system import NestedSystem, SystemState, Tick, Update
from nestling.nested.timeline import Timeline
from nestling.nested.transfer import (
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
    "Component",
    "Description",
    "NestedSystem",
    "Parameters",
    "Problem",
    "Solver",
    "Start",
    "SystemState",
    "Tick",
    "Timeline",
    "Transfer",
    "Update",
    "View",
    "backpropagation",
    "context_generation",
    "descend",
    "describe",
    "direct",
    "generation",
    "initialisation",
    "minimise",
    "proximal_step",
    "remember",
    "reset",
    "solution",
]
