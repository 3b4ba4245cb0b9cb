"""Means over seeds, their 95% intervals, and what these say about a claim.

interval([0.61, 0.63, 0.60])          mean and half width, by Student's t
difference(ours, theirs)              the same of the differences, paired by seed
verdict(difference(ours, theirs))     shown, refuted or inconclusive
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = [
    "CLAIM",
    "ENOUGH",
    "PLACE",
    "Interval",
    "difference",
    "interval",
    "judged",
    "paired",
    "percent",
    "show",
    "verdict",
    "wilson",
]

ENOUGH = 3
"""Seeds below which nothing is claimed."""
CLAIM = ("shown", "refuted", "inconclusive")
PLACE = ("ahead of", "behind", "not separable from")


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


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """Ours minus theirs for every seed both have."""
    return [ours[seed] - theirs[seed] for seed in sorted(set(ours) & set(theirs))]


def verdict(
    difference: Interval, *, higher: bool = True, words: tuple[str, str, str] = CLAIM
) -> str:
    """shown, refuted or inconclusive, by whether the 95% interval excludes zero.

    higher: a positive difference speaks for the claim. words: what to say instead of these three.
    """
    sign = 1.0 if higher else -1.0
    if not abs(difference.mean) > difference.half:
        return words[2]
    return words[0] if sign * difference.mean > 0 else words[1]


def judged(gaps: Sequence[float], *, higher: bool = True, digits: int = 4) -> str:
    """The verdict on differences, and in brackets their mean and interval."""
    if len(gaps) < 2:
        return "inconclusive (too few seeds)"
    found = interval(gaps)
    return f"{verdict(found, higher=higher)} ({found.mean:+.{digits}f} ± {found.half:.{digits}f})"


def wilson(right: float, count: int) -> tuple[float, float]:
    """The 95% interval of a share of `count` samples, by Wilson: within 0 and 1, never empty."""
    if not 0 <= right <= count or count < 1:
        raise ValueError(f"wilson needs 0 <= right <= count, count >= 1; got {right} of {count}")
    z, share = 1.96, right / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + (z / count) ** 2 / 4)
    return max(0.0, middle - half), min(1.0, middle + half)


def show(values: Sequence[float], digits: int = 3, sign: str = "") -> str:
    """`mean ± half`; only the mean where there is no interval, `-` where there are no values."""
    if not values:
        return "-"
    mean, half = interval(values)
    if math.isinf(mean):
        return "diverged"
    return f"{mean:{sign}.{digits}f}" + (f" ± {half:.{digits}f}" if math.isfinite(half) else "")


def percent(values: Sequence[float]) -> str:
    """`mean ± half`, in percent; without the half where all values are the same, or under three."""
    if not values:
        return "-"
    mean, half = (100 * x for x in interval(values))
    if len(values) > 2 and half > 0:
        return f"{mean:.1f} ± {half:.1f}"
    return f"{mean:.0f}" if mean == 100 else f"{mean:.1f}"


def _student(freedom: int) -> float:
    """The 97.5% quantile of Student's t; between table entries the next smaller (wider)."""
    return _T975[max(known for known in _T975 if known <= freedom)]


_T975 = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262,
    10: 2.228, 12: 2.179, 14: 2.145, 15: 2.131, 19: 2.093, 20: 2.086, 29: 2.045, 30: 2.042,
    60: 2.000, 99: 1.984, 120: 1.980,
}  # fmt: skip
