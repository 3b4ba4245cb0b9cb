"""Means with confidence intervals, and what they say about a claim."""

from __future__ import annotations

import math

from studies.harness.verdict import interval


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
