"""Well-known optimizers as compositions of rules, in a line each; equal to those torch has.

The rate is the caller's (`gates.rate`), weight decay is a rule: before the others it is part of the
gradient (L2), after them it is decoupled.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from nestling.rules.adam import Moments, adam, adam_direction, affine, averaged, second_moment
from nestling.rules.core import Gates, Rule, State, Write, chain, factory, identity, stateless
from nestling.rules.momentum import MomentumState, accumulate, momentum


@factory
def weight_decay(strength: float) -> Rule:
    """Add `strength * weight` to the direction."""
    if strength == 0.0:
        return identity

    def step(write: Write, state: State, weight: Tensor, gates: Gates) -> tuple[Write, State]:
        return write._replace(grad=torch.add(write.grad, weight, alpha=strength)), state

    return Rule(lambda weight: (), step, elementwise=True)


@factory
def sgd(
    decay: float = 0.0, *, dampening: float = 0.0, nesterov: bool = False, l2: float = 0.0
) -> Rule:
    """torch.optim.SGD; `decay` is its momentum, `l2` its weight decay."""
    follow = momentum(decay, dampening=dampening, nesterov=nesterov) if decay else identity
    return chain(weight_decay(l2), follow)


@factory
def adamw(
    beta1: float = 0.9, beta2: float = 0.999, *, eps: float = 1e-8, decay: float = 0.01
) -> Rule:
    """torch.optim.AdamW."""
    return chain(adam(beta1, beta2, eps=eps), weight_decay(decay))


@factory
def rmsprop(
    decay: float = 0.99, *, eps: float = 1e-8, centered: bool = False, follow: float = 0.0
) -> Rule:
    """torch.optim.RMSprop; `follow` is its momentum."""
    scale = second_moment(decay, eps=eps, centered=centered, debias=False)
    return chain(scale, momentum(follow)) if follow else scale


signsgd = stateless(torch.sign, elementwise=True)
"""Only the sign of the gradient."""


@factory
def signum(decay: float = 0.9) -> Rule:
    """Only the sign of the momentum."""
    return chain(momentum(decay), signsgd)


@factory
def lion(beta1: float = 0.9, beta2: float = 0.99, *, decay: float = 0.0) -> Rule:
    """Lion (Chen et al. 2023): the sign of an average kept with beta2, read with beta1."""
    return chain(two_rates(beta1, beta2), signsgd, weight_decay(decay))


@factory
def two_rates(beta1: float, beta2: float) -> Rule:
    """A moving average kept with beta2 and read with beta1."""

    def step(write: Write, state: State, weight: Tensor, gates: Gates) -> tuple[Write, State]:
        read = accumulate(state.memory, write.grad, retain=beta1, rate=1.0 - beta1)
        memory = accumulate(state.memory, write.grad, retain=beta2, rate=1.0 - beta2)
        return write._replace(grad=read), MomentumState(memory)

    return Rule(lambda weight: MomentumState(torch.zeros_like(weight)), step, elementwise=True)


@factory
def amsgrad(beta1: float = 0.9, beta2: float = 0.999, *, eps: float = 1e-8) -> Rule:
    """torch.optim.Adam(amsgrad=True): divide by the largest mean square so far."""
    inner = averaged(beta1, beta2, lambda past, grad, step: past.first)

    def init(weight: Tensor) -> State:
        return (inner.init(weight), torch.zeros_like(weight))

    def step(write: Write, state: State, weight: Tensor, gates: Gates) -> tuple[Write, State]:
        write, past = inner.step(write, state[0], weight, gates)
        largest = torch.maximum(state[1], past.second)
        grad = adam_direction(Moments(past.first, largest), gates.step, beta1, beta2, eps=eps)
        return write._replace(grad=grad), (past, largest)

    return Rule(init, step, elementwise=True)


@factory
def nadam(
    beta1: float = 0.9, beta2: float = 0.999, *, eps: float = 1e-8, warm: float = 4e-3
) -> Rule:
    """torch.optim.NAdam: Adam with Nesterov's look ahead; `warm` is its `momentum_decay`."""

    def direction(past: Moments, grad: Tensor, step: int) -> Tensor:
        mean, ahead = _nadam_decay(beta1, warm, step), _nadam_decay(beta1, warm, step + 1)
        product = _nadam_product(beta1, warm, step)
        now, then = (1.0 - mean) / (1.0 - product), ahead / (1.0 - product * ahead)
        size = affine(past.second.sqrt(), 1.0 / math.sqrt(1.0 - beta2**step), eps)
        return accumulate(past.first, grad, retain=then, rate=now) / size

    return averaged(beta1, beta2, direction)


def _nadam_decay(beta1: float, warm: float, step: int) -> float:
    return beta1 * (1.0 - 0.5 * 0.96 ** (step * warm))


@lru_cache(maxsize=64)
def _nadam_product(beta1: float, warm: float, step: int) -> float:
    return math.prod(_nadam_decay(beta1, warm, s) for s in range(1, step + 1))


@factory
def radam(beta1: float = 0.9, beta2: float = 0.999, *, eps: float = 1e-8) -> Rule:
    """torch.optim.RAdam: Adam once its second moment can be trusted, momentum before."""
    most = 2.0 / (1.0 - beta2) - 1.0

    def direction(past: Moments, grad: Tensor, step: int) -> Tensor:
        bias1, bias2 = 1.0 - beta1**step, 1.0 - beta2**step
        length = most - 2.0 * step * beta2**step / bias2
        if length <= 5.0:
            return past.first / bias1
        trust = (length - 4.0) * (length - 2.0) * most / ((most - 4.0) * (most - 2.0) * length)
        scale = bias1 / math.sqrt(bias2 * trust)
        return past.first / affine(past.second.sqrt(), scale, scale * eps)

    return averaged(beta1, beta2, direction)
