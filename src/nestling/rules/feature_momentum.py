"""Momentum on features of the gradient: `m = alpha m - eta P phi(g)` (Eq. 51).

A higher-order feature map lets the memory of past gradients store more than their mean. The step
still descends when phi keeps each entry's sign, so the maps here are odd and increasing; they act
on the gradient relative to its own root mean square, which keeps them free of its scale.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nestling.checks import require
from nestling.rules.core import Rule, chain, factory, stateless
from nestling.rules.momentum import momentum
from nestling.rules.size import rms


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
