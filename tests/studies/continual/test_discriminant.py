"""The readout memory: LDA from sums, and the same from the least squares of the retaining rule."""

from __future__ import annotations

import pytest
import torch

from nestling.rules import retain_inputs, retaining_step
from studies.continual.discriminant import Discriminant, from_least_squares


def clouds(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    centres = 2.0 * torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    y = torch.randint(4, (rows,), generator=generator)
    return centres[y] + torch.randn(rows, 6, generator=generator), y


def test_it_is_linear_discriminant_analysis():
    """Scores by Gaussian log-likelihoods with one covariance, written out."""
    r, y = clouds(200, 1)
    memory = Discriminant(5, 6, shrink=1e-9)
    for rows, labels in zip(r.split(32), y.split(32), strict=True):
        memory.write(rows, labels)
    weight, bias = memory.solve()
    means = torch.stack([r[y == c].mean(0) for c in range(4)]).double()
    within = sum(
        (r[y == c].double() - means[c]).T @ (r[y == c].double() - means[c]) for c in range(4)
    )
    inverse = torch.linalg.inv(within / len(y))
    gap = r.double()[:, None] - means
    likelihood = -0.5 * torch.einsum("ncd,de,nce->nc", gap, inverse, gap)
    ours = (r @ weight.T + bias)[:, :4].double()
    assert torch.allclose(ours.log_softmax(1), likelihood.log_softmax(1), atol=1e-3)
    assert bias[4] == -torch.inf  # never seen


def test_the_order_of_writing_does_not_matter():
    r, y = clouds(60, 2)
    one, other = Discriminant(4, 6, shrink=0.01), Discriminant(4, 6, shrink=0.01)
    one.write(r, y)
    for index in torch.randperm(60).split(7):
        other.write(r[index], y[index])
    for a, b in zip(one.solve(), other.solve(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_it_is_the_retaining_rules_memory_read_through_class_means():
    """Ridge regression on one-hot targets, then a C x C map: the same discriminants."""
    r, y = clouds(80, 3)
    r, keep = r.double(), 0.5
    weight, memory = torch.zeros(4, 6).double(), torch.eye(6).double() / keep
    for rows, labels in zip(r.split(16), y.split(16), strict=True):
        target = torch.nn.functional.one_hot(labels, 4).double()
        grad = (rows @ weight.T - target).T @ rows
        weight, memory = retaining_step(weight, grad, memory, rows)
    counts = torch.bincount(y, minlength=4).double()
    means = torch.stack([r[y == c].mean(0) for c in range(4)])
    assert torch.allclose(weight, counts[:, None] * means @ memory, atol=1e-10)
    assert torch.allclose(memory, retain_inputs(torch.eye(6).double() / keep, r), atol=1e-10)
    within = torch.linalg.inv(memory) - (means * counts[:, None]).T @ means
    direct = torch.linalg.solve(within, means.T).T
    assert torch.allclose(from_least_squares(weight, means, counts), direct, atol=1e-9)


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match="shrink must be above 0"):
        Discriminant(2, 3, shrink=0.0)
