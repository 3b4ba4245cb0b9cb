"""Section 3: momentum by any objective, preconditioning, Adam and AdaGrad as memories."""

from __future__ import annotations

import math

import pytest
import torch

from nestling.objectives import Matrix, dot, l2, lp
from nestling.paper.exhibits.adam import (
    adagrad_memory,
    adagrad_memory_step,
    adagrad_value,
    adam_literal,
    adam_value,
    elementwise_loss,
    elementwise_optimum,
    matrix_power,
    memory_step,
    moments,
    momentum_value,
    outer_loss,
    outer_moments,
    outer_optimum,
)
from nestling.paper.exhibits.gd import argmin
from nestling.paper.exhibits.momentum import (
    generalised_momentum,
    generalised_momentum_proximal,
    generalised_momentum_step,
    momentum_step,
)
from nestling.paper.exhibits.precondition import (
    learn_preconditioner,
    precondition,
    precondition_loss,
    preconditioned_gd,
    preconditioned_momentum,
    preconditioned_momentum_step,
)
from nestling.rules import adam, stateless
from nestling.rules.adam import Moments
from nestling.rules.core import Gates, Write, apply

RATE, DECAY = 0.05, 0.9


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.float64)


def close(ours, theirs, tolerance=1e-9):
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def spd(size, low=1.0, high=10.0):
    """A symmetric matrix with eigenvalues from low to high."""
    q, _ = torch.linalg.qr(double(size, size))
    return (q * torch.linspace(low, high, size, dtype=torch.float64)) @ q.mT


@pytest.mark.equation(35, 36, 37)
def test_generalised_momentum_with_a_dot_product_is_momentum():
    weight, memory, plain, plain_memory = double(4, 3), zeros(4, 3), None, zeros(4, 3)
    plain = weight
    rule = generalised_momentum(dot, decay=DECAY)
    ruled, state = weight, rule.init(weight)
    for step in range(1, 6):
        x, u = double(2, 3), double(2, 4)
        solved = generalised_momentum_proximal(memory, x, u, dot, retain=DECAY, rate=RATE)
        weight, memory = generalised_momentum_step(
            weight, memory, x, u, dot, retain=DECAY, rate=RATE
        )
        plain, plain_memory = momentum_step(plain, plain_memory, -u.mT @ x, retain=DECAY, rate=RATE)
        ruled, state = apply(rule, ruled, Write(-u.mT @ x, x, u), state, Gates(RATE, 1.0, step))
        close(solved, memory)
        close(weight, plain)
        close(memory, plain_memory)
        close(ruled, plain)


@pytest.mark.equation(35, 36, 37)
@pytest.mark.parametrize("objective", [l2, lp(4.0)], ids=["l2", "l4"])
def test_generalised_momentum_descends_the_objective_it_is_given(objective):
    weight, memory, x, u = double(4, 3), 0.3 * double(4, 3), double(2, 3), double(2, 4)
    leaf = memory.clone().requires_grad_()
    (grad,) = torch.autograd.grad(objective.loss(Matrix(leaf), x, u).sum(), leaf)
    stepped, after = generalised_momentum_step(
        weight, memory, x, u, objective, retain=DECAY, rate=RATE
    )
    close(after, DECAY * memory - RATE * grad)
    close(stepped, weight + after)
    # the step is the first order of the argmin: their difference falls with the square of the rate
    small = [
        (
            generalised_momentum_proximal(memory, x, u, objective, retain=1.0, rate=rate)
            - generalised_momentum_step(weight, memory, x, u, objective, retain=1.0, rate=rate)[1]
        ).norm()
        for rate in (1e-3, 5e-4)
    ]
    assert 3.5 < small[0] / small[1] < 4.5


@pytest.mark.equation(38, 39, 40, 41)
def test_a_preconditioner_learns_curvature_as_a_memory_and_makes_newton_s_step():
    curvature, goal = spd(4), double(4, 3)
    memory = torch.eye(4, dtype=torch.float64)
    keys = double(4, 8)
    before = precondition_loss(memory, keys, curvature @ keys)
    for _ in range(4000):
        keys = double(4, 8)
        memory = learn_preconditioner(memory, keys, curvature @ keys, rate=0.05)
    assert precondition_loss(memory, keys, curvature @ keys) < 1e-18 * before
    close(memory, curvature, 1e-8)
    weight = double(4, 3)
    close(preconditioned_gd(weight, curvature @ (weight - goal), memory, 1.0), goal, 1e-8)


@pytest.mark.equation(39, 41)
@pytest.mark.parametrize("pairs", [4, 5])  # as many as rows: what is transposed changes numbers
def test_the_preconditioner_s_own_descent_equals_autograd(pairs):
    memory, keys, grads = double(4, 4), double(4, pairs), double(4, pairs)
    for objective in (l2, dot):
        leaf = memory.clone().requires_grad_()
        loss = precondition_loss(leaf, keys, grads, objective)
        (slope,) = torch.autograd.grad(loss, leaf)
        ours = learn_preconditioner(memory, keys, grads, rate=RATE, objective=objective)
        close(ours, memory - RATE * slope)


@pytest.mark.equation(38, 40, 41)
@pytest.mark.parametrize("batch", [(), (2,)])
def test_a_preconditioner_trained_online_overtakes_gradient_descent(batch):
    curvature, goal = spd(4, 0.1, 10.0), double(*batch, 4, 3)

    def error_after(rule, rate, steps=150):
        weight = torch.zeros_like(goal)
        state = rule.init(weight)
        for step in range(1, steps + 1):
            grad = curvature @ (weight - goal)
            weight, state = apply(rule, weight, Write(grad), state, Gates(rate, 1.0, step))
        return (weight - goal).norm() / goal.norm()

    plain = error_after(stateless(lambda g: g), 0.18)  # close to the largest stable rate, 2 / 10
    learned = error_after(precondition(start=10.0), 0.5)
    assert learned < 0.01 * plain


@pytest.mark.equation(46, 47)
def test_momentum_may_map_gradients_to_values_other_than_one():
    weight, memory, value = double(4, 3), zeros(4, 3), spd(4)
    rule = preconditioned_momentum(stateless(lambda grad: value @ grad), DECAY)
    ruled, state, grads = weight, rule.init(weight), []
    for step in range(1, 6):
        grad = double(4, 3)
        grads.append(grad)
        before = weight
        weight, memory = preconditioned_momentum_step(
            weight, memory, grad, value, retain=DECAY, rate=RATE
        )
        ruled, state = apply(rule, ruled, Write(grad), state, Gates(RATE, 1.0, step))
        history = sum(DECAY ** (step - i) * g for i, g in enumerate(grads, start=1))
        close(memory, -RATE * value @ history)
        close(weight, before + memory)
        close(ruled, weight)


@pytest.mark.equation(101, 102)
@pytest.mark.parametrize("lam", [0.0, 0.3])
def test_the_element_wise_memory_s_optimum_is_where_its_loss_is_smallest(lam):
    grads, value = double(7, 2, 3), double(2, 3)
    past = Moments(zeros(2, 3), zeros(2, 3))
    for grad in grads:
        past = moments(past, grad)
    best = elementwise_optimum(past, value, lam)
    close(best, argmin(lambda m: elementwise_loss(m, grads, value, lam), zeros(2, 3)))
    lowest = elementwise_loss(best, grads, value, lam)
    for _ in range(20):
        assert elementwise_loss(best + 0.01 * double(2, 3), grads, value, lam) > lowest


def history(beta1, beta2, steps=6, shape=(3, 2)):
    grads = double(steps, *shape)
    past = Moments(zeros(*shape), zeros(*shape))
    for grad in grads:
        past = moments(past, grad, beta1=beta1, beta2=beta2)
    return grads, past


@pytest.mark.equation(100, 103, 104)
def test_a_memory_of_the_sum_of_squares_is_momentum():
    beta2 = 0.7
    grads, past = history(1.0, beta2)
    weight = double(3, 2)
    close(momentum_value(past, beta2), grads.square().sum(0))
    stepped = memory_step(weight, past, beta2 * momentum_value(past, beta2), rate=RATE)
    by_momentum, _ = momentum_step(weight, zeros(3, 2), grads.sum(0), rate=RATE)
    close(stepped, by_momentum)


@pytest.mark.equation(100, 102, 103, 105)
def test_a_memory_of_the_root_of_the_sum_of_squares_is_adam():
    beta1, beta2 = 0.4, 0.7
    grads, past = history(beta1, beta2)
    close(past.first, beta1 * grads.sum(0))
    close(past.second, beta2 * grads.square().sum(0))
    weight = double(3, 2)
    stepped = memory_step(weight, past, adam_value(past, beta2), rate=RATE)
    close(stepped, weight - RATE / math.sqrt(beta2) * past.first / past.second.sqrt())
    rule = adam_literal(beta1, beta2, eps=0.0)
    ruled, state = weight, rule.init(weight)
    for step, grad in enumerate(grads, start=1):
        write, state = rule.step(Write(grad), state, ruled, Gates(RATE, 1.0, step))
    close(weight - RATE * write.grad, stepped)
    # with moving averages the same formula is everyone's Adam, up to its bias correction
    averages = rule_averages(grads, 0.9, 0.999)
    standard = adam(0.9, 0.999, eps=0.0)
    state = standard.init(weight)
    for step, grad in enumerate(grads, start=1):
        write, state = standard.step(Write(grad), state, weight, Gates(RATE, 1.0, step))
    corrected = Moments(averages.first / (1 - 0.9**6), averages.second / (1 - 0.999**6))
    close(write.grad, elementwise_optimum(corrected, adam_value(corrected)))


def rule_averages(grads, beta1, beta2):
    first, second = zeros(3, 2), zeros(3, 2)
    for grad in grads:
        first, second = beta1 * first + (1 - beta1) * grad, beta2 * second + (1 - beta2) * grad**2
    return Moments(first, second)


@pytest.mark.equation(107, 108, 109, 110)
@pytest.mark.parametrize("lam", [0.0, 0.3])
def test_the_memory_with_outer_products_has_its_optimum_in_closed_form(lam):
    grads, value = double(9, 4), spd(4)
    past = Moments(zeros(4, 1), zeros(4, 4))
    for grad in grads:
        past = outer_moments(past, grad[:, None])
    close(past.second, grads.mT @ grads)
    best = outer_optimum(past, value, lam)
    close(best[:, 0], argmin(lambda m: outer_loss(m, grads, value, lam), zeros(4)))


@pytest.mark.equation(107)
def test_with_one_number_to_recall_the_loss_is_a_regression():
    grads, p = double(9, 4), 1.7
    eye = torch.eye(4, dtype=torch.float64)

    def regression(m):
        return ((grads @ m) - p).square().sum() + 0.3 * m.square().sum() - 9 * p**2

    for memory in double(5, 4):
        close(outer_loss(memory, grads, p * eye, 0.3), regression(memory))


@pytest.mark.equation(101, 107)
def test_in_the_eigenbasis_of_h_it_is_the_element_wise_loss():
    grads, lam = double(9, 4), 0.2
    values, basis = torch.linalg.eigh(grads.mT @ grads)
    root = matrix_power(grads.mT @ grads, 0.5)
    rotated = grads @ basis
    constant = 9 * values.sum()
    for memory in double(5, 4):
        entries = elementwise_loss(basis.mT @ memory, rotated, values.sqrt(), lam) - constant
        close(outer_loss(memory, grads, root, lam), entries)


@pytest.mark.equation(106, 108, 109, 110, 111)
@pytest.mark.parametrize("shape", [(4,), (3, 5), (2, 3, 5)])
def test_a_memory_of_the_root_of_outer_products_is_full_matrix_adagrad(shape):
    beta1, beta2 = 0.5, 0.8
    weight, grads = double(*shape), double(8, *shape)
    columns = grads if len(shape) > 1 else grads[..., None]
    first = beta1 * columns.sum(0)
    second = beta2 * (columns @ columns.mT).sum(0)
    inverse_root = torch.linalg.inv(matrix_power(second, 0.5))
    expected = weight - RATE / math.sqrt(beta2) * (inverse_root @ first).reshape(shape)

    past = Moments(torch.zeros_like(first), torch.zeros_like(second))
    for column in columns:
        past = outer_moments(past, column, beta1=beta1, beta2=beta2)
    value = adagrad_value(past, beta2)
    start = weight if len(shape) > 1 else weight[:, None]
    close(adagrad_memory_step(start, past, value, rate=RATE).reshape(shape), expected)

    rule = adagrad_memory(beta1, beta2, eps=0.0)
    state = rule.init(weight)
    for step, grad in enumerate(grads, start=1):
        write, state = rule.step(Write(grad), state, weight, Gates(RATE, 1.0, step))
    close(weight - RATE * write.grad, expected)


@pytest.mark.equation(111)
def test_where_gradients_lie_along_the_axes_it_is_the_diagonal_form():
    grads = torch.eye(4, dtype=torch.float64).repeat(3, 1) * double(12, 1)
    rule = adagrad_memory(eps=0.0)
    weight = zeros(4)
    state = rule.init(weight)
    for step, grad in enumerate(grads[:8], start=1):
        write, state = rule.step(Write(grad), state, weight, Gates(1.0, 1.0, step))
    total, squares = grads[:8].sum(0), grads[:8].square().sum(0)
    close(write.grad, total / squares.sqrt())
