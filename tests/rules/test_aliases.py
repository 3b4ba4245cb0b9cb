"""Compositions of rules equal torch's optimizers, step by step, in float64."""

from __future__ import annotations

import pytest
import torch

from nestling import rules
from nestling.rules.core import Gates, Write, apply

STEPS = 30
SHAPES = [(6, 5), (4,), ()]

CASES = {
    "sgd": (rules.sgd(), torch.optim.SGD, {}),
    "sgd, weight decay": (rules.sgd(l2=0.1), torch.optim.SGD, {"weight_decay": 0.1}),
    "momentum": (rules.sgd(0.9), torch.optim.SGD, {"momentum": 0.9}),
    "momentum, dampening, weight decay": (
        rules.sgd(0.8, dampening=0.3, l2=0.1),
        torch.optim.SGD,
        {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1},
    ),
    "nesterov": (
        rules.sgd(0.9, nesterov=True),
        torch.optim.SGD,
        {"momentum": 0.9, "nesterov": True},
    ),
    "adam": (rules.adam(), torch.optim.Adam, {}),
    "adam, other betas": (
        rules.adam(0.7, 0.8, eps=1e-3),
        torch.optim.Adam,
        {"betas": (0.7, 0.8), "eps": 1e-3},
    ),
    "adamw": (rules.adamw(), torch.optim.AdamW, {}),
    "adamw, decay": (rules.adamw(decay=0.3), torch.optim.AdamW, {"weight_decay": 0.3}),
    "amsgrad": (rules.amsgrad(0.5, 0.6), torch.optim.Adam, {"betas": (0.5, 0.6), "amsgrad": True}),
    "nadam": (rules.nadam(), torch.optim.NAdam, {}),
    "radam": (rules.radam(), torch.optim.RAdam, {}),
    "radam, short": (rules.radam(0.9, 0.7), torch.optim.RAdam, {"betas": (0.9, 0.7)}),
    "adagrad": (rules.adagrad(), torch.optim.Adagrad, {}),
    "adagrad, rate decay": (
        rules.adagrad(rate_decay=0.1, start=0.2, eps=1e-4),
        torch.optim.Adagrad,
        {"lr_decay": 0.1, "initial_accumulator_value": 0.2, "eps": 1e-4},
    ),
    "rmsprop": (rules.rmsprop(), torch.optim.RMSprop, {}),
    "rmsprop, centered": (
        rules.rmsprop(0.9, centered=True, eps=1e-4),
        torch.optim.RMSprop,
        {"alpha": 0.9, "centered": True, "eps": 1e-4},
    ),
    "rmsprop, momentum": (rules.rmsprop(follow=0.9), torch.optim.RMSprop, {"momentum": 0.9}),
    "rmsprop, centered, momentum": (
        rules.rmsprop(centered=True, follow=0.5),
        torch.optim.RMSprop,
        {"centered": True, "momentum": 0.5},
    ),
}


def gradient(weight, noise):
    """Of a loss that is not quadratic, with noise."""
    return torch.sin(weight) + 0.5 * weight + noise


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_equals_torch(name, shape):
    rule, optimizer, settings = CASES[name]
    weight = torch.randn(shape, dtype=torch.float64)
    theirs = weight.clone().requires_grad_()
    reference = optimizer([theirs], lr=0.02, foreach=False, **settings)
    state = rule.init(weight)
    for step in range(1, STEPS + 1):
        grad = gradient(weight, 0.3 * torch.randn(shape, dtype=torch.float64))
        before = weight
        weight, state = apply(rule, weight, Write(grad), state, Gates(0.02, 1.0, step))
        theirs.grad = grad.clone()
        reference.step()
        assert not torch.equal(weight, before)
        tolerance = 1e-8 if name == "nadam" else 1e-11  # torch keeps NAdam's product in float32
        torch.testing.assert_close(weight, theirs.detach(), rtol=tolerance, atol=tolerance)


def test_sgd_and_momentum_with_a_rate_that_changes_equal_torch():
    weight = torch.randn(3, dtype=torch.float64)
    theirs = weight.clone().requires_grad_()
    reference = torch.optim.SGD([theirs], lr=1.0, momentum=0.9)
    rule = rules.momentum(0.9)
    state = rule.init(weight)
    for step in range(1, STEPS + 1):
        grad, rate = gradient(weight, 0.0), 0.1 / step
        reference.param_groups[0]["lr"] = rate
        weight, state = apply(rule, weight, Write(grad), state, Gates(rate, 1.0, step))
        theirs.grad = grad.clone()
        reference.step()
        torch.testing.assert_close(weight, theirs.detach())


def test_adamw_by_retention_is_adamw_by_weight_decay():
    weight = other = torch.randn(4, 3, dtype=torch.float64)
    chained, plain = rules.adamw(decay=0.2), rules.adam()
    one, two = chained.init(weight), plain.init(weight)
    for step in range(1, STEPS + 1):
        grad = gradient(weight, 0.1)
        weight, one = apply(chained, weight, Write(grad), one, Gates(0.05, 1.0, step))
        retain = 1.0 - 0.05 * 0.2
        other, two = apply(plain, other, Write(grad), two, Gates(0.05, retain, step))
        torch.testing.assert_close(weight, other)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lion_is_its_published_algorithm(decay):
    beta1, beta2, rate = 0.9, 0.99, 0.01
    rule = rules.lion(beta1, beta2, decay=decay)
    weight = other = torch.randn(4, 3, dtype=torch.float64)
    state, average = rule.init(weight), torch.zeros_like(weight)
    for step in range(1, STEPS + 1):
        grad = gradient(weight, torch.randn(4, 3, dtype=torch.float64))
        weight, state = apply(rule, weight, Write(grad), state, Gates(rate, 1.0, step))
        update = torch.sign(beta1 * average + (1 - beta1) * grad)
        other = other - rate * (update + decay * other)
        average = beta2 * average + (1 - beta2) * grad
        torch.testing.assert_close(weight, other)


def test_signs():
    weight, grad = torch.zeros(3), torch.tensor([2.0, 0.0, -0.1])
    write, _ = rules.signsgd.step(Write(grad), (), weight, Gates())
    assert write.grad.tolist() == [1.0, 0.0, -1.0]
    signum = rules.signum(0.9)
    write, state = signum.step(Write(grad), signum.init(weight), weight, Gates())
    write, _ = signum.step(Write(-0.5 * grad), state, weight, Gates(step=2))
    assert write.grad.tolist() == [1.0, 0.0, -1.0]  # 0.9 * 2 - 1 > 0
