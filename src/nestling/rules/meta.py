"""Meta-learning (Eq. 4): the slow level learns where the fast level should start."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

from nestling.rules.core import Gates, Rule, State, Write, apply, identity

__all__ = ["adapt", "meta_learn", "meta_step"]

Task = TypeVar("Task")
Loss = Callable[[Tensor, Task], Tensor]


def adapt(
    start: Tensor,
    task: Task,
    loss: Loss[Task],
    *,
    rate: float,
    steps: int = 1,
    rule: Rule = identity,
) -> Tensor:
    """The fast level: theta after a few steps on one task from the start Phi, differentiable."""
    weight, state = start, rule.init(start)
    for step in range(1, steps + 1):
        (grad,) = torch.autograd.grad(loss(weight, task), weight, create_graph=True)
        weight, state = apply(rule, weight, Write(grad), state, Gates(rate, 1.0, step))
    return weight


def meta_step(
    start: Tensor,
    tasks: Iterable[Task],
    adapted_loss: Loss[Task],
    rule: Rule,
    state: State,
    gates: Gates,
) -> tuple[Tensor, State]:
    """One step of `Phi* = argmin_Phi E_T[l(theta, T; Phi)]` on a batch of tasks (Eq. 4).

    `adapted_loss(Phi, T)` adapts to a task and returns the loss that is left.
    """
    start = start.detach().requires_grad_()
    losses = torch.stack([adapted_loss(start, task) for task in tasks])
    (grad,) = torch.autograd.grad(losses.mean(), start)
    return apply(rule, start.detach(), Write(grad), state, gates)


def meta_learn(
    start: Tensor,
    batches: Iterable[Iterable[Task]],
    adapted_loss: Loss[Task],
    *,
    rate: float,
    rule: Rule = identity,
) -> Tensor:
    """`Phi* = argmin_Phi E_T[l(theta, T; Phi)]`, a step per batch of tasks (Eq. 4)."""
    state = rule.init(start)
    for step, tasks in enumerate(batches, start=1):
        start, state = meta_step(start, tasks, adapted_loss, rule, state, Gates(rate, 1.0, step))
    return start
