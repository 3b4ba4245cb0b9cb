"""Gradient descent in its three forms, and the training of one linear layer (Eq. 1-3, 6-9).

A step is also the answer to a small problem: stay close, and make the linearised loss small.
Written like that, a weight is a memory of what it was trained on. `argmin` solves such problems
numerically, so that equations with an argmin run as they stand, beside their closed forms.

Backpropagation, layer by layer: every layer is a memory of its own surprise (Eq. 29-31).

x_1 -> z_1 = W_1 x_1 -> x_2 = phi(z_1) -> ... -> y = W_L x_L
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from nestling.activations import Activation
from nestling.objectives import Architecture, Matrix, Objective, Signal
from nestling.rules.core import Gates, Rule, State, Write, pairs


def gd(weight: Tensor, grad: Tensor, rate: float | Tensor) -> Tensor:
    """`W - eta g` (Eq. 1)."""
    return weight - rate * grad


def gd_proximal(weight: Tensor, grad: Tensor, rate: float) -> Tensor:
    """`argmin <g, W> + |W - W_t|^2 / (2 eta)` (Eq. 2), solved."""
    return argmin(lambda w: (grad * w).sum() + proximity(w, weight, rate), weight)


def gd_leader(start: Tensor, grads: Iterable[Tensor], rate: float) -> Tensor:
    """`argmin sum_s <g_s, W> + |W - W_1|^2 / (2 eta)` (Eq. 3), solved: the leader is followed."""
    total = torch.stack(list(grads)).sum(0)
    return argmin(lambda w: (total * w).sum() + proximity(w, start, rate), start)


def proximity(weight: Tensor, near: Tensor, rate: float) -> Tensor:
    """`|W - W_t|^2 / (2 eta)`: the price of moving."""
    return (weight - near).square().sum() / (2.0 * rate)


def argmin(loss: Callable[[Tensor], Tensor], start: Tensor, *, steps: int = 1) -> Tensor:
    """Where a smooth convex loss is smallest, by Newton's method; quadratic losses take one step.

    Exact and expensive (it forms the Hessian): for checking closed forms on small problems.
    """
    best = start.detach()
    for _ in range(steps):
        slope = torch.autograd.functional.jacobian(loss, best).reshape(-1)
        curvature = torch.autograd.functional.hessian(loss, best)
        curvature = curvature.reshape(best.numel(), best.numel())
        best = best - torch.linalg.solve(curvature, slope).reshape(best.shape)
    return best


def layer_gd(weight: Tensor, x: Tensor, surprise: Tensor, rate: float | Tensor) -> Tensor:
    """`W - eta grad_y L (x) x`: a linear layer's step from input and surprise alone (Eq. 8).

    x [..., N, Di] and surprise [..., N, Do] may hold several pairs, which are summed.
    """
    return gd(weight, surprise.mT @ x, rate)


def layer_proximal(weight: Tensor, x: Tensor, surprise: Tensor, rate: float) -> Tensor:
    """`argmin <W x, grad_y L> + |W - W_t|^2 / (2 eta)` (Eq. 9), solved.

    The layer is a memory that is asked to answer each input with the opposite of its surprise.
    """
    return argmin(lambda w: (x @ w.mT * surprise).sum() + proximity(w, weight, rate), weight)


def train_layer(
    weight: Tensor,
    data: Iterable[tuple[Tensor, Tensor]],
    surprise: Callable[[Tensor, Tensor], Tensor],
    rate: float,
) -> Tensor:
    """`W* = argmin_W L(W; data)` by a step per batch of inputs and targets (Eq. 7).

    `surprise(y, target)` is the loss's gradient by the layer's output `y = W x`.
    """
    for x, target in data:
        weight = layer_gd(weight, x, surprise(x @ weight.mT, target), rate)
    return weight


def associate(
    objective: Objective,
    memory: Architecture,
    key: Tensor,
    value: Tensor,
    *,
    rate: float,
    steps: int,
) -> Architecture:
    """`M* = argmin_M L~(M(K); V)` by gradient descent (Eq. 6): a memory of these pairs."""
    for _ in range(steps):
        grads = objective.gradient(memory, key, value)
        memory = memory.replace(
            tuple(gd(w, g, rate) for w, g in zip(memory.weights, grads, strict=True))
        )
    return memory


def descent(objective: Objective) -> Rule:
    """A matrix memory that descends an objective of the write's pairs: keys `x`, values `u`.

    With `dot` it is linear attention and (with retention) every Hebbian memory, with `l2` DeltaNet,
    with `oja` OjaNet (Eq. 18, 64-65, 67). The write's own gradient is not used.
    """

    def step(write: Write, state: State, weight: Tensor, gates: Gates) -> tuple[Write, State]:
        x, u = pairs(write, "descent")
        (grad,) = objective.gradient(Matrix(weight), x, u)
        return write._replace(grad=grad), state

    return Rule(lambda weight: (), step, needs_pairs=True)


def forward_layers(
    weights: Sequence[Tensor], activation: Activation, x: Tensor
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Output of a stack of linear layers, each layer's input x_l, and its product z_l = W_l x_l."""
    inputs, products = [x], [x @ weights[0].mT]
    for weight in weights[1:]:
        inputs.append(activation(products[-1]))
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
