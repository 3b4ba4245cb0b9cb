"""Closed-form memories: LDA from sums, the same from the retaining rule, maps of random units."""

from __future__ import annotations

import pytest
import torch

from nestling.rules import retain_inputs, retaining_step
from studies.continual.memories import Fourier, Memory, Rectified, from_least_squares, unit


def clouds(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    centres = 2.0 * torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    y = torch.randint(4, (rows,), generator=generator)
    return centres[y] + torch.randn(rows, 6, generator=generator), y


def test_it_is_linear_discriminant_analysis():
    """Scores by Gaussian log-likelihoods with one covariance, written out."""
    r, y = clouds(200, 1)
    memory = Memory(5, lambda x: x, shrink=1e-9)
    for rows, labels in zip(r.split(32), y.split(32), strict=True):
        memory.learn(rows, labels)
    means = torch.stack([r[y == c].mean(0) for c in range(4)]).double()
    within = sum(
        (r[y == c].double() - means[c]).T @ (r[y == c].double() - means[c]) for c in range(4)
    )
    inverse = torch.linalg.inv(within / len(y))
    gap = r.double()[:, None] - means
    likelihood = -0.5 * torch.einsum("ncd,de,nce->nc", gap, inverse, gap)
    ours = memory.scores(r)
    assert torch.allclose(ours[:, :4].double().log_softmax(1), likelihood.log_softmax(1), atol=1e-3)
    assert (ours[:, 4] == -torch.inf).all()  # never seen


def test_the_order_of_writing_does_not_matter():
    r, y = clouds(60, 2)
    for read in ("mean", "ridge", "lda"):
        one, other = (Memory(4, lambda x: x, read=read, shrink=0.01) for _ in range(2))
        one.learn(r, y)
        for index in torch.randperm(60).split(7):
            other.learn(r[index], y[index])
        assert torch.allclose(one.scores(r), other.scores(r), atol=1e-4)


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


def test_the_ridge_read_is_the_retaining_rules_weight():
    r, y = clouds(80, 4)
    memory = Memory(4, lambda x: x, read="ridge", shrink=0.5)
    memory.learn(r, y)
    gram = r.double().T @ r.double()
    keep = 0.5 * float(gram.diagonal().mean())
    target = torch.nn.functional.one_hot(y, 4).double()
    inputs = torch.eye(6).double() / keep
    weight, _ = retaining_step(
        torch.zeros(4, 6).double(), -target.T @ r.double(), inputs, r.double()
    )
    assert torch.allclose(memory.solve()[0], weight, atol=1e-6)


def test_the_nearest_mean_is_the_nearest_in_angle():
    r, y = clouds(200, 5)
    memory = Memory(4, lambda x: x, read="mean")
    memory.learn(r, y)
    centre = r.mean(0)
    means = torch.stack([r[y == c].mean(0) for c in range(4)]) - centre
    wanted = torch.cosine_similarity((r - centre)[:, None], means[None], dim=-1).argmax(1)
    assert torch.equal(memory.scores(r).argmax(1), wanted)


def test_a_start_counts_as_so_many_rows():
    """Sums over other data and own data together are one covariance of both."""
    (first, a), (second, b) = clouds(50, 6), clouds(70, 7)
    other, own = (Memory(4, lambda x: x, shrink=0.1) for _ in range(2))
    other.learn(first, a)
    own.start, own.weight = other.covariance(), 50.0
    own.learn(second, b)
    within = sum(
        (x[y == c] - x[y == c].mean(0)).T @ (x[y == c] - x[y == c].mean(0))
        for x, y in ((first.double(), a), (second.double(), b))
        for c in range(4)
    )
    assert torch.allclose(own.covariance(), within / 120, atol=1e-5)


def test_even_rows_are_a_weighted_ridge_regression():
    """A row is worth n^-even; at 1 doubling all examples of a class changes nothing."""
    r, y = clouds(80, 9)
    memory = Memory(4, lambda x: x, read="ridge", shrink=0.5, even=0.5)
    memory.learn(r, y)
    worth = torch.bincount(y)[y].double() ** -0.5
    gram = (worth[:, None] * r).T @ r.double()
    target = torch.nn.functional.one_hot(y, 4).double()
    eye = 0.5 * gram.diagonal().mean() * torch.eye(6).double()
    wanted = torch.linalg.solve(gram + eye, (worth[:, None] * r).T @ target).T
    assert torch.allclose(memory.solve()[0], wanted, atol=1e-6)
    once, twice = (Memory(4, lambda x: x, read="ridge", shrink=0.5, even=1.0) for _ in range(2))
    once.learn(r, y)
    twice.learn(torch.cat([r, r[y == 0]]), torch.cat([y, y[y == 0]]))
    assert torch.allclose(once.scores(r), twice.scores(r), atol=1e-4)
    with pytest.raises(ValueError, match=r"even must be in \[0, 1\]"):
        Memory(2, lambda x: x, even=2.0)


def test_rows_are_kept_for_the_same_texts_only():
    r, y = clouds(40, 10)
    memory = Memory(4, lambda x: x)
    memory.learn(r, y)
    first = memory.scores(r)
    assert torch.allclose(memory.scores(r[:7]), first[:7], atol=1e-5)
    memory.learn(r + 1.0, y)
    assert not torch.allclose(memory.scores(r), first, atol=1e-3)


@pytest.mark.parametrize("together", [False, True])
def test_fourier_features_are_the_kernel(together):
    x = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(8))
    rows = Fourier(places=(0, 2), width=40_000, gamma=0.7, seed=1, together=together)(x)
    parts = unit(x, (0, 2))  # [N, 2, D]
    apart = (parts[:, None] - parts[None]).square().sum(-1)  # [N, N, 2]
    each = (-0.7 * apart).exp()
    kernel = each.prod(-1) if together else each.mean(-1)
    assert torch.allclose(rows @ rows.mT, kernel, atol=0.03)
    assert rows.shape == (5, 40_000)


def test_random_units_come_from_the_seed():
    x = torch.randn(4, 2, 8)
    for make in (
        lambda s: Rectified(places=(0, 1), width=6, seed=s),
        lambda s: Fourier(places=(0, 1), width=6, gamma=1.0, seed=s),
    ):
        assert torch.equal(make(1)(x), make(1)(x))
        assert not torch.equal(make(1)(x), make(2)(x))
    assert (Rectified(places=(1,), width=6, seed=0)(x) >= 0).all()


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match="shrink must be above 0"):
        Memory(2, lambda x: x, shrink=0.0)
    with pytest.raises(ValueError, match="read must be"):
        Memory(2, lambda x: x, read="median")
    with pytest.raises(ValueError, match="the memory is empty"):
        Memory(2, lambda x: x).scores(torch.zeros(1, 2))
