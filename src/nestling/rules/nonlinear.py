"""A nonlinearity on the memory's output: `W + sigma(m(u))` (Eq. 52).

Any rule is a memory of gradients; sigma only changes how its answer is used, not what is stored.
With momentum and sigma = Newton-Schulz it is Muon (Eq. 42), with sigma = sign signed momentum.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nestling.checks import require
from nestling.rules.core import Rule, chain, factory, stateless
from nestling.rules.size import rms


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
