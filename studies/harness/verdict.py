"""Means over seeds, their 95% intervals, and what these say about a claim."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Interval", "difference", "interval", "verdict"]


class Interval(NamedTuple):
    """A mean and the half width of its 95% confidence interval."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        """The lower end."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """The upper end."""
        return self.mean + self.half

    def __str__(self) -> str:
        return f"{100 * self.mean:.1f} ± {100 * self.half:.1f}"


def interval(values: Sequence[float]) -> Interval:
    """The mean over seeds with its 95% interval by Student's t; one value has no interval (nan)."""
    if not len(values):
        raise ValueError("interval needs at least one value")
    mean = statistics.fmean(values)
    if len(values) == 1 or not all(map(math.isfinite, values)):
        return Interval(mean, math.nan)
    spread = statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, _student(len(values) - 1) * spread)


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """The mean of the differences seed by seed, with its interval: the test of a claim."""
    if len(ours) != len(theirs):
        raise ValueError(f"pairs are needed; got {len(ours)} and {len(theirs)} values")
    return interval([a - b for a, b in zip(ours, theirs, strict=True)])


def verdict(difference: Interval, *, higher: bool = True) -> str:
    """shown, refuted or inconclusive, by whether the 95% interval excludes zero."""
    sign = 1.0 if higher else -1.0
    if sign * difference.mean > 0 and abs(difference.mean) > difference.half:
        return "shown"
    if sign * difference.mean < 0 and abs(difference.mean) > difference.half:
        return "refuted"
    return "inconclusive"


def _student(freedom: int) -> float:
    """The 97.5% quantile of Student's t; between table entries the next smaller (wider)."""
    return _T975[max(known for known in _T975 if known <= freedom)]


_T975 = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262,
    10: 2.228, 12: 2.179, 14: 2.145, 15: 2.131, 19: 2.093, 20: 2.086, 29: 2.045, 30: 2.042,
    60: 2.000, 99: 1.984, 120: 1.980,
}  # fmt: skip
