"""Knowledge transfer by initialisation: what a slow level learns is where a fast one starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nestling.paper.nested.problem import Loss, Problem, View
from nestling.paper.nested.solve import Due, descend, leaf, proximal_step
from nestling.paper.nested.transfer import (
    Parameters,
    Transfer,
    backpropagation,
    direct,
    initialisation,
)
from nestling.rules import Gates, Rule, identity


class Task(NamedTuple):
    """A task: data the fast level learns from, and data the slow level judges it by."""

    support: Any
    query: Any


@dataclass(frozen=True, kw_only=True)
class MetaRule:
    """How the start learns from where a task ended: the read of the fast level, and a loss."""

    name: str
    read: Callable[[str], Transfer]
    loss: Callable[[Loss, Parameters, Parameters, Any], Tensor]


def query_loss(loss: Loss, start: Parameters, end: Parameters, query: Any) -> Tensor:
    """`l(theta, T; Phi)` of Eq. 4: how well the adapted parameters do on what they did not see."""
    return loss(end, query)


def distance_to_end(loss: Loss, start: Parameters, end: Parameters, query: Any) -> Tensor:
    """`|Phi - theta|^2 / 2`: be nearer to where the task ended."""
    return torch.stack([0.5 * (start[n] - end[n]).square().sum() for n in start]).sum()


FULL = MetaRule(name="full", read=lambda name: backpropagation(name, order=2), loss=query_loss)
"""MAML: the gradient of Eq. 28 flows through the inner steps themselves."""

FIRST_ORDER = MetaRule(
    name="first order", read=lambda name: backpropagation(name, order=1), loss=query_loss
)
"""First-order MAML: as if the inner steps had moved the start by a constant (Eq. 28)."""

REPTILE = MetaRule(name="Reptile", read=direct, loss=distance_to_end)
"""Reptile: step towards where the task ended; needs no gradient of the query (Eq. 28)."""


def meta_learning(
    parameters: Parameters,
    loss: Loss,
    *,
    rule: MetaRule,
    steps: int,
    inner_rate: float,
    rate: float,
    tasks: int = 1,
    outer_rule: Rule = identity,
) -> tuple[Problem, Problem]:
    """`Phi* = argmin_Phi E_T[l(theta, T; Phi)]` with `theta` started at Phi (Eq. 4, Eq. 28).

    Each item is a `Task`. The fast problem starts anew at Phi and takes `steps` steps on the
    support; the slow one changes after every `tasks` tasks.
    """
    fast = Problem(
        name="fast",
        parameters=parameters,
        context=lambda view: view.item.support,
        objective=loss,
        solver=descend(steps=steps),
        gates=Gates(rate=inner_rate),
        start=initialisation("start", every=1),
        context_text="a task's support",
        objective_text="loss of the task",
    )

    def judged(view: View) -> tuple[Parameters, Any]:
        return view["fast"], view.item.query

    def objective(own: Parameters, judged: tuple[Parameters, Any]) -> Tensor:
        return rule.loss(loss, own, *judged) / tasks

    slow = Problem(
        name="start",
        parameters=parameters,
        context=judged,
        objective=objective,
        solver=proximal_step(outer_rule),
        gates=Gates(rate=rate),
        chunk=tasks,
        reads=(rule.read("fast"),),
        context_text="tasks",
        objective_text=f"loss after adaptation ({rule.name})",
    )
    return fast, slow


def solve_task(
    parameters: Parameters, loss: Loss, support: Any, *, steps: int, rate: float
) -> Parameters:
    """Let the fast level learn one task: `steps` steps from these parameters."""
    solver, own = descend(steps=steps), leaf(parameters)
    due = Due(lambda p: loss(p, support), (support,), own, solver.init(own), Gates(rate=rate), 0)
    return {name: value.detach() for name, value in solver.solve(due).parameters.items()}
