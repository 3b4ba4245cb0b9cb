"""Learning rates over a run, as multipliers of the base rate: pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from nestling.checks import one_of, require


def constant(progress: float) -> float:
    """Stay at one."""
    return 1.0


def cosine(progress: float) -> float:
    """Half a cosine, from one to zero."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def linear(progress: float) -> float:
    """A straight line from one to zero."""
    return 1.0 - progress


def wsd(progress: float, decay: float = 0.2) -> float:
    """Warm-up, stable, decay: one, then a straight line to zero over the last fifth."""
    return min(1.0, (1.0 - progress) / decay)


SHAPES: dict[str, Callable[[float], float]] = {
    "constant": constant,
    "cosine": cosine,
    "linear": linear,
    "wsd": wsd,
}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Linear warm-up over `warmup` steps, then `shape` down to `floor` at the last of `steps`."""

    steps: int
    warmup: int = 0
    shape: str = "cosine"
    floor: float = 0.0

    def __post_init__(self) -> None:
        one_of("shape", self.shape, SHAPES)
        if self.steps < 1 or not 0 <= self.warmup <= self.steps:
            raise ValueError(
                f"need steps >= 1 and 0 <= warmup <= steps; got steps={self.steps},"
                f" warmup={self.warmup}"
            )
        require(0.0 <= self.floor <= 1.0, "floor", self.floor, "in [0, 1]")

    def __call__(self, step: int) -> float:
        """The multiplier of step `step`, counted from 0; never zero during warm-up."""
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.floor + (1.0 - self.floor) * SHAPES[self.shape](min(1.0, progress))
