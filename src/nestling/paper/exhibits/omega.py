"""The Omega rule (Eq. 68): learn not from the last pair alone, but from a window of past pairs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nestling.checks import require
from nestling.objectives import Matrix, Objective, l2
from nestling.rules.core import Gates, Rule, State, Write, pairs


class WindowState(NamedTuple):
    """The last pairs, oldest first; zeros, which teach nothing, before the first."""

    keys: Tensor  # [..., c, Di]
    values: Tensor  # [..., c, Do]


def omega_step(
    weight: Tensor,
    window: WindowState,
    objective: Objective = l2,
    *,
    rate: float | Tensor,
    retain: float | Tensor = 1.0,
) -> Tensor:
    """`alpha M - eta sum_{i in window} grad L(M; k_i, v_i)`, all at the same M (Eq. 68)."""
    (grad,) = objective.gradient(Matrix(weight), window.keys, window.values)
    return retain * weight - rate * grad


def omega(objective: Objective = l2, *, window: int = 4) -> Rule:
    """Descend an objective summed over the last `window` pairs of the writes (Eq. 68).

    `window=1` is `descent(objective)`, with `l2` DeltaNet. Keys are the write's `x`, values `u`.
    """
    require(window >= 1, "omega: window", window, "at least 1")

    def init(weight: Tensor) -> WindowState:
        *batch, rows, columns = weight.shape
        return WindowState(
            weight.new_zeros(*batch, window, columns), weight.new_zeros(*batch, window, rows)
        )

    def step(write: Write, state: State, weight: Tensor, gates: Gates) -> tuple[Write, State]:
        x, u = pairs(write, "omega")
        keys = torch.cat([state.keys, x], dim=-2)[..., -window:, :]
        values = torch.cat([state.values, u], dim=-2)[..., -window:, :]
        (grad,) = objective.gradient(Matrix(weight), keys, values)
        return write._replace(grad=grad), WindowState(keys, values)

    return Rule(init, step, needs_pairs=True)
