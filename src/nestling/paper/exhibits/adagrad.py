"""AdaGrad as a memory of gradients with outer products (Eq. 106-111).

The element-wise memory of `adam.py` treats every entry alone. Let it see directions instead:
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
from nestling.rules.adam import Moments
from nestling.rules.core import Gates, Rule, State, Write
from nestling.rules.momentum import accumulate


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
