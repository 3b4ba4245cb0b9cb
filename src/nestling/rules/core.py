"""Rules: pairs of pure functions with explicit state, and how to compose them.

A rule turns the gradient that reaches a weight into the direction to step along:

    init(weight) -> state
    step(write, state, weight, gates) -> (write, state)

`apply` then takes the step, `weight <- retain * weight - rate * write.grad`. The same rules serve
fast weights (leading dimensions are sequences and heads) and optimizers (leading dimensions are
same-shaped parameters stacked together), so **a rule treats all dimensions but the last two of a
matrix as batch**, and its state is a (nested) NamedTuple of tensors that carry the same leading
dimensions as the weight. Time is not state: the caller's clock hands over `gates.step`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, ParamSpec

from torch import Tensor

State = Any
"""A (nested) tuple of tensors; `()` for a rule without state."""


class Write(NamedTuple):
    """One step's write to a weight.

    `grad` is the loss's gradient (for a linear layer `sum_n delta_n x_n^T`). `x` and `u` are the
    pairs it came from, where known: the layer's inputs and its write targets `u = -delta`.
    """

    grad: Tensor  # [..., *weight]
    x: Tensor | None = None  # [..., n, Di]
    u: Tensor | None = None  # [..., n, Do]


class Pairs(NamedTuple):
    """The rows that made a weight's gradient: `grad = -u^T x`."""

    x: Tensor  # [..., n, Di]
    u: Tensor  # [..., n, Do], minus the gradient at the output


class Gates(NamedTuple):
    """How strongly to write: rate (eta), retain (alpha), and the clock: `step` counts from 1.

    Tensors must broadcast against the weight.
    """

    rate: Tensor | float = 1.0
    retain: Tensor | float = 1.0
    step: int = 1


class Rule(NamedTuple):
    """A pair of pure functions; see the module's docstring.

    `elementwise` promises that every entry of the weight is treated alone (all state has the
    weight's shape), so a caller may cut, flatten or join weights: into blocks, into shards.
    `needs_pairs` says that a write must bring the pairs its gradient came from. `plain` promises
    gradient descent itself: no state, and the gradient comes out as it went in. `recipe` is the
    call that made the rule (see `factory`): with it a rule can be copied and pickled.
    """

    init: Callable[[Tensor], State]
    step: Callable[[Write, State, Tensor, Gates], tuple[Write, State]]
    elementwise: bool = False
    needs_pairs: bool = False
    plain: bool = False
    recipe: tuple[Callable[..., Rule], tuple, dict[str, Any]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self.recipe is None:
            return Rule, tuple(self)
        return _remake, self.recipe


Arguments = ParamSpec("Arguments")


def factory(make: Callable[Arguments, Rule]) -> Callable[Arguments, Rule]:
    """Note in every rule a function makes how it was made: by the function's name and arguments."""

    @wraps(make)
    def made(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Rule:
        return make(*args, **kwargs)._replace(recipe=(made, args, kwargs))

    return made


def _remake(make: Callable[..., Rule], args: tuple, kwargs: dict[str, Any]) -> Rule:
    return make(*args, **kwargs)


def apply(
    rule: Rule, weight: Tensor, write: Write, state: State, gates: Gates
) -> tuple[Tensor, State]:
    """One update of a weight: `retain * weight - rate * direction`, the direction by the rule."""
    write, state = rule.step(write, state, weight, gates)
    return gates.retain * weight - gates.rate * write.grad, state


@factory
def chain(*rules: Rule) -> Rule:
    """Compose rules from left to right: each transforms the write the one before it left."""

    def init(weight: Tensor) -> State:
        return tuple(rule.init(weight) for rule in rules)

    def step(write: Write, state: State, weight: Tensor, gates: Gates) -> tuple[Write, State]:
        after = []
        for rule, old in zip(rules, state, strict=True):
            write, new = rule.step(write, old, weight, gates)
            after.append(new)
        return write, tuple(after)

    return Rule(
        init,
        step,
        elementwise=all(rule.elementwise for rule in rules),
        needs_pairs=any(rule.needs_pairs for rule in rules),
        plain=all(rule.plain for rule in rules),
    )


@factory
def stateless(transform: Callable[[Tensor], Tensor], elementwise: bool = False) -> Rule:
    """A rule that only transforms the gradient, such as `torch.sign` (which is elementwise)."""

    def step(write: Write, state: State, weight: Tensor, gates: Gates) -> tuple[Write, State]:
        return write._replace(grad=transform(write.grad)), state

    return Rule(lambda weight: (), step, elementwise)


def _plain() -> Rule:
    return identity


identity = stateless(lambda grad: grad, elementwise=True)._replace(
    plain=True, recipe=(_plain, (), {})
)
"""Plain gradient descent as a rule (Eq. 1)."""


def pairs(write: Write, name: str) -> Pairs:
    """The pairs of a write, for rules that cannot do without them; `name` is the rule's."""
    if write.x is None or write.u is None:
        missing = " and ".join(part for part in ("x", "u") if getattr(write, part) is None)
        raise ValueError(
            f"{name} learns from a layer's pairs (inputs x, targets u), and this write has no"
            f" {missing}: pass Write(grad, x, u)"
        )
    return Pairs(write.x, write.u)
