"""Element-wise nonlinearities with two derivatives, for memories with hand-written gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Activation(NamedTuple):
    """A nonlinearity and its derivatives, all from z and a `gate` that is computed once.

    Every function makes a tensor of its own, which the caller may overwrite.
    """

    gate: Callable[[Tensor], Tensor]
    value: Callable[[Tensor, Tensor], Tensor]  # (z, gate) -> sigma(z)
    slope: Callable[[Tensor, Tensor], Tensor]  # (z, gate) -> sigma'(z)
    curve: Callable[[Tensor, Tensor], Tensor]  # (z, gate) -> sigma''(z)

    def __call__(self, z: Tensor) -> Tensor:
        return self.value(z, self.gate(z))

    def derivative(self, z: Tensor) -> Tensor:
        """`sigma'(z)`."""
        return self.slope(z, self.gate(z))


def _silu_slope(z: Tensor, gate: Tensor) -> Tensor:
    return torch.ops.aten.sigmoid_backward(z, gate).add_(gate)  # z g (1 - g) + g


def _silu_curve(z: Tensor, gate: Tensor) -> Tensor:
    return torch.ops.aten.sigmoid_backward(torch.addcmul(z, z, gate, value=-2.0).add_(2.0), gate)


def _normal(z: Tensor) -> Tensor:
    return torch.exp(-0.5 * z * z) * 0.3989422804014327


def _own(z: Tensor, gate: Tensor) -> Tensor:
    return gate.clone()


def _none(z: Tensor, gate: Tensor) -> Tensor:
    return torch.zeros_like(z)


silu = Activation(torch.sigmoid, torch.mul, _silu_slope, _silu_curve)
"""`z sigmoid(z)`: one exponential serves the value and both derivatives."""

gelu = Activation(
    torch.special.ndtr,
    torch.mul,
    lambda z, gate: torch.addcmul(gate, z, _normal(z)),
    lambda z, gate: (2.0 - z * z) * _normal(z),
)
"""`z Phi(z)`."""

tanh = Activation(
    torch.tanh,
    _own,
    lambda z, gate: 1.0 - gate.square(),
    lambda z, gate: -2.0 * gate * (1.0 - gate.square()),
)
"""`tanh z`."""

relu = Activation(lambda z: (z > 0).to(z.dtype), torch.mul, _own, _none)
"""`max(0, z)`."""

linear = Activation(torch.ones_like, lambda z, gate: z.clone(), _own, _none)
"""`z`."""
