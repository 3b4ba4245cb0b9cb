"""The one test every rule of this family takes: it descends on a quadratic and on a small MLP."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nestling import rules
from nestling.rules import Gates, Write, apply
from nestling.rules.deep_momentum import deep_momentum
from nestling.rules.delta_momentum import delta_momentum, delta_momentum_literal
from nestling.rules.momentum import feature_momentum, momentum, nonlinear, polynomial, power, squash
from nestling.rules.newton_schulz import newton_schulz

RULES = {  # rule, rate on the quadratic, rate on the MLP
    "muon": (rules.muon(), 0.2, 0.05),
    "adamuon": (rules.adamuon(), 0.2, 0.1),
    "m3": (rules.multiscale(chunk=4), 0.5, 0.1),
    "m3 update": (rules.multiscale(chunk=4, second="update"), 0.5, 0.1),
    "m3 plain": (rules.multiscale(chunk=4, second="none"), 0.5, 0.1),
    "delta momentum": (delta_momentum(), 0.5, 1.0),
    "delta momentum, entries": (delta_momentum(elementwise=True), 0.5, 2.0),
    "deep momentum": (deep_momentum(), 0.2, 0.5),
    "feature momentum, polynomial": (feature_momentum(polynomial(1.0, 0.1)), 0.1, 0.2),
    "feature momentum, power": (feature_momentum(power(0.5)), 0.1, 0.5),
    "nonlinear": (nonlinear(momentum(0.9), squash()), 0.1, 0.5),
    "nonlinear deep": (nonlinear(deep_momentum(), newton_schulz), 0.1, 0.05),
}
MATRICES_ONLY = {"muon", "adamuon", "nonlinear deep"}


def quadratic(shape):
    scale = torch.linspace(0.3, 1.5, shape[-1]) if shape else torch.tensor(1.0)
    goal = torch.randn(shape)
    return lambda weight: (scale * (weight - goal).square()).sum() / 2


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("shape", [(6, 4), (3, 7), (5,), ()])
def test_descends_on_a_quadratic(name, shape):
    if len(shape) < 2 and name in MATRICES_ONLY:
        pytest.skip("orthogonalises: matrices only")
    rule, rate, _ = RULES[name]
    loss, weight = quadratic(shape), torch.zeros(shape)
    state, first = rule.init(weight), loss(weight)
    for step in range(1, 151):
        grad = torch.func.grad(loss)(weight)
        gates = Gates(rate=rate * min(1.0, (150 - step) / 75), step=step)
        weight, state = apply(rule, weight, Write(grad), state, gates)
    assert loss(weight) < 0.03 * first


@pytest.mark.parametrize("name", RULES)
def test_descends_on_a_small_mlp(name):
    rule, _, rate = RULES[name]
    fallback = momentum(0.9)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    x = torch.randn(64, 6)
    target = torch.sin(x @ torch.randn(6, 3))
    states, first, last = {}, None, None
    for step in range(1, 121):
        loss = (model(x) - target).square().mean()
        first = loss if first is None else first
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                matrix = parameter.ndim == 2 or name not in MATRICES_ONLY
                used = rule if matrix else fallback
                state = states.get(parameter) or used.init(parameter)
                gates = Gates(rate=rate if matrix else 0.02, step=step)
                new, states[parameter] = apply(
                    used, parameter.detach(), Write(parameter.grad), state, gates
                )
                parameter.copy_(new)
        last = loss
    assert last < 0.4 * first


def test_literal_m3_descends_if_slowly():
    """Its V only grows, so the steps die out: deviation 10."""
    rule, loss, weight = rules.multiscale_literal(chunk=4), quadratic((6, 4)), torch.zeros(6, 4)
    state, first = rule.init(weight), loss(weight)
    for step in range(1, 151):
        grad = torch.func.grad(loss)(weight)
        weight, state = apply(rule, weight, Write(grad), state, Gates(rate=0.3, step=step))
    assert loss(weight) < 0.5 * first


def test_literal_delta_momentum_descends_on_small_gradients_and_diverges_on_large_ones():
    def final(scale):
        loss = quadratic((4, 6))
        weight, rule = torch.zeros(4, 6), delta_momentum_literal()
        state = rule.init(weight)
        for _ in range(40):
            grad = scale * torch.func.grad(loss)(weight)
            weight, state = apply(rule, weight, Write(grad), state, Gates(rate=0.05 / scale))
        return loss(weight) / loss(torch.zeros(4, 6))

    assert final(0.01) < 0.1
    assert not final(3.0) < 1e6


@pytest.mark.parametrize("name", RULES)
def test_steps_are_differentiable(name):
    """Fast weights learn by these rules: a later loss reaches the gradients that came before."""
    rule, rate, _ = RULES[name]
    if name == "adamuon":
        pytest.skip("takes the sign of the momentum, which has no slope")
    weight, grads = torch.randn(3, 5), torch.randn(5, 3, 5, requires_grad=True)
    state = rule.init(weight)
    for step, grad in enumerate(grads, 1):
        weight, state = apply(rule, weight, Write(grad), state, Gates(rate=rate, step=step))
    (slope,) = torch.autograd.grad(weight.square().sum(), grads)
    assert slope.isfinite().all()
    assert (slope.flatten(1).norm(dim=1) > 0).all()
