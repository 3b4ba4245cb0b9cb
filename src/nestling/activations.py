"""Element-wise nonlinearities with their derivatives, for memories with hand-written gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Activation(NamedTuple):
    """A nonlinearity and its derivative, both element-wise."""

    function: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]


def _gelu_derivative(z: Tensor) -> Tensor:
    normal = torch.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    return 0.5 * (1.0 + torch.erf(z / math.sqrt(2.0))) + z * normal


def _silu_derivative(z: Tensor) -> Tensor:
    gate = torch.sigmoid(z)
    return gate * (1.0 + z * (1.0 - gate))


gelu = Activation(functional.gelu, _gelu_derivative)
silu = Activation(functional.silu, _silu_derivative)
tanh = Activation(torch.tanh, lambda z: 1.0 - torch.tanh(z).square())
relu = Activation(torch.relu, lambda z: (z > 0).to(z.dtype))
linear = Activation(lambda z: z, torch.ones_like)
