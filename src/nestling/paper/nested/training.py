"""Training as nested systems: SGD, momentum and Adam, each as the levels it is made of.

A model trained by gradient descent is one level; every momentum adds a faster one, a memory whose
context is the gradients that the model generates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nestling.activations import Activation
from nestling.objectives import Matrix, dot
from nestling.paper.exhibits.gd import forward_layers, surprises
from nestling.paper.nested.problem import Problem, View
from nestling.paper.nested.transfer import Parameters, context_generation, direct
from nestling.rules import Gates
from nestling.rules.adam import Moments, adam_direction


class KeyValue(NamedTuple):
    """The context of an associative memory: keys [..., n, Di] and values [..., n, Do]."""

    keys: Tensor
    values: Tensor


def inner(one: Parameters, other: Parameters) -> Tensor:
    """`<one, other>`, summed over all named tensors."""
    return torch.stack([(one[name] * other[name]).sum() for name in one]).sum()


def sgd_problem(
    name: str,
    parameters: Parameters,
    loss: Callable[[Parameters, Any], Tensor],
    *,
    rate: float,
    **problem: Any,
) -> Problem:
    """Parameters trained on each item by gradient descent: a system of one level (Eq. 19)."""
    given: dict[str, Any] = {
        "context": lambda view: view.item,
        "context_text": "data",
        "objective_text": "loss",
    }
    return Problem(
        name=name, parameters=parameters, objective=loss, gates=Gates(rate=rate), **given | problem
    )


def layer_problems(
    weights: Mapping[str, Tensor],
    activation: Activation,
    error: Callable[[Tensor, Tensor], Tensor],
    *,
    rate: float,
) -> tuple[Problem, ...]:
    """An MLP trained by SGD, layer by layer: one level of memories, input -> surprise (Eq. 20).

    Items are `(x, target)`; `error(y, target)` is the loss's gradient by the output. Each layer
    sees only its own pairs (Eq. 29): it is to answer its input with the opposite of its surprise.
    """

    def pairs(place: int) -> Callable[[View], KeyValue]:
        def context(view: View) -> KeyValue:
            stack = [view[name]["weight"] for name in weights]
            x, target = view.item
            y, _, _ = forward_layers(stack, activation, x)
            signal = surprises(stack, activation, x, error(y, target))[place]
            return KeyValue(signal.input, -signal.error)

        return context

    return tuple(
        Problem(
            name=layer,
            parameters={"weight": weight},
            context=pairs(place),
            objective=lambda own, pair: dot.loss(Matrix(own["weight"]), *pair).sum(),
            gates=Gates(rate=rate),
            reads=tuple(direct(name, previous=True) for name in weights),
            context_text="its inputs and their surprise",
            objective_text="-<W x, u>",
        )
        for place, (layer, weight) in enumerate(weights.items())
    )


def gradients(problem: Problem) -> Callable[[View], Parameters]:
    """The context a model generates for its optimizer: the gradient of its own objective."""

    def context(view: View) -> Parameters:
        own = view[problem.name]
        if problem.objective is None:
            raise ValueError(f"problem {problem.name!r} has no objective to take a gradient of")
        loss = problem.objective(own, problem.context(view))
        grads = torch.autograd.grad(
            loss, list(own.values()), retain_graph=True, materialize_grads=True
        )
        return dict(zip(own, grads))

    return context


def memory_of_gradients(
    problem: Problem,
    suffix: str,
    gates: Gates,
    *,
    power: int = 1,
) -> Problem:
    """A memory trained to be like the gradients: `argmin -<m, g^power> + proximity` (Eq. 13)."""
    return Problem(
        name=f"{problem.name}.{suffix}",
        parameters={name: torch.zeros_like(value) for name, value in problem.parameters.items()},
        context=gradients(problem),
        objective=lambda own, g: -inner(own, {n: x.pow(power) for n, x in g.items()}),
        gates=gates,
        chunk=problem.chunk,
        reads=(*problem.reads, context_generation(problem.name)),
        context_text=f"gradients of {problem.name}",
        objective_text="-<m, g>" if power == 1 else f"-<m, g^{power}>",
    )


def follower(
    problem: Problem,
    context: Callable[[View], Parameters | None],
    memories: tuple[Problem, ...],
    gates: Gates,
    text: str,
) -> Problem:
    """The same parameters, which now follow their memories instead of their own gradient."""
    return Problem(
        name=problem.name,
        parameters=problem.parameters,
        context=context,
        objective=inner,
        gates=gates,
        chunk=problem.chunk,
        reads=tuple(direct(memory.name) for memory in memories),
        start=problem.start,
        context_text=text,
        objective_text="<W, m>",
    )


def momentum_problems(problem: Problem, *, decay: float, rate: float) -> tuple[Problem, Problem]:
    """Momentum: two levels, `m = decay m + g` and `W = W - rate m` (Eq. 10-13).

    `problem` is what plain gradient descent would solve; its own gates are replaced.
    """
    memory = memory_of_gradients(problem, "momentum", Gates(rate=1.0, retain=decay))

    def context(view: View) -> Parameters | None:
        return view[memory.name] if view.due else None

    return memory, follower(problem, context, (memory,), Gates(rate=rate), "momentum")


def adam_problems(
    problem: Problem,
    *,
    rate: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    decay: float = 0.0,
) -> tuple[Problem, Problem, Problem]:
    """Train a problem with AdamW: two moments that share a level, and the weights that follow.

    The moments update equally often and do not need each other (Definition 2).
    """
    if problem.chunk != 1:
        raise ValueError(
            f"adam_problems: chunk must be 1, got {problem.chunk}: make one item of each batch"
        )
    first, second = betas
    m = memory_of_gradients(problem, "exp_avg", Gates(rate=1 - first, retain=first))
    v = memory_of_gradients(problem, "exp_avg_sq", Gates(rate=1 - second, retain=second), power=2)

    def context(view: View) -> Parameters:
        return {
            n: adam_direction(Moments(view[m.name][n], view[v.name][n]), view.step, *betas, eps=eps)
            for n in problem.parameters
        }

    gates = Gates(rate=rate, retain=1 - rate * decay)
    return m, v, follower(problem, context, (m, v), gates, "the two moments")
