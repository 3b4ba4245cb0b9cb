"""The parts that studies share: counted states, intervals."""

from __future__ import annotations

from dataclasses import replace

from nestling.models import presets
from studies.harness.models import arm_of, state_size
from studies.harness.verdict import interval, percent


def test_states_are_counted_alike():
    width, tail = 40, 3 * 40
    small = presets.Size(width=width, layers=1, heads=1, vocabulary=128, parameters=30_000)
    assert state_size(arm_of("deltanet", small, {})) == width**2 + tail
    assert state_size(arm_of("hope", small, {})) == width**2 + 2 * 8**2 + tail  # and what steers it
    assert state_size(arm_of("hope_printed", small, {})) == 5 * width**2 + tail
    split = replace(small, heads=5)  # five memories of five heads: a fifth of the width each
    assert state_size(arm_of("hope_printed", split, {})) == width**2 + tail


def test_interval_of_the_mean():
    mean, half = interval([0.9, 1.0, 0.8])
    assert abs(mean - 0.9) < 1e-12
    assert abs(half - 4.303 * 0.1 / 3**0.5) < 1e-12
    assert percent([1.0, 1.0]) == "100"
