"""Adam and the rules of its family: moving averages of the gradient and of its square (Eq. 105).

`nestling.paper.exhibits.adam` derives it as a memory of gradients, and has the printed rule, whose
sums never decay.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nestling.checks import require
from nestling.rules.core import Gates, Rule, State, Write, factory
from nestling.rules.momentum import accumulate


class Moments(NamedTuple):
    """Both memories of a weight's past gradients, of its shape; of the same level (Def. 2)."""

    first: Tensor  # M~
    second: Tensor  # H


Direction = Callable[[Moments, Tensor, int], Tensor]
"""How to step, given the moving averages, the gradient and the step's number."""


@factory
def averaged(beta1: float, beta2: float, direction: Direction) -> Rule:
    """A rule that keeps moving averages of the gradient and its square, and steps by them."""
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        require(0.0 <= beta < 1.0, name, beta, "in [0, 1)")

    def step(write: Write, state: State, weight: Tensor, gates: Gates) -> tuple[Write, State]:
        past = Moments(
            accumulate(state.first, write.grad, retain=beta1, rate=1.0 - beta1),
            mean_square(state.second, write.grad, beta2),
        )
        return write._replace(grad=direction(past, write.grad, gates.step)), past

    return Rule(_init, step, elementwise=True)


@factory
def adam(beta1: float = 0.9, beta2: float = 0.999, *, eps: float = 1e-8) -> Rule:
    """Adam (Eq. 105): the mean gradient over the root of its mean square, element by element.

    Moving averages with bias correction, as in torch.
    """

    def direction(past: Moments, grad: Tensor, step: int) -> Tensor:
        return adam_direction(past, step, beta1, beta2, eps=eps)

    return averaged(beta1, beta2, direction)


def adam_direction(
    past: Moments, step: int, beta1: float = 0.9, beta2: float = 0.999, *, eps: float = 1e-8
) -> Tensor:
    """The direction of Adam's step number `step` (from 1), given its two moving averages."""
    bias1, bias2 = 1.0 - beta1**step, math.sqrt(1.0 - beta2**step)
    return past.first / affine(past.second.sqrt(), bias1 / bias2, bias1 * eps)


def _init(weight: Tensor) -> Moments:
    return Moments(torch.zeros_like(weight), torch.zeros_like(weight))


class SecondMoment(NamedTuple):
    """A running mean square, of the weight's shape."""

    second: Tensor


@factory
def second_moment(
    decay: float = 0.999, *, eps: float = 1e-8, centered: bool = False, debias: bool = True
) -> Rule:
    """Divide by the root of a running mean square, element by element (RMSprop; Adam's H).

    `centered` takes the variance instead; `debias` corrects for the start at zero.
    """
    require(0.0 <= decay < 1.0, "second_moment: decay", decay, "in [0, 1)")

    def init(weight: Tensor) -> State:
        return _init(weight) if centered else SecondMoment(torch.zeros_like(weight))

    def step(write: Write, state: State, weight: Tensor, gates: Gates) -> tuple[Write, State]:
        second = mean_square(state.second, write.grad, decay)
        after: State = SecondMoment(second)
        if centered:
            first = accumulate(state.first, write.grad, retain=decay, rate=1.0 - decay)
            after = Moments(first, second)
            second = torch.addcmul(second, first, first, value=-1.0)
        bias = math.sqrt(1.0 - decay**gates.step) if debias else 1.0
        return write._replace(grad=write.grad / affine(second.sqrt(), 1.0 / bias, eps)), after

    return Rule(init, step, elementwise=True)


@factory
def adagrad(*, eps: float = 1e-10, start: float = 0.0, rate_decay: float = 0.0) -> Rule:
    """torch.optim.Adagrad: divide by the root of the sum of all squares so far.

    `start` is the sum before the first step (torch's `initial_accumulator_value`); the step shrinks
    as `1 / (1 + (step - 1) rate_decay)`.
    """
    require(start >= 0.0, "adagrad: start", start, "at least 0")

    def step(write: Write, state: State, weight: Tensor, gates: Gates) -> tuple[Write, State]:
        second = torch.addcmul(state.second, write.grad, write.grad)
        shrink = 1.0 + (gates.step - 1) * rate_decay
        grad = write.grad / affine(second.sqrt(), shrink, shrink * eps)
        return write._replace(grad=grad), SecondMoment(second)

    return Rule(lambda weight: SecondMoment(torch.full_like(weight, start)), step, elementwise=True)


def mean_square(old: Tensor, grad: Tensor, decay: float) -> Tensor:
    """`decay H + (1 - decay) g^2`."""
    return (decay * old).addcmul_(grad, grad, value=1.0 - decay)


def affine(x: Tensor, scale: float, shift: float) -> Tensor:
    """`scale x + shift` in one pass.

    The shift is a number on the CPU: kernels of every device take it as an argument, so that no
    copy is waited for.
    """
    return torch.add(torch.tensor(shift, dtype=x.dtype), x, alpha=scale)
