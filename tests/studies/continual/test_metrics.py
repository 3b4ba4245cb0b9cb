"""Metrics equal what one computes by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from studies.continual import metrics
from studies.harness import verdict

R = [
    [0.9, 0.1, 0.2],
    [0.5, 0.8, 0.3],
    [0.6, 0.4, 0.7],
]


def test_a_hand_computed_matrix():
    assert metrics.average_accuracy(R) == pytest.approx((0.6 + 0.4 + 0.7) / 3)
    assert metrics.forgetting(R) == pytest.approx(((0.9 - 0.6) + (0.8 - 0.4)) / 2)
    assert metrics.backward_transfer(R) == pytest.approx(-0.35)
    assert metrics.forward_transfer(R, [0.1, 0.05, 0.1]) == pytest.approx((0.05 + 0.2) / 2)
    assert metrics.learning_curve(R) == pytest.approx([0.9, 0.65, 17 / 30])
    assert metrics.intransigence(R, [0.9, 0.9, 0.9]) == pytest.approx((0.0 + 0.1 + 0.2) / 3)


def test_the_best_form_of_forgetting_sees_late_peaks():
    r = [[0.5, 0, 0], [0.8, 0.6, 0], [0.4, 0.6, 0.9]]
    assert metrics.forgetting(r) == pytest.approx((0.1 + 0.0) / 2)
    assert metrics.forgetting(r, best=True) == pytest.approx((0.4 + 0.0) / 2)


def test_the_share_forgotten_is_relative_to_what_was_learned():
    assert metrics.forgotten_share(R) == pytest.approx(0.35 / 0.85)
    assert metrics.forgotten_share([[0.0, 0.0], [0.0, 0.5]]) == 0.0


def test_one_task_forgets_nothing():
    assert metrics.forgetting([[0.7]]) == 0.0
    assert metrics.forward_transfer([[0.7]], [0.1]) == 0.0


def test_interval_of_five_values():
    found = verdict.interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3.0
    assert found.half == pytest.approx(2.776 * math.sqrt(2.5 / 5))
    assert math.isnan(verdict.interval([1.0]).half)
    assert verdict.difference([2.0, 3.0], [1.0, 2.0]) == (1.0, 0.0)


@pytest.mark.parametrize("bad", [[], [[1.0, 2.0]], [1.0]])
def test_what_is_not_square_is_refused(bad):
    with pytest.raises(ValueError, match="square"):
        metrics.average_accuracy(bad)


def test_wrong_lengths_are_refused():
    with pytest.raises(ValueError, match="one per task"):
        metrics.forward_transfer(R, [0.1])
    with pytest.raises(ValueError, match="one per task"):
        metrics.intransigence(R, [0.1])
    with pytest.raises(ValueError, match="pairs"):
        verdict.difference([1.0], [])


@given(arrays(float, (4, 4), elements=st.floats(0, 1)))
def test_bounds(r):
    assert metrics.forgetting(r, best=True) >= max(0.0, metrics.forgetting(r)) - 1e-12
    assert metrics.learning_curve(r)[-1] == pytest.approx(metrics.average_accuracy(r))
    assert np.isfinite(metrics.forward_transfer(r, np.zeros(4)))
