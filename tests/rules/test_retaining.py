"""The retaining rule: the argmin it claims to be, and ridge regression in one pass."""

from __future__ import annotations

import pytest
import torch

from nestling.rules import Gates, Write, apply, retain_inputs, retaining, retaining_step


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("batch", [(), (3,)])
def test_the_memory_is_the_inverse_of_what_was_retained(batch):
    x = draw(*batch, 150, 7)  # more rows than one piece
    eye = torch.eye(7, dtype=torch.float64).expand(*batch, 7, 7)
    memory = retain_inputs(eye / 3.0, x)
    assert torch.allclose(memory, torch.linalg.inv(3.0 * eye + x.mT @ x), atol=1e-10)


@pytest.mark.equation(59)
def test_the_step_minimises_the_batch_plus_retention():
    """The gradient of the stated objective vanishes at the step."""
    weight, keep = draw(3, 5), 0.7
    past, x, output_grad = draw(9, 5), draw(4, 5), draw(4, 3)
    memory = retain_inputs(torch.eye(5, dtype=torch.float64) / keep, past)
    new, _ = retaining_step(weight, output_grad.T @ x, memory, x)
    moved = new.clone().requires_grad_()
    change = moved - weight
    objective = (
        (output_grad * (x @ change.T)).sum()
        + 0.5 * (x @ change.T).square().sum()
        + 0.5 * (past @ change.T).square().sum()
        + 0.5 * keep * change.square().sum()
    )
    (slope,) = torch.autograd.grad(objective, moved)
    assert slope.abs().max() < 1e-10


@pytest.mark.parametrize("mean", [False, True])
def test_the_rule_takes_the_step_for_every_matrix_of_a_batch(mean):
    rule = retaining(2.0, mean=mean)
    weight, state = draw(2, 3, 5), rule.init(draw(2, 3, 5))
    for _ in range(3):
        x, delta = draw(2, 4, 5), draw(2, 4, 3)
        total = delta.mT @ x
        write = Write(total / 4 if mean else total, x, -delta)
        each = [
            retaining_step(w, g, p, rows)
            for w, g, p, rows in zip(weight, total, state.memory, x, strict=True)
        ]
        weight, state = apply(rule, weight, write, state, Gates())
        assert torch.allclose(weight, torch.stack([w for w, _ in each]))
        assert torch.allclose(state.memory, torch.stack([p for _, p in each]))


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match="keep must be above 0"):
        retaining(0.0)
    rule = retaining()
    weight = draw(2, 3)
    with pytest.raises(ValueError, match="needs the inputs"):
        apply(rule, weight, Write(weight), rule.init(weight), Gates())
