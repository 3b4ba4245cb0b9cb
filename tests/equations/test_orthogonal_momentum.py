"""Muon, Newton-Schulz and M3 (Eq. 42-44, 75)."""

from __future__ import annotations

import pytest
import torch

from nestling.paper.exhibits.momentum import momentum_step
from nestling.rules import Gates, Write, apply
from nestling.rules.multiscale import multiscale_literal
from nestling.rules.muon import muon
from nestling.rules.newton_schulz import CUBIC, newton_schulz, newton_schulz_naive


@pytest.mark.equation(42)
def test_muon_steps_along_the_orthogonalised_momentum():
    weight = start = torch.randn(4, 6, dtype=torch.float64)
    expected, memory = start, torch.zeros_like(start)
    rule, eta = muon(decay=0.9, nesterov=False, scale="none"), 0.3
    state = rule.init(weight)
    for step in range(1, 5):
        grad = torch.randn_like(weight)
        weight, state = apply(rule, weight, Write(grad), state, Gates(rate=eta, step=step))
        _, memory = momentum_step(expected, memory, grad, retain=0.9, rate=eta)
        expected = expected + eta * newton_schulz_naive(memory)
    torch.testing.assert_close(weight, expected)


@pytest.mark.equation(43, 44)
@pytest.mark.parametrize("shape", [(5, 5), (4, 9), (9, 4)])
def test_newton_schulz_is_gradient_descent_on_orthogonality(shape):
    matrix = torch.randn(shape, dtype=torch.float64)
    out = matrix / matrix.norm()
    for steps in range(1, 4):
        free = out.clone().requires_grad_(True)
        loss = (free.mT @ free - torch.eye(shape[1], dtype=torch.float64)).square().sum()
        (slope,) = torch.autograd.grad(loss, free)
        out = out - slope / 8
        torch.testing.assert_close(newton_schulz(matrix, steps, CUBIC), out)
        torch.testing.assert_close(newton_schulz_naive(matrix, steps, CUBIC), out)
    done = newton_schulz(matrix, 40, CUBIC)
    small = done @ done.mT if shape[0] <= shape[1] else done.mT @ done
    torch.testing.assert_close(small, torch.eye(min(shape), dtype=torch.float64))


@pytest.mark.equation(75)
def test_algorithm_1_line_by_line():
    eta, b1, b2, b3, alpha, eps, f = 0.1, 0.9, 0.8, 0.7, 0.5, 1e-3, 3
    theta = torch.randn(4, 6, dtype=torch.float64)
    grads = torch.randn(4 * f, 4, 6, dtype=torch.float64)
    rule = multiscale_literal(beta1=b1, beta2=b2, beta3=b3, slow_weight=alpha, eps=eps, chunk=f)
    ours, state = theta, rule.init(theta)
    for t, g in enumerate(grads, 1):
        ours, state = apply(rule, ours, Write(g), state, Gates(rate=eta, step=t))

    m1 = m2 = v = torch.zeros_like(theta)
    for k in range(4):
        if k > 0:
            m2 = m2 + b3 * grads[(k - 1) * f : k * f].sum(0)
        o2 = newton_schulz_naive(m2)
        for t in range(k * f, (k + 1) * f):
            g = grads[t]
            m1 = m1 + b1 * g
            v = v + b2 * g**2
            theta = theta - eta * (newton_schulz_naive(m1) + alpha * o2) / (v.sqrt() + eps)
    torch.testing.assert_close(ours, theta)
