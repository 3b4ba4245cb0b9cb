"""Objectives of a memory: losses and their error signals (Eq. 6, 17, 64-66).

An objective is a value, and serves every memory made of linear layers:

    l2.loss(memory, key, value)       # what the memory minimises, one number per pair
    l2.surprise(memory, key, value)   # per layer: error and input; its gradient is error input^T
    l2.gradient(memory, key, value)   # the same, summed over pairs, in the memory's own form

Shapes: N pairs, leading dimensions are batch. Weights [..., Do, Di], keys [..., N, Di], values
[..., N, Do]. The losses carry a factor 1/2 (1/p for `lp`), so that a step with rate eta is the rule
the paper prints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nestling.activations import Activation, gelu
from nestling.checks import require


class Signal(NamedTuple):
    """The error and the input of one linear layer: its gradient is `error input^T`."""

    error: Tensor  # [..., N, Do]
    input: Tensor  # [..., N, Di]

    @property
    def gradient(self) -> Tensor:
        """Summed over the pairs: [..., Do, Di]."""
        return self.error.mT @ self.input


class Matrix(NamedTuple):
    """A linear memory, `M(x) = W x`."""

    weight: Tensor  # [..., Do, Di]

    def read(self, x: Tensor) -> Tensor:
        """[..., N, Di] -> [..., N, Do]."""
        return x @ self.weight.mT

    def backward(self, x: Tensor, error: Tensor) -> tuple[Signal, ...]:
        """The error at the output as every layer's own signal."""
        return (Signal(error, x),)

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The linear layers, in the order of `backward`."""
        return (self.weight,)

    def replace(self, weights: tuple[Tensor, ...]) -> Matrix:
        """The same memory with other weights."""
        return Matrix(*weights)


class TwoLayer(NamedTuple):
    """A two-layer memory, `M(x) = x + W1 sigma(W2 x)`; without the `x +` if not residual."""

    w1: Tensor  # [..., Do, H]
    w2: Tensor  # [..., H, Di]
    activation: Activation = gelu
    residual: bool = True

    def read(self, x: Tensor) -> Tensor:
        """[..., N, Di] -> [..., N, Do]."""
        y = self.activation(x @ self.w2.mT) @ self.w1.mT
        return x + y if self.residual else y

    def backward(self, x: Tensor, error: Tensor) -> tuple[Signal, ...]:
        """The error at the output as every layer's own signal."""
        z = x @ self.w2.mT  # [..., N, H]
        hidden = Signal(error @ self.w1 * self.activation.derivative(z), x)
        return (Signal(error, self.activation(z)), hidden)

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The linear layers, in the order of `backward`."""
        return (self.w1, self.w2)

    def replace(self, weights: tuple[Tensor, ...]) -> TwoLayer:
        """The same memory with other weights."""
        return self._replace(w1=weights[0], w2=weights[1])


Architecture = Matrix | TwoLayer
"""The weights of a memory: one linear layer, or two."""


class Objective(NamedTuple):
    """A measure of `M(key)` against the value, its error, and how strongly outputs are forgotten.

    `forget` weighs Oja's term `|W^T u|^2 / 2`, which depends on the weight itself and not on the
    prediction alone: `u = -error` is the target of a layer (the value, for a matrix), held fixed.
    With several layers each forgets by its own target.
    """

    measure: Callable[[Tensor, Tensor], Tensor]  # prediction, value [..., Do] -> [...]
    error: Callable[[Tensor, Tensor], Tensor]  # its derivative by the prediction, [..., Do]
    forget: float = 0.0

    def loss(self, memory: Architecture, key: Tensor, value: Tensor) -> Tensor:
        """`L~(M(k); v)` of an associative memory (Eq. 6, 66), one number per pair: [..., N]."""
        prediction = memory.read(key)
        loss = self.measure(prediction, value)
        if self.forget:
            signals = memory.backward(key, self.error(prediction, value))
            for weight, signal in zip(memory.weights, signals, strict=True):
                loss = loss + 0.5 * self.forget * (signal.error.detach() @ weight).square().sum(-1)
        return loss

    def surprise(self, memory: Architecture, key: Tensor, value: Tensor) -> tuple[Signal, ...]:
        """Every layer's error signal and the input it is written along: their product is its slope.

        Oja's term (Eq. 66) has the gradient `u (W^T u)^T`: the input becomes `x - W^T u`.
        """
        signals = memory.backward(key, self.error(memory.read(key), value))
        if not self.forget:
            return signals
        return tuple(
            Signal(signal.error, signal.input + self.forget * (signal.error @ weight))
            for weight, signal in zip(memory.weights, signals, strict=True)
        )

    def gradient(self, memory: Architecture, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """The gradient of the summed loss, one tensor per layer."""
        return tuple(signal.gradient for signal in self.surprise(memory, key, value))


def dot_loss(prediction: Tensor, value: Tensor) -> Tensor:
    """`-<M k, v>`: the objective of linear attention and of backpropagation (Eq. 17, 64)."""
    return -(prediction * value).sum(-1)


def dot_error(prediction: Tensor, value: Tensor) -> Tensor:
    """`-v`, whatever the memory says: Hebbian (Eq. 17, 64)."""
    return -value


def l2_loss(prediction: Tensor, value: Tensor) -> Tensor:
    """`|M k - v|^2 / 2`: the objective of the delta rule (Eq. 65)."""
    return 0.5 * (prediction - value).square().sum(-1)


def l2_error(prediction: Tensor, value: Tensor) -> Tensor:
    """`M k - v` (Eq. 65)."""
    return prediction - value


dot = Objective(dot_loss, dot_error)
"""Dot product: `-<M k, v>`."""

l2 = Objective(l2_loss, l2_error)
"""Least squares: `|M k - v|^2 / 2`."""

oja = Objective(dot_loss, dot_error, forget=1.0)
"""Oja's: `-<M k, v> + |M^T v|^2 / 2`."""


def lp(p: float) -> Objective:
    """`sum |M k - v|^p / p`, as in Miras: p = 2 is `l2`, p near 1 shrugs off outliers."""
    require(p >= 1, "p", p, "at least 1 (the loss is not convex below)")

    def measure(prediction: Tensor, value: Tensor) -> Tensor:
        return (prediction - value).abs().pow(p).sum(-1) / p

    def error(prediction: Tensor, value: Tensor) -> Tensor:
        gap = prediction - value
        return torch.sign(gap) * gap.abs().pow(p - 1)

    return Objective(measure, error)
