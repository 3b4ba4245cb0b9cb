"""Adam as a memory of gradients (Eq. 100-105), and the rules of its family.

Ask an element-wise memory to answer every gradient with one and the same property P of their past:

    m* = argmin sum_i |m . g_i - P|^2 + lam |m|^2 = (H + lam)^-1 . M~ . P,
    M~ = sum g_i,  H = sum g_i^2

P = sum g^2 gives back momentum; P = sqrt(sum g^2) gives Adam. With the rates of the paper
(M~ += beta1 g, H += beta2 g^2, so sum g^2 = H / beta2) its direction is `M~ / sqrt(beta2 H)`.
`adam(literal=True)` is that rule to the letter, which never forgets; `adam()` keeps moving averages
with bias correction, as everyone does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nestling.rules.core import Gates, Rule, State, Write
from nestling.rules.momentum import accumulate

__all__ = [
    "Moments",
    "adam",
    "adam_value",
    "averaged",
    "elementwise_loss",
    "elementwise_optimum",
    "memory_step",
    "moments",
    "momentum_value",
    "second_moment",
]


class Moments(NamedTuple):
    """Both memories of a weight's past gradients, of its shape; of the same level (Def. 2)."""

    first: Tensor  # M~
    second: Tensor  # H


def elementwise_loss(memory: Tensor, grads: Tensor, value: Tensor, lam: float) -> Tensor:
    """`sum_i |m . g_i - P|^2 + lam |m|^2` (Eq. 101); grads [N, *weight]."""
    return (memory * grads - value).square().sum() + lam * memory.square().sum()


def moments(old: Moments, grad: Tensor, *, beta1: float = 1.0, beta2: float = 1.0) -> Moments:
    """`M~ + beta1 g` and `H + beta2 g^2`: all the optimum needs of the past (Eq. 102)."""
    first = accumulate(old.first, grad, retain=1.0, rate=beta1)
    return Moments(first, torch.addcmul(old.second, grad, grad, value=beta2))


def elementwise_optimum(past: Moments, value: Tensor, lam: float = 0.0) -> Tensor:
    """`(H + lam)^-1 . M~ . P`, where the loss of Eq. 101 is smallest (Eq. 102)."""
    return past.first * value / (past.second + lam)


def momentum_value(past: Moments, beta2: float = 1.0) -> Tensor:
    """`P = sum g^2`: the optimum is momentum (Eq. 104)."""
    return past.second / beta2


def adam_value(past: Moments, beta2: float = 1.0) -> Tensor:
    """`P = sqrt(sum g^2)`: the optimum is Adam's direction (Eq. 105)."""
    return (past.second / beta2).sqrt()


def memory_step(
    weight: Tensor, past: Moments, value: Tensor, *, rate: float, lam: float = 0.0
) -> Tensor:
    """`W - eta m*` with the optimal memory of all gradients (Eq. 100, 103)."""
    return weight - rate * elementwise_optimum(past, value, lam)


Direction = Callable[[Moments, Tensor, int], Tensor]
"""How to step, given the moving averages, the gradient and the step's number."""


def averaged(beta1: float, beta2: float, direction: Direction) -> Rule:
    """A rule that keeps moving averages of the gradient and its square, and steps by them."""
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"{name} must lie in [0, 1), got {beta!r}")

    def step(write: Write, state: State, weight: Tensor, gates: Gates) -> tuple[Write, State]:
        past = Moments(
            accumulate(state.first, write.grad, retain=beta1, rate=1.0 - beta1),
            mean_square(state.second, write.grad, beta2),
        )
        return write._replace(grad=direction(past, write.grad, gates.step)), past

    return Rule(_init, step, elementwise=True)


def adam(
    beta1: float = 0.9, beta2: float = 0.999, *, eps: float = 1e-8, literal: bool = False
) -> Rule:
    """Adam (Eq. 105): the mean gradient over the root of its mean square, element by element.

    Moving averages with bias correction. `literal`: as printed, `M~ / (sqrt(beta2 H) + eps)` with
    sums that never decay.
    """
    if literal:
        return _adam_literal(beta1, beta2, eps)

    def direction(past: Moments, grad: Tensor, step: int) -> Tensor:
        bias1, bias2 = 1.0 - beta1**step, math.sqrt(1.0 - beta2**step)
        return past.first / affine(past.second.sqrt(), bias1 / bias2, bias1 * eps)

    return averaged(beta1, beta2, direction)


def _adam_literal(beta1: float, beta2: float, eps: float) -> Rule:
    """`M~ / (sqrt(beta2 H) + eps)` with `M~ + beta1 g`, `H + beta2 g^2` (Eq. 105 as printed)."""

    def step(write: Write, state: State, weight: Tensor, gates: Gates) -> tuple[Write, State]:
        past = moments(state, write.grad, beta1=beta1, beta2=beta2)
        grad = past.first / affine(past.second.sqrt(), math.sqrt(beta2), eps)
        return write._replace(grad=grad), past

    return Rule(_init, step, elementwise=True)


def _init(weight: Tensor) -> Moments:
    return Moments(torch.zeros_like(weight), torch.zeros_like(weight))


class SecondMoment(NamedTuple):
    """A running mean square, of the weight's shape."""

    second: Tensor


def second_moment(
    decay: float = 0.999, *, eps: float = 1e-8, centered: bool = False, debias: bool = True
) -> Rule:
    """Divide by the root of a running mean square, element by element (RMSprop; Adam's H).

    `centered` takes the variance instead; `debias` corrects for the start at zero.
    """
    if not 0.0 <= decay < 1.0:
        raise ValueError(f"second_moment: decay must lie in [0, 1), got {decay!r}")

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


def mean_square(old: Tensor, grad: Tensor, decay: float) -> Tensor:
    """`decay H + (1 - decay) g^2`."""
    return (decay * old).addcmul_(grad, grad, value=1.0 - decay)


def affine(x: Tensor, scale: float, shift: float) -> Tensor:
    """`scale x + shift` in one pass."""
    return torch.add(torch.tensor(shift, dtype=x.dtype, device=x.device), x, alpha=scale)
