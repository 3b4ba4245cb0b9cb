"""Means with confidence intervals, and what they say about a claim."""

from __future__ import annotations

import math
import statistics

T975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
T975 |= {14: 2.145, 19: 2.093, 29: 2.045}


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half width of its 95% confidence interval (Student's t)."""
    if len(values) < 2:
        return statistics.fmean(values), math.nan
    known = max(f for f in T975 if f <= len(values) - 1)
    return statistics.fmean(values), T975[known] * statistics.stdev(values) / len(values) ** 0.5


def show(values: list[float], digits: int = 3) -> str:
    """`mean ± half width`."""
    if not values:
        return "-"
    mean, half = interval(values)
    return f"{mean:.{digits}f}" + (f" ± {half:.{digits}f}" if math.isfinite(half) else "")


def verdict(differences: list[float], *, better_below: bool = True) -> str:
    """Shown, refuted or inconclusive, by whether the interval of the differences excludes zero."""
    if len(differences) < 2:
        return "inconclusive (too few seeds)"
    mean, half = interval(differences)
    if abs(mean) <= half:
        return f"inconclusive ({mean:+.4f} ± {half:.4f})"
    word = "shown" if (mean < 0) == better_below else "refuted"
    return f"{word} ({mean:+.4f} ± {half:.4f})"
