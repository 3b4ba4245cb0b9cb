"""Adam as a memory of gradients (Eq. 100-105).

Ask an element-wise memory to answer every gradient with one and the same property P of their past:

    m* = argmin sum_i |m . g_i - P|^2 + lam |m|^2 = (H + lam)^-1 . M~ . P,
    M~ = sum g_i,  H = sum g_i^2

P = sum g^2 gives back momentum; P = sqrt(sum g^2) gives Adam. With the rates of the paper
(M~ += beta1 g, H += beta2 g^2, so sum g^2 = H / beta2) its direction is `M~ / sqrt(beta2 H)`.
`adam_literal` is that rule to the letter, which never forgets; `nestling.rules.adam` keeps moving
averages with bias correction, as everyone does.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nestling.rules.adam import Moments, affine
from nestling.rules.core import Gates, Rule, State, Write
from nestling.rules.momentum import accumulate


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


def adam_literal(beta1: float = 0.9, beta2: float = 0.999, *, eps: float = 1e-8) -> Rule:
    """`M~ / (sqrt(beta2 H) + eps)` with `M~ + beta1 g`, `H + beta2 g^2` (Eq. 105 as printed)."""

    def init(weight: Tensor) -> Moments:
        return Moments(torch.zeros_like(weight), torch.zeros_like(weight))

    def step(write: Write, state: State, weight: Tensor, gates: Gates) -> tuple[Write, State]:
        past = moments(state, write.grad, beta1=beta1, beta2=beta2)
        grad = past.first / affine(past.second.sqrt(), math.sqrt(beta2), eps)
        return write._replace(grad=grad), past

    return Rule(init, step, elementwise=True)
