"""The one rule of tuning: the same number of trials for every arm, judged on a seed of their own.

A setting whose result is not finite loses; of equal ones the first wins, so a grid puts what is
preferred (the smaller rate) first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

__all__ = ["best", "ranked", "same_number"]

S = TypeVar("S")


def same_number(trials: Mapping[str, Sequence[Any]]) -> int:
    """How many trials every arm has; a ValueError that names the arms where the numbers differ."""
    counts = {arm: len(settings) for arm, settings in trials.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{arm} {count}" for arm, count in counts.items())
        raise ValueError(f"every arm must have the same number of trials; got {listed}")
    return next(iter(counts.values()), 0)


def ranked(settings: Sequence[S], score: Callable[[S], Any], *, lower: bool = False) -> list[S]:
    """The settings, the best first; `score` gives a number, or a tuple of them.

    lower: a lower score is better.
    """

    def place(setting: S) -> tuple[Any, ...]:
        given = score(setting)
        numbers = given if isinstance(given, tuple) else (given,)
        bad = not all(map(math.isfinite, numbers))
        return bad, *(number if lower else -number for number in numbers if not bad)

    return sorted(settings, key=place)


def best(settings: Sequence[S], score: Callable[[S], Any], *, lower: bool = False) -> S:
    """The setting with the best score; an only one is taken without a trial."""
    return settings[0] if len(settings) == 1 else ranked(settings, score, lower=lower)[0]
