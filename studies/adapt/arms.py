"""Every way to learn a stream: continuum memories, and the usual ones at the same compute.

Each arm reads every token of the stream once, forward and backward. Each has two variants of its
one structural setting and as many rates as every other: the variant is chosen on books that are not
seeds (`frontier.choose`), the curve runs through the rates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

import nestling
from nestling.adaptation import Learner, Limits
from studies.adapt.texts import Base
from studies.adapt.tuned import Score, adamw, sgd, tuned

Learn = Callable[[Base, Tensor, float], Score]


class Arm(NamedTuple):
    """Which rates are tried, the variants: how to learn a stream at a rate, and on how many seeds.

    seeds: at most so many of the study's (None: all).
    """

    rates: tuple[float, ...]
    variants: dict[str, Learn]
    seeds: int | None = None


def memory(chunks: list[int], *, scale: float = 0.0, **options: Any) -> Learn:
    """A continuum memory; level l's rate is `rate (chunk_l / chunk_1) ** scale`."""

    def learn(base: Base, stream: Tensor, rate: float) -> Score:
        learner = make_memory(base, chunks, rate, scale=scale, **options)
        learner.learn(stream)
        return learner.score

    return learn


def make_memory(
    base: Base, chunks: list[int], rate: float, *, scale: float = 0.0, **options: Any
) -> Learner:
    """A learner whose rates follow its chunks."""
    rates = [rate * (chunk / chunks[0]) ** scale for chunk in chunks]
    limits = Limits(drift=1e9, step=1e9)  # an arm may ruin itself: that is a result
    return nestling.adapt(
        base.model, chunks, rate=rates, tokenizer=base.tokenizer, limits=limits, **options
    )


def moved(chunks: list[int], retain: float, share: float = 0.25, **options: Any) -> Learn:
    """Several levels, of which only the fastest has a rate; the others receive a share of it."""

    def learn(base: Base, stream: Tensor, rate: float) -> Score:
        learner = nestling.adapt(
            base.model,
            chunks,
            rate=[rate] + [0.0] * (len(chunks) - 1),
            retain=[retain] + [1.0] * (len(chunks) - 1),
            transfer="move",
            transfer_rate=share,
            limits=Limits(drift=1e9, step=1e9),
            **options,
        )
        learner.learn(stream)
        return learner.score

    return learn


def levels(chunks: list[int], **options: Any) -> dict[str, Learn]:
    """Several levels; a variant is what the fastest retains."""
    return {f"retain {kept}": moved(chunks, kept, **options) for kept in (0.95, 0.9)}


THREE, FOUR = [64, 256, 1024], [64, 128, 512, 2048]


def windows(make: Any, **options: Any) -> dict[str, Learn]:
    """Fine-tuning; a variant is how many tokens a step sees."""
    return {f"step {size}": tuned(make, window=size, **options) for size in (64, 128)}


ARMS: dict[str, Arm] = {
    "k=1": Arm((0.006, 0.016, 0.04), {f"chunk {chunk}": memory([chunk]) for chunk in (32, 64)}),
    "3 levels": Arm((0.01, 0.025, 0.06), levels(THREE)),
    "4 levels": Arm((0.01, 0.025, 0.06), levels(FOUR)),
    "SGD": Arm((0.003, 0.008, 0.02), windows(sgd)),
    "AdamW": Arm((8e-5, 2e-4, 5e-4), windows(adamw)),
    "LoRA": Arm(
        (5e-4, 1.2e-3, 3e-3), {f"rank {rank}": tuned(adamw, lora=rank) for rank in (4, 16)}
    ),
    "dynamic evaluation": Arm(
        (6e-5, 2e-4, 6e-4),
        {f"decay {decay}": tuned(sgd, decay=decay) for decay in (0.005, 0.02)},
    ),
    "replay": Arm(
        (0.003, 0.008, 0.02),
        {f"every {n}th window": tuned(sgd, replay=n) for n in (2, 4)},
    ),
    "EWC": Arm(
        (0.002, 0.005, 0.012),
        {f"penalty {p:g}": tuned(sgd, penalty=p) for p in (3e3, 3e4)},
    ),
}
LAST = {"layers": "last 10"}
ADAM = {**LAST, "rule": "adam"}
SLOW, FAST = (1.5e-4, 3e-4, 6e-4, 1.2e-3), (7.5e-5, 1.5e-4, 3e-4, 6e-4)
STEPS = (5e-5, 1e-4, 2e-4)
SMOLLM2: dict[str, Arm] = {  # one variant each, as every run takes the better part of a minute
    "k=1": Arm(FAST, {"chunk 32": memory([32], **ADAM)}),
    "3 levels": Arm(SLOW, {"retain 0.9": moved(THREE, 0.9, **ADAM)}),
    "4 levels": Arm(SLOW, {"retain 0.9": moved(FOUR, 0.9, **ADAM)}, 5),
    "k=1, retention": Arm(
        (2e-4, 4e-4, 8e-4), {"chunk 64, retain 0.98": memory([64], retain=0.98, **ADAM)}, 3
    ),
    "AdamW": Arm(STEPS, {"step 64": tuned(adamw, last=10)}, 3),
    "LoRA": Arm((3e-4, 1e-3, 3e-3), {"rank 8": tuned(adamw, lora=8, last=10)}, 3),
    "dynamic evaluation": Arm(
        (5e-5, 1.5e-4, 4.5e-4), {"decay 0.02": tuned(sgd, decay=0.02, last=10)}, 3
    ),
    "EWC": Arm(STEPS, {"AdamW, penalty 1e8": tuned(adamw, pull=1e8, last=10)}, 3),
    "replay": Arm(STEPS, {"AdamW, every 4th window": tuned(adamw, replay=4, last=10)}, 3),
    "SGD": Arm((0.005, 0.015, 0.04), {"step 64": tuned(sgd, last=10)}, 3),
}
