"""Muon: momentum whose output is orthogonalised (Eq. 42), and AdaMuon, its adaptive variant.

Both are chains. Newton-Schulz ignores scale, so it does not matter whether the momentum is a sum or
an average; what fixes the length of the step is the factor for the matrix's shape at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from nestling.checks import one_of
from nestling.rules import size
from nestling.rules.adam import second_moment
from nestling.rules.aliases import signsgd
from nestling.rules.core import Rule, chain, factory, identity, stateless
from nestling.rules.momentum import momentum
from nestling.rules.newton_schulz import QUINTIC, Coefficients, orthogonalise

SHAPE_SCALES: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "none": lambda rows, columns: 1.0,
}
"""Factors for a matrix's shape, by the names torch.optim.Muon gives them."""


@factory
def muon(
    *,
    decay: float = 0.95,
    nesterov: bool = True,
    steps: int = 5,
    coefficients: Coefficients = QUINTIC,
    scale: str = "original",
    precision: torch.dtype | None = None,
) -> Rule:
    """Muon (Eq. 42): `NewtonSchulz(m)` of `m = decay m + g`, times a factor for the shape.

    Equal to torch.optim.Muon (which runs in bfloat16) with `adjust_lr_fn=scale`. `precision` is
    that of Newton-Schulz.
    """
    return chain(
        momentum(decay, nesterov=nesterov),
        orthogonalise(steps=steps, coefficients=coefficients, precision=precision),
        shape_scale(scale),
    )


@factory
def adamuon(
    *,
    decay: float = 0.95,
    second_decay: float = 0.95,
    nesterov: bool = True,
    sign: bool = True,
    steps: int = 5,
    eps: float = 1e-8,
    rms: float = 0.2,
    precision: torch.dtype | None = None,
) -> Rule:
    """AdaMuon (Si, Zhang, Shen 2025), a baseline: Muon over the root of its output's second moment.

    The sign of the momentum is orthogonalised (`sign=False`: the momentum itself), divided
    element-wise by a running root mean square of the result, and brought to a fixed size.
    """
    return chain(
        momentum(decay, nesterov=nesterov),
        signsgd if sign else identity,
        orthogonalise(steps=steps, precision=precision),
        second_moment(second_decay, eps=eps),
        rms_scale(rms),
    )


@factory
def shape_scale(scale: str = "original") -> Rule:
    """Multiply by a factor that depends on the matrix's shape; see `SHAPE_SCALES`."""
    one_of("scale", scale, SHAPE_SCALES)
    factor = SHAPE_SCALES[scale]
    return stateless(lambda grad: grad * factor(grad.shape[-2], grad.shape[-1]))


@factory
def rms_scale(rms: float = 0.2) -> Rule:
    """Bring each matrix to a given root mean square; 0.2 is about what AdamW's steps have."""

    return stateless(lambda grad: grad * (rms / size.rms(grad)))
