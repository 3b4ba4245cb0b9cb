"""Momentum: a memory of past gradients that the weight follows (Eq. 10-13, 32-33).

`accumulate` is the one function behind every momentum, moving average and decaying memory of the
package. The paper keeps the rate inside the memory, `m = alpha m - eta g; W = W + m`; the rule
keeps it outside, `m = alpha m + g; W = W - eta m`, as torch does. With a constant rate they agree.

What goes in may be features of the gradient, `m = alpha m - eta P phi(g)` (Eq. 51): a higher-order
feature map lets the memory store more than the mean. The step still descends when phi keeps each
entry's sign, so the maps here are odd and increasing; they act on the gradient relative to its own
root mean square, which keeps them free of its scale.

What comes out may pass a nonlinearity, `W + sigma(m(u))` (Eq. 52), of any rule: it changes how the
answer is used, not what is stored. With momentum and sigma = Newton-Schulz it is Muon (Eq. 42),
with sigma = sign signed momentum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nestling.checks import require
from nestling.rules.core import Gates, Rule, State, Write, chain, factory, stateless
from nestling.rules.size import rms


class MomentumState(NamedTuple):
    """The memory of past gradients, of the weight's shape."""

    memory: Tensor


def accumulate(
    memory: Tensor, new: Tensor, *, retain: float | Tensor, rate: float | Tensor
) -> Tensor:
    """`retain memory + rate new` (Eq. 11, 33), in one pass over memory where it can be had.

    With `retain + rate = 1` it is a moving average.
    """
    if isinstance(retain, Tensor) or isinstance(rate, Tensor):
        return retain * memory + rate * new
    if retain == 1.0:
        return torch.add(memory, new, alpha=rate)
    if rate == 1.0:
        return torch.add(new, memory, alpha=retain)
    if retain + rate == 1.0:
        return torch.lerp(memory, new, rate)
    return torch.add(retain * memory, new, alpha=rate)


@factory
def momentum(decay: float = 0.9, *, dampening: float = 0.0, nesterov: bool = False) -> Rule:
    """`m = decay m + (1 - dampening) g`, followed by the weight (Eq. 10-11, 32-33).

    As in torch, the first gradient is taken whole. Nesterov looks ahead: `g + decay m`.
    """
    require(0.0 <= decay <= 1.0, "momentum: decay", decay, "in [0, 1]")
    if nesterov and dampening:
        raise ValueError(f"momentum: nesterov needs dampening 0, got {dampening!r}")

    def step(write: Write, state: State, weight: Tensor, gates: Gates) -> tuple[Write, State]:
        rate = 1.0 if gates.step == 1 else 1.0 - dampening
        memory = accumulate(state.memory, write.grad, retain=decay, rate=rate)
        grad = torch.add(write.grad, memory, alpha=decay) if nesterov else memory
        return write._replace(grad=grad), MomentumState(memory)

    return Rule(lambda weight: MomentumState(torch.zeros_like(weight)), step, elementwise=True)


@factory
def feature_momentum(
    phi: Callable[[Tensor], Tensor],
    *,
    decay: float = 0.9,
    precondition: Rule | None = None,
    nesterov: bool = False,
) -> Rule:
    """Momentum on `P phi(g)` (Eq. 51): `precondition` is P as a rule, without it P = 1."""
    rules = [stateless(phi)]
    if precondition is not None:
        rules.append(precondition)
    return chain(*rules, momentum(decay, nesterov=nesterov))


def polynomial(*coefficients: float) -> Callable[[Tensor], Tensor]:
    """`s (c1 z + c3 z^3 + c5 z^5 + ...)` of `z = g / s`, s the matrix's root mean square (Eq. 51).

    Odd powers with coefficients of at least 0, so it never turns a gradient's sign.
    """
    kept = min(coefficients, default=-1.0) >= 0.0 and max(coefficients) > 0.0  # the sign is
    require(kept, "polynomial: coefficients", coefficients, "at least 0, and one of them above 0")

    def phi(grad: Tensor) -> Tensor:
        size = rms(grad)
        z = grad / size
        total = torch.zeros_like(z)
        for coefficient in reversed(coefficients):  # Horner in z^2
            total = total * z.square() + coefficient
        return size * total * z

    return phi


def power(exponent: float) -> Callable[[Tensor], Tensor]:
    """`s sign(z) |z|^p` of `z = g / s` (Eq. 51): p = 1 is the gradient, p = 0 its sign."""
    require(exponent >= 0.0, "power: exponent", exponent, "at least 0")

    def phi(grad: Tensor) -> Tensor:
        size = rms(grad)
        return size * grad.sign() * (grad.abs() / size) ** exponent

    return phi


@factory
def nonlinear(
    memory: Rule, sigma: Callable[[Tensor], Tensor], *, elementwise: bool = False
) -> Rule:
    """`W + sigma(m(u))` (Eq. 52): step along sigma of what the memory answers.

    `elementwise` promises that sigma treats every entry alone (see `Rule`).
    """
    return chain(memory, stateless(sigma, elementwise))


def squash(strength: float = 1.0) -> Callable[[Tensor], Tensor]:
    """`s tanh(z / strength)` of `z = m / s`, s the root mean square: peaks are bounded (Eq. 52)."""
    require(strength > 0.0, "squash: strength", strength, "positive")

    def sigma(answer: Tensor) -> Tensor:
        size = rms(answer)
        return size * torch.tanh(answer / (size * strength))

    return sigma
