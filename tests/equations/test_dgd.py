"""Delta gradient descent and its derivation (Eq. 54-60, 112-121), in float64."""

from __future__ import annotations

import pytest
import torch

from nestling.objectives import Matrix, dot, l2, lp
from nestling.paper.exhibits.dgd import delta_rate, delta_step, dgd_step, generalised_descent
from nestling.paper.exhibits.gd import layer_gd, proximity
from nestling.rules import Gates, Write, apply
from nestling.rules.dgd import dgd, dgd_direction

ETA = 0.7
EYE = torch.eye(4, dtype=torch.float64)
NORMS = pytest.mark.parametrize("norm", [0.1, 1.0, 7.0])


def layer(norm: float, rows: int = 1):
    """A linear layer's weight, inputs of a given norm, and the surprise at its outputs."""
    weight = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    x = torch.randn(rows, 4, dtype=torch.float64)
    x = norm * x / x.norm(dim=-1, keepdim=True)
    y = x @ weight.mT
    (surprise,) = torch.autograd.grad((y.sin() + y**3).sum(), y)
    return weight.detach(), x, surprise


def answer_surprise(surprise):
    """Eq. 60 with the target of backpropagation: minus the surprise."""
    return lambda weight, x: -surprise


@pytest.mark.equation(54, 55)
def test_backpropagation_is_a_write_by_the_dot_product():
    weight, x, surprise = layer(2.0, rows=3)
    near = lambda new, old: proximity(new, old, ETA)  # noqa: E731
    solved = generalised_descent(weight, x, answer_surprise(surprise), dot, near)
    torch.testing.assert_close(solved, layer_gd(weight, x, surprise, ETA))
    torch.testing.assert_close(solved, weight - ETA * surprise.mT @ x)


@pytest.mark.equation(56, 58, 112, 113)
@NORMS
@pytest.mark.parametrize("rows", [1, 3, 6])
def test_dgd_solves_its_problem_for_any_norm_and_number_of_rows(norm, rows):
    weight, x, surprise = layer(norm, rows)
    near = lambda new, old: proximity(new, old, ETA)  # noqa: E731
    solved = generalised_descent(weight, x, answer_surprise(surprise), l2, near)
    write = Write(surprise.mT @ x, x, -surprise)
    new, _ = apply(dgd(), weight, write, (), Gates(rate=ETA))
    torch.testing.assert_close(new, solved)
    torch.testing.assert_close(weight - ETA * dgd_direction(weight, x, -surprise, ETA), solved)
    if rows == 1:
        torch.testing.assert_close(dgd_step(weight, x[0], -surprise[0], ETA), solved)


@pytest.mark.equation(57)
def test_printed_closed_form_holds_for_unit_inputs():
    weight, x, surprise = layer(1.0)
    small = ETA / (1 + ETA)
    printed = weight @ (EYE - small * x.mT @ x) - small * surprise.mT @ x
    torch.testing.assert_close(dgd_step(weight, x[0], -surprise[0], ETA), printed)
    torch.testing.assert_close(delta_step(weight, x[0], -surprise[0], small), printed)


@pytest.mark.equation(114, 115, 116)
@NORMS
def test_stationary_point_and_linear_system(norm):
    weight, x, surprise = layer(norm)
    new = weight - ETA * dgd_direction(weight, x, -surprise, ETA)
    slope = (new @ x.mT + surprise.mT) @ x + (new - weight) / ETA
    torch.testing.assert_close(slope, torch.zeros_like(slope), atol=1e-9, rtol=0)  # Eq. 114
    right = weight - ETA * surprise.mT @ x
    torch.testing.assert_close(new @ (EYE + ETA * x.mT @ x), right)  # Eq. 115
    torch.testing.assert_close(new, right @ torch.linalg.inv(EYE + ETA * x.mT @ x))  # Eq. 116


@pytest.mark.equation(58, 117, 118)
@NORMS
def test_sherman_morrison(norm):
    weight, x, surprise = layer(norm)
    small = delta_rate(x[0], ETA)
    shrink = EYE - small * x.mT @ x
    torch.testing.assert_close(torch.linalg.inv(EYE + ETA * x.mT @ x), shrink)  # Eq. 117
    inserted = (weight - ETA * surprise.mT @ x) @ shrink
    torch.testing.assert_close(inserted, dgd_step(weight, x[0], -surprise[0], ETA))  # Eq. 118


@pytest.mark.equation(119, 120, 121)
@NORMS
def test_collected_terms(norm):
    weight, x, surprise = layer(norm)
    small = delta_rate(x[0], ETA)
    new = delta_step(weight, x[0], -surprise[0], small)
    erased = weight @ (EYE - small * x.mT @ x)
    multiplied = erased - ETA * surprise.mT @ x * (1 - small * norm**2)
    torch.testing.assert_close(new, multiplied)  # Eq. 119
    torch.testing.assert_close(new, erased + small * (-surprise).mT @ x)  # Eq. 120
    torch.testing.assert_close(new, erased - small * surprise.mT @ x)  # Eq. 121


@pytest.mark.equation(59, 60)
def test_generalised_descent_takes_any_objective_retention_and_target():
    weight, x, surprise = layer(1.5, rows=3)
    older = torch.randn_like(weight)
    loss = lp(4)

    def retention(new, old):  # near the last two weights
        return proximity(new, old, ETA) + proximity(new, older, 2.0)

    def target(w, inputs):  # the present output, moved against its surprise
        return inputs @ w.mT - surprise

    new = generalised_descent(weight, x, target, loss, retention, steps=30)
    free = new.clone().requires_grad_(True)
    value = loss.loss(Matrix(free), x, target(weight, x)).sum() + retention(free, weight)
    (slope,) = torch.autograd.grad(value, free)
    torch.testing.assert_close(slope, torch.zeros_like(slope), atol=1e-8, rtol=0)

    # with the squared error and one retention it is DGD that does not erase
    near = lambda new, old: proximity(new, old, ETA)  # noqa: E731
    solved = generalised_descent(weight, x, target, l2, near)
    step = dgd_direction(weight, x, -surprise, ETA, erase=0.0)
    torch.testing.assert_close(weight - ETA * step, solved)
