"""Objectives: every error signal equals autograd, for matrices and two-layer memories."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestling import activations
from nestling.objectives import Matrix, Signal, TwoLayer, dot, l2, lp, oja

OBJECTIVES = {"dot": dot, "l2": l2, "l1.5": lp(1.5), "l3": lp(3.0), "oja": oja}
ACTIVATIONS = ["gelu", "silu", "tanh", "relu", "linear"]


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def memories(batch=()):
    return {
        "matrix": Matrix(double(*batch, 4, 3)),
        "residual": TwoLayer(double(*batch, 3, 5), double(*batch, 5, 3)),
        "plain": TwoLayer(
            double(*batch, 4, 5), double(*batch, 5, 3), activations.silu, residual=False
        ),
    }


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("kind", ["matrix", "residual", "plain"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_equal_autograd(name, kind, batch):
    memory, objective = memories(batch)[kind], OBJECTIVES[name]
    width = memory.weights[0].shape[-2]
    key, value = double(*batch, 6, 3), double(*batch, 6, width)
    leaves = tuple(w.requires_grad_() for w in memory.weights)
    loss = objective.loss(memory.replace(leaves), key, value)
    assert loss.shape == (*batch, 6)
    expected = torch.autograd.grad(loss.sum(), leaves)
    for ours, theirs in zip(objective.gradient(memory, key, value), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["dot", "l2", "l1.5", "l3"])
def test_errors_are_the_derivative_of_the_measure(name):
    prediction, value = double(7, 4).requires_grad_(), double(7, 4)
    objective = OBJECTIVES[name]
    (expected,) = torch.autograd.grad(objective.measure(prediction, value).sum(), prediction)
    torch.testing.assert_close(objective.error(prediction, value), expected)


def test_lp_with_p_2_is_l2_and_p_1_is_the_sign():
    memory, key, value = Matrix(double(4, 3)), double(5, 3), double(5, 4)
    torch.testing.assert_close(lp(2.0).loss(memory, key, value), l2.loss(memory, key, value))
    torch.testing.assert_close(
        lp(2.0).gradient(memory, key, value), l2.gradient(memory, key, value)
    )
    torch.testing.assert_close(lp(1.0).error(key, key + 3.0), -torch.ones_like(key))


@given(p=st.floats(1.0, 6.0))
def test_an_exact_answer_surprises_nobody(p):
    memory, key = Matrix(double(4, 3)), double(5, 3)
    (signal,) = lp(p).surprise(memory, key, memory.read(key))
    assert torch.equal(signal.error, torch.zeros(5, 4, dtype=torch.float64))


def test_oja_depends_on_the_memory_and_not_on_its_answer_alone():
    key, value = torch.zeros(1, 3, dtype=torch.float64), double(1, 4)
    for memory in (Matrix(double(4, 3)), Matrix(double(4, 3))):  # both answer a zero key with zero
        (signal,) = oja.surprise(memory, key, value)
        torch.testing.assert_close(signal.input, -value @ memory.weight)
        torch.testing.assert_close(signal.gradient, value.mT @ value @ memory.weight)


def test_a_signal_is_a_layer_s_gradient():
    error, x = double(2, 6, 4), double(2, 6, 3)
    torch.testing.assert_close(Signal(error, x).gradient, torch.einsum("bno,bni->boi", error, x))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivatives_of_activations_equal_autograd(name):
    activation = getattr(activations, name)
    z = torch.linspace(-5, 5, 41, dtype=torch.float64).requires_grad_()
    (expected,) = torch.autograd.grad(activation(z).sum(), z)
    torch.testing.assert_close(activation.derivative(z), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("p", [0.5, 0.0, -1.0, float("nan")])
def test_a_loss_that_is_not_convex_is_refused(p):
    with pytest.raises(ValueError, match="p must be at least 1"):
        lp(p)
