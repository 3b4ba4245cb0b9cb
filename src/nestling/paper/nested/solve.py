"""How a problem is solved when it is due: the proximal step of Eq. 19-20, and Eq. 98-99's argmin.

A solver sees the loss of the whole chunk as a function of the parameters and returns new ones. The
paper prints Eq. 19-20 with a minus before the gradient, which would ascend; as in Eq. 9, ours is

    theta <- argmin_Phi <Phi, grad L(theta)> + |Phi - theta|^2 / (2 eta)  =  theta - eta grad L.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nestling.checks import require
from nestling.paper.nested.transfer import Parameters
from nestling.rules import Gates, Rule, State, Write, apply, identity


class Due(NamedTuple):
    """A problem that is due: its chunk's loss and contexts, its parameters, state and gates.

    `order` says how far a slower problem's gradient must reach through this update: 0, 1 or 2.
    """

    loss: Callable[[Parameters], Tensor]
    contexts: Sequence[Any]
    parameters: Parameters
    state: State
    gates: Gates
    order: int


class Measured(NamedTuple):
    """The chunk's loss before the update, and the norm of its gradient."""

    loss: float
    grad_norm: float


NOTHING = Measured(float("nan"), 0.0)
"""A box that only keeps its context has no loss."""


class Solved(NamedTuple):
    """New parameters and state, and the loss and gradient before."""

    parameters: Parameters
    state: State
    before: Measured


class Solver(NamedTuple):
    """A pair of pure functions, and what to call them in a table."""

    init: Callable[[Parameters], State]
    solve: Callable[[Due], Solved]
    name: str


def leaf(parameters: Parameters) -> Parameters:
    """The same values, cut off from their history, ready to be differentiated."""
    return {name: value.detach().requires_grad_() for name, value in parameters.items()}


def gradient(due: Due, parameters: Parameters) -> tuple[Parameters, Measured]:
    """The gradient of the chunk's loss, differentiable itself when the order asks for it."""
    loss = due.loss(parameters)
    if not loss.requires_grad:  # nothing in this context depends on the parameters
        zeros = {name: torch.zeros_like(value) for name, value in parameters.items()}
        return zeros, Measured(float(loss / len(due.contexts)), 0.0)
    grads = torch.autograd.grad(
        loss,
        list(parameters.values()),
        create_graph=due.order == 2,
        retain_graph=True,
        materialize_grads=True,
    )
    norm = torch.stack([grad.detach().square().sum() for grad in grads]).sum().sqrt()
    before = Measured(float(loss.detach() / len(due.contexts)), float(norm))
    return dict(zip(parameters, grads if due.order == 2 else [g.detach() for g in grads])), before


def descend(rule: Rule = identity, *, steps: int = 1) -> Solver:
    """Solve by `steps` steps along the rule's direction (Eq. 98-99 with an inner loop)."""
    require(steps >= 1, "descend: steps", steps, "at least 1")

    def init(parameters: Parameters) -> State:
        return {name: rule.init(value.detach()) for name, value in parameters.items()}

    def solve(due: Due) -> Solved:
        parameters, state, first = due.parameters, due.state, NOTHING
        for step in range(steps):
            grads, before = gradient(due, parameters)
            first = first if step else before
            gates = due.gates._replace(step=(due.gates.step - 1) * steps + step + 1)
            moved = {
                name: apply(rule, value, Write(grads[name]), state[name], gates)
                for name, value in parameters.items()
            }
            parameters = {name: weight for name, (weight, _) in moved.items()}
            state = {name: after for name, (_, after) in moved.items()}
        return Solved(parameters, state, first)

    return Solver(init, solve, "proximal step" if steps == 1 else f"{steps} inner steps")


def proximal_step(rule: Rule = identity) -> Solver:
    """One proximal step on the chunk's objective, its direction by the rule (Eq. 19, Eq. 20).

    With the rule `identity` it is `argmin <Phi, grad L(theta)> + |Phi - theta|^2 / (2 eta)`.
    """
    return descend(rule)


def solution(closed: Callable[[Parameters, Sequence[Any], Gates], Parameters]) -> Solver:
    """Solve Eq. 98-99 (or Eq. 6) at once, by a closed form of parameters, contexts and gates."""

    def solve(due: Due) -> Solved:
        _, before = gradient(due, due.parameters)
        return Solved(closed(due.parameters, due.contexts, due.gates), due.state, before)

    return Solver(lambda parameters: (), solve, "closed form")


def minimise(*, steps: int = 100, tolerance: float = 1e-12) -> Solver:
    """Minimise the objective itself, near the old parameters, without linearising (Eq. 98-99).

    `argmin_Phi L(Phi; context) + |Phi - theta|^2 / (2 eta)` by L-BFGS; with `rate=math.inf` there
    is no proximity and this is Definition 1's associative memory, `argmin_M L(M(K); V)` (Eq. 6).
    The search is not differentiable, so a slower problem can only read the result directly.
    """

    def solve(due: Due) -> Solved:
        if due.order:
            raise ValueError(
                "minimise is not differentiable: read this problem with direct(...), or solve it"
                " with descend(steps=...)"
            )
        start = {name: value.detach() for name, value in due.parameters.items()}
        found = {name: value.clone().requires_grad_() for name, value in start.items()}
        search = torch.optim.LBFGS(
            list(found.values()),
            max_iter=steps,
            tolerance_grad=tolerance,
            tolerance_change=tolerance**2,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            search.zero_grad()
            near = sum(((found[n] - start[n]) ** 2 / (2 * due.gates.rate)).sum() for n in found)
            total = due.loss(found) + near
            total.backward(inputs=list(found.values()), retain_graph=True)
            return total

        _, before = gradient(due, due.parameters)
        search.step(closure)
        return Solved({name: value.detach() for name, value in found.items()}, due.state, before)

    return Solver(lambda parameters: (), solve, "argmin")


def keep_context(*, window: int | None = None) -> Solver:
    """A box without trained parameters: its state *is* its context, the last `window` items.

    Softmax attention is such a box; reading it is the non-parametric transfer (Eq. 27). Contexts
    are named tensors that are appended along the next-to-last dimension.
    """

    def solve(due: Due) -> Solved:
        kept = {}
        for name, old in due.parameters.items():
            new = torch.cat([old, *(context[name] for context in due.contexts)], dim=-2)
            kept[name] = new if window is None else new[..., -window:, :]
        return Solved(kept, due.state, NOTHING)

    return Solver(lambda parameters: (), solve, "non-parametric")
