"""Section 1: descent, layers, backpropagation and momentum as memories (Eq. 1-3, 5-13, 29-34)."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from nestling.activations import gelu
from nestling.objectives import Matrix, TwoLayer, l2
from nestling.paper.exhibits.gd import (
    argmin,
    associate,
    backprop_proximal,
    backprop_step,
    forward_layers,
    gd,
    gd_leader,
    gd_proximal,
    layer_gd,
    layer_proximal,
    surprises,
    train_layer,
)
from nestling.paper.exhibits.momentum import (
    momentum_layer_proximal,
    momentum_proximal,
    momentum_step,
)
from nestling.paper.exhibits.sequence import Context, fast_weights
from nestling.rules import identity, momentum
from nestling.rules.core import Gates, Write, apply

RATE = 0.07


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


def loss_and_gradient(weight, x, target):
    leaf = weight.clone().requires_grad_()
    loss = functional.cross_entropy(x @ leaf.mT, target)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


@pytest.mark.equation(1, 2, 3)
def test_the_three_forms_of_gradient_descent_agree():
    start = weight = proximal = ruled = double(4, 3)
    grads = []
    for _ in range(6):
        x, target = double(5, 3), torch.randint(4, (5,))
        _, grad = loss_and_gradient(weight, x, target)
        grads.append(grad)
        weight = gd(weight, grad, RATE)
        proximal = gd_proximal(proximal, grad, RATE)
        ruled, _ = apply(identity, ruled, Write(grad), (), Gates(RATE))
        close(proximal, weight)
        close(ruled, weight)
        close(gd_leader(start, grads, RATE), weight)
    assert not torch.allclose(weight, start)


def test_argmin_finds_the_minimum_of_a_loss_that_is_not_quadratic():
    loss = lambda w: (w.exp() - 2.0 * w).sum()  # noqa: E731
    expected = torch.full((3,), 2.0, dtype=torch.float64).log()
    close(argmin(loss, torch.zeros(3, dtype=torch.float64), steps=8), expected)


@pytest.mark.equation(5)
def test_fast_weights_are_a_decayed_sum_of_outer_products():
    keys, values, queries = double(6, 3), double(6, 4), double(6, 3)
    retain = torch.rand(6, dtype=torch.float64)
    start = double(4, 3)
    phi = lambda x: functional.elu(x) + 1.0  # noqa: E731
    reads, memory = fast_weights(start, Context(keys, values, queries), phi, retain=retain)
    for t in range(6):
        expected = retain[: t + 1].prod() * start
        for s in range(t + 1):
            kept = retain[s + 1 : t + 1].prod()
            expected = expected + kept * torch.outer(values[s], phi(keys[s]))
        close(reads[t], expected @ phi(queries[t]))
    close(memory, expected)


@pytest.mark.equation(6)
def test_an_associative_memory_minimises_its_objective_over_the_pairs():
    keys, values = double(12, 3), double(12, 4)
    best = associate(
        l2, Matrix(torch.zeros(4, 3, dtype=torch.float64)), keys, values, rate=0.03, steps=3000
    )
    close(best.weight, torch.linalg.lstsq(keys, values).solution.mT)
    deep = TwoLayer(0.5 * double(3, 16), 0.5 * double(16, 3))
    values = double(4, 3)
    learned = associate(l2, deep, keys[:4], values, rate=0.05, steps=1500)
    assert l2.loss(learned, keys[:4], values).max() < 1e-3 * l2.loss(deep, keys[:4], values).min()


@pytest.mark.equation(7, 8, 9)
def test_training_a_linear_layer_is_writing_surprise_at_its_inputs():
    weight, x, target = double(4, 3), double(5, 3), torch.randint(4, (5,))
    y = (x @ weight.mT).requires_grad_()
    (surprise,) = torch.autograd.grad(functional.cross_entropy(y, target), y)
    stepped = layer_gd(weight, x, surprise, RATE)
    _, grad = loss_and_gradient(weight, x, target)
    close(stepped, weight - RATE * grad)
    close(layer_proximal(weight, x, surprise, RATE), stepped)

    truth = double(4, 3)
    data = [(batch, batch @ truth.mT) for batch in double(400, 8, 3)]
    trained = train_layer(weight, data, lambda y, goal: (y - goal) / 8, 0.2)
    close(trained, truth)


@pytest.mark.equation(10, 11, 12, 13)
def test_momentum_is_a_two_level_system_and_torch_s_sgd():
    start = double(4, 3)
    theirs = start.clone().requires_grad_()
    optimizer = torch.optim.SGD([theirs], lr=RATE, momentum=1.0)
    rule = momentum(1.0)
    weight = proximal = ruled = start
    memory, proximal_memory, state = (
        torch.zeros_like(start),
        torch.zeros_like(start),
        rule.init(start),
    )
    for step in range(1, 9):
        x, target = double(5, 3), torch.randint(4, (5,))
        _, grad = loss_and_gradient(weight, x, target)
        weight, memory = momentum_step(weight, memory, grad, rate=RATE)
        proximal, proximal_memory = momentum_proximal(proximal, proximal_memory, grad, rate=RATE)
        ruled, state = apply(rule, ruled, Write(grad), state, Gates(RATE, 1.0, step))
        theirs.grad = grad
        optimizer.step()
        close(weight, theirs.detach())
        close(proximal, weight)
        close(proximal_memory, -memory)
        close(ruled, weight)


@pytest.mark.equation(29, 30, 31)
def test_backpropagation_gives_every_layer_a_memory_of_its_surprise():
    weights = [double(6, 3), double(5, 6), double(4, 5)]
    x, target = double(7, 3), torch.randint(4, (7,))
    leaves = [w.clone().requires_grad_() for w in weights]
    y = forward_layers(leaves, gelu, x)[0]
    loss = functional.cross_entropy(y, target)
    grads = torch.autograd.grad(loss, [y, *leaves])
    signals = surprises(weights, gelu, x, grads[0])
    for signal, grad in zip(signals, grads[1:], strict=True):
        close(signal.gradient, grad)
    stepped = backprop_step(weights, signals, RATE)
    remembered = backprop_proximal(weights, signals, RATE)
    for new, proximal, old, grad in zip(stepped, remembered, weights, grads[1:], strict=True):
        close(new, old - RATE * grad)
        close(proximal, new)


@pytest.mark.equation(32, 33, 34)
def test_momentum_with_decay_maps_inputs_to_surprise():
    weight, memory, decay = double(4, 3), torch.zeros(4, 3, dtype=torch.float64), 0.8
    rule, state, ruled = momentum(decay), None, weight
    state = rule.init(weight)
    pairs = []
    for step in range(1, 7):
        x, delta = double(2, 3), double(2, 4)
        pairs.append((x, delta))
        grad = delta.mT @ x
        solved = momentum_layer_proximal(memory, x, delta, retain=decay, rate=RATE)
        weight, memory = momentum_step(weight, memory, grad, retain=decay, rate=RATE)
        close(solved, memory)
        history = sum(decay ** (step - i) * d.mT @ k for i, (k, d) in enumerate(pairs, start=1))
        close(memory, -RATE * history)
        ruled, state = apply(rule, ruled, Write(grad), state, Gates(RATE, 1.0, step))
        close(ruled, weight)
