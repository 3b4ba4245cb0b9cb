"""Momentum: a memory of past gradients that the weight follows (Eq. 10-13, 32-33).

`accumulate` is the one function behind every momentum, moving average and decaying memory of the
package. The paper keeps the rate inside the memory, `m = alpha m - eta g; W = W + m`; the rule
keeps it outside, `m = alpha m + g; W = W - eta m`, as torch does. With a constant rate they agree.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nestling.checks import require
from nestling.rules.core import Gates, Rule, State, Write, factory


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
