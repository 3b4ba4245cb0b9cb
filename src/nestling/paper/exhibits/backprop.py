"""Backpropagation, layer by layer: every layer is a memory of its own surprise (Eq. 29-31).

x_1 -> z_1 = W_1 x_1 -> x_2 = phi(z_1) -> ... -> y = W_L x_L
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nestling.activations import Activation
from nestling.objectives import Signal
from nestling.paper.exhibits.gd import layer_gd, layer_proximal


def forward_layers(
    weights: Sequence[Tensor], activation: Activation, x: Tensor
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Output of a stack of linear layers, each layer's input x_l, and its product z_l = W_l x_l."""
    inputs, products = [x], [x @ weights[0].mT]
    for weight in weights[1:]:
        inputs.append(activation.function(products[-1]))
        products.append(inputs[-1] @ weight.mT)
    return products[-1], inputs, products


def surprises(
    weights: Sequence[Tensor], activation: Activation, x: Tensor, error: Tensor
) -> list[Signal]:
    """`delta_l = J_phi(z_l)^T W_{l+1}^T delta_{l+1}`, from the error at the output (Eq. 29).

    Returns each layer's pair: its surprise delta_l and its input x_l.
    """
    _, inputs, products = forward_layers(weights, activation, x)
    signals = [Signal(error, inputs[-1])]
    for above, z, below in zip(
        reversed(weights[1:]), reversed(products[:-1]), reversed(inputs[:-1]), strict=True
    ):
        delta = activation.derivative(z) * (signals[-1].error @ above)
        signals.append(Signal(delta, below))
    return signals[::-1]


def backprop_step(
    weights: Sequence[Tensor], signals: Sequence[Signal], rate: float
) -> list[Tensor]:
    """`W_l - eta delta_l (x) x_l` in every layer (Eq. 30)."""
    return [layer_gd(w, s.input, s.error, rate) for w, s in zip(weights, signals, strict=True)]


def backprop_proximal(
    weights: Sequence[Tensor], signals: Sequence[Signal], rate: float
) -> list[Tensor]:
    """`argmin <W x_l, delta_l> + |W - W_l|^2 / (2 eta)` in every layer (Eq. 31), solved."""
    return [
        layer_proximal(w, s.input, s.error, rate) for w, s in zip(weights, signals, strict=True)
    ]
