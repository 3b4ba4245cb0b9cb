"""Adam and AdaGrad as memories of gradients (Eq. 100-111).

Ask an element-wise memory to answer every gradient with one and the same property P of their past:

    m* = argmin sum_i |m . g_i - P|^2 + lam |m|^2 = (H + lam)^-1 . M~ . P,
    M~ = sum g_i,  H = sum g_i^2

P = sum g^2 gives back momentum; P = sqrt(sum g^2) gives Adam. With the rates of the paper
(M~ += beta1 g, H += beta2 g^2, so sum g^2 = H / beta2) its direction is `M~ / sqrt(beta2 H)`.
`adam_literal` is that rule to the letter, which never forgets; `nestling.rules.adam` keeps moving
averages with bias correction, as everyone does.

That memory treats every entry alone. Let it see directions instead (outer products, Eq. 106-111):
gradients are vectors g_i, a vector m answers each with <m, g_i>, and the property P is an operator:

    m* = argmin sum_i <m, g_i>^2 - 2 <m, P g_i> + lam |m|^2 = (H + lam I)^-1 P M~,
    M~ = sum g_i,  H = sum g_i g_i^T

For P = p I this is `sum_i |<m, g_i> - p|^2 + lam |m|^2` up to a constant, and in the eigenbasis of
H it is the element-wise objective of Eq. 101. P = H^{1/2} = sqrt(sum g g^T) gives full-matrix
AdaGrad with momentum, `H^{-1/2} M~` (with the paper's rates: `/ sqrt(beta2)`).

Matrices [..., Do, Di] are Di vectors that share one H = sum G G^T (as in one side of Shampoo).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nestling.checks import require
from nestling.rules.adam import Moments, affine
from nestling.rules.core import Gates, Rule, State, Write
from nestling.rules.momentum import accumulate


def elementwise_loss(memory: Tensor, grads: Tensor, value: Tensor, lam: float) -> Tensor:
    """`sum_i |m . g_i - P|^2 + lam |m|^2` (Eq. 101); grads [N, *weight]."""
    return (memory * grads - value).square().sum() + lam * memory.square().sum()


def moments(old: Moments, grad: Tensor, *, beta1: float = 1.0, beta2: float = 1.0) -> Moments:
    """`M~ + beta1 g` and `H + beta2 g^2`: all the optimum needs of the past (Eq. 102)."""
    first = accumulate(old.first, grad, retain=1.0, rate=beta1)
    return Moments(first, torch.addcmul(old.second, grad, grad, value=beta2))


def elementwise_optimum(past: Moments, value: Tensor, lam: float = 0.0) -> Tensor:
    """`(H + lam)^-1 . M~ . P`, where the loss of Eq. 101 is smallest (Eq. 102)."""
    return past.first * value / (past.second + lam)


def momentum_value(past: Moments, beta2: float = 1.0) -> Tensor:
    """`P = sum g^2`: the optimum is momentum (Eq. 104)."""
    return past.second / beta2


def adam_value(past: Moments, beta2: float = 1.0) -> Tensor:
    """`P = sqrt(sum g^2)`: the optimum is Adam's direction (Eq. 105)."""
    return (past.second / beta2).sqrt()


def memory_step(
    weight: Tensor, past: Moments, value: Tensor, *, rate: float, lam: float = 0.0
) -> Tensor:
    """`W - eta m*` with the optimal memory of all gradients (Eq. 100, 103)."""
    return weight - rate * elementwise_optimum(past, value, lam)


def adam_literal(beta1: float = 0.9, beta2: float = 0.999, *, eps: float = 1e-8) -> Rule:
    """`M~ / (sqrt(beta2 H) + eps)` with `M~ + beta1 g`, `H + beta2 g^2` (Eq. 105 as printed)."""

    def init(weight: Tensor) -> Moments:
        return Moments(torch.zeros_like(weight), torch.zeros_like(weight))

    def step(write: Write, state: State, weight: Tensor, gates: Gates) -> tuple[Write, State]:
        past = moments(state, write.grad, beta1=beta1, beta2=beta2)
        grad = past.first / affine(past.second.sqrt(), math.sqrt(beta2), eps)
        return write._replace(grad=grad), past

    return Rule(init, step, elementwise=True)


def outer_loss(memory: Tensor, grads: Tensor, value: Tensor, lam: float) -> Tensor:
    """`sum_i <m, g_i>^2 - 2 <m, P g_i> + lam |m|^2` (Eq. 107); grads [N, D], value [D, D]."""
    recall = (grads @ memory).square().sum() - 2.0 * memory @ (value @ grads.sum(0))
    return recall + lam * memory.square().sum()


def outer_moments(old: Moments, grad: Tensor, *, beta1: float = 1.0, beta2: float = 1.0) -> Moments:
    """`M~ + beta1 g` and `H + beta2 g g^T` (Eq. 109-110); grad [..., D, n] holds n vectors."""
    return Moments(
        accumulate(old.first, grad, retain=1.0, rate=beta1),
        accumulate(old.second, grad @ grad.mT, retain=1.0, rate=beta2),
    )


def outer_optimum(past: Moments, value: Tensor, lam: float = 0.0) -> Tensor:
    """`(H + lam I)^-1 P M~`, where the loss of Eq. 107 is smallest (Eq. 108)."""
    eye = torch.eye(past.second.shape[-1], dtype=value.dtype, device=value.device)
    return torch.linalg.solve(past.second + lam * eye, value @ past.first)


def adagrad_value(past: Moments, beta2: float = 1.0) -> Tensor:
    """`P = sqrt(sum g g^T)`: the optimum is AdaGrad's direction (Eq. 111)."""
    return matrix_power(past.second / beta2, 0.5)


def adagrad_memory_step(
    weight: Tensor, past: Moments, value: Tensor, *, rate: float, lam: float = 0.0
) -> Tensor:
    """`W - eta m*` with the optimal memory of all gradients (Eq. 106)."""
    return weight - rate * outer_optimum(past, value, lam)


def matrix_power(matrix: Tensor, exponent: float, eps: float = 0.0) -> Tensor:
    """A power of a symmetric positive semi-definite matrix; eigenvalues are raised by eps."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * (values.clamp(min=0.0) + eps).pow(exponent).unsqueeze(-2)) @ vectors.mT


def adagrad_memory(beta1: float = 1.0, beta2: float = 1.0, *, eps: float = 1e-8) -> Rule:
    """Full-matrix AdaGrad with momentum, `H^{-1/2} M~ / sqrt(beta2)` (Eq. 106-111).

    State and cost grow with the square and the cube of Do. A vector [D] is one column (H is D x D).
    `eps` is added to H's eigenvalues. Do not differentiate through it while H has a null space:
    eigenvectors of repeated eigenvalues have no derivative.
    """
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        require(beta > 0.0, f"adagrad_memory: {name}", beta, "positive")

    def init(weight: Tensor) -> Moments:
        size = weight.shape[-2] if weight.ndim > 1 else weight.numel()
        square = weight.new_zeros(*weight.shape[:-2], size, size)
        return Moments(torch.zeros_like(weight), square)

    def step(write: Write, state: State, weight: Tensor, gates: Gates) -> tuple[Write, State]:
        column = write.grad if weight.ndim > 1 else write.grad.reshape(-1, 1)
        old = Moments(state.first.reshape(column.shape), state.second)
        past = outer_moments(old, column, beta1=beta1, beta2=beta2)
        grad = matrix_power(past.second, -0.5, eps) @ past.first / math.sqrt(beta2)
        after = Moments(past.first.reshape(weight.shape), past.second)
        return write._replace(grad=grad.reshape(weight.shape)), after

    return Rule(init, step)
