"""Compact fast weights: exact until the rank is exceeded, then as good as a matrix can be."""

from __future__ import annotations

import pytest
import torch

from nestling.continuum import Continuum, Factors, MemoryLevel
from nestling.continuum.fast import add, dense, handy, norm2, step, truncate


def random_factors(columns, seed=0, decay=0.7):
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(2, 40, columns, dtype=torch.float64, generator=generator)
    right = torch.randn(2, 30, columns, dtype=torch.float64, generator=generator)
    return Factors(left * decay ** torch.arange(columns), right)


@pytest.mark.parametrize("columns", [5, 12, 17, 24, 200])
def test_truncation_is_the_best_approximation_and_says_what_it_drops(columns):
    factors = random_factors(columns)
    kept, lost = truncate(factors, 8)
    full = dense(factors)
    sizes = torch.linalg.svdvals(full)
    assert kept.left.shape[-1] == min(columns, 8)
    best = sizes[:, 8:].square().sum(-1).sqrt()
    found = (dense(kept) - full).square().sum((-2, -1)).sqrt()
    torch.testing.assert_close(found, best, rtol=1e-3, atol=1e-9)
    torch.testing.assert_close(lost, found, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(norm2(kept), dense(kept).square().sum((-2, -1)))


@pytest.mark.parametrize("retain", [0.9, 1.0])
@pytest.mark.parametrize("form", [lambda factors: factors, dense])
def test_a_step_is_the_step_in_place_or_not(form, retain):
    gradient, generator = random_factors(6), torch.Generator().manual_seed(1)
    old = torch.randn(2, 40, 30, dtype=torch.float64, generator=generator)
    before, given = old.clone(), form(gradient)
    copied = step(old, given, -0.3, retain)
    assert torch.equal(old, before)
    torch.testing.assert_close(copied, retain * old - 0.3 * dense(gradient))
    torch.testing.assert_close(step(None, given, -0.3, retain), -0.3 * dense(gradient))
    assert step(old, given, -0.3, retain, in_place=True) is old
    assert torch.equal(old, copied)


def test_many_columns_are_handier_as_a_matrix():
    few, many = random_factors(4), random_factors(24)  # Gram matrices of 24^2 (40 + 30) > 22 40 30
    assert handy(None) is None
    assert handy(few) is few
    torch.testing.assert_close(handy(many), dense(many))
    torch.testing.assert_close(norm2(handy(many)), norm2(many))


def test_sums_take_the_smaller_form():
    few, many = random_factors(4), random_factors(30, seed=2)
    assert isinstance(add(few, few), Factors)
    assert isinstance(add(few, many), torch.Tensor)  # 34 columns of a 40 x 30 matrix
    for one, other in ((few, few), (few, many), (dense(few), many), (many, dense(few))):
        torch.testing.assert_close(dense(add(one, other)), dense(one) + dense(other))


def test_truncating_a_matrix_is_the_best_approximation():
    full = dense(random_factors(200))
    kept, lost = truncate(full, 8)
    best = torch.linalg.svdvals(full)[:, 8:].square().sum(-1).sqrt()
    torch.testing.assert_close(
        (dense(kept) - full).square().sum((-2, -1)).sqrt(), best, rtol=1e-3, atol=0
    )
    torch.testing.assert_close(lost, best, rtol=1e-3, atol=0)


@pytest.mark.parametrize("retain", [1.0, 0.8])
def test_factored_levels_equal_full_ones_while_the_rank_suffices(make, layout, ids, retain):
    model = make("llama").double()

    def run(rank):
        levels = [
            MemoryLevel(name="a", chunk=4, rate=0.5, retain=retain, rank=rank),
            MemoryLevel(name="b", chunk=8, rate=0.5, rank=rank),
            MemoryLevel(name="c", chunk=16, rate=0.5, rank=rank),
        ]
        continuum = Continuum(model, levels, layout["share"](model, 3))
        return continuum, continuum(ids)

    full, want = run(None)
    compact, got = run(12)  # the matrices are 8 x 12: nothing can be lost
    torch.testing.assert_close(got.logits, want.logits)
    for slot in full.slots:
        mine, its = compact.delta(got.state, slot.name), full.delta(want.state, slot.name)
        torch.testing.assert_close(mine, its)
    for one, other in zip(got.updates, want.updates, strict=True):
        torch.testing.assert_close(one.distance, other.distance)
        torch.testing.assert_close(one.grad_norm, other.grad_norm)
    assert max(float(level.lost) for level in got.state.levels) < 1e-9
    small, out = run(2)
    assert all(f.left.shape[-1] == 2 for f in out.state.levels[0].fast)
    assert float(out.state.levels[0].lost) > 0
    delta, its = (
        small.delta(out.state, small.slots[0].name),
        full.delta(want.state, full.slots[0].name),
    )
    assert (delta - its).norm() < 0.7 * its.norm()
