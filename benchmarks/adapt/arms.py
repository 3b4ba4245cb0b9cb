"""Every way to learn a stream: continuum memories, and the usual ones at the same compute.

Each arm reads every token of the stream once, forward and backward. Each has two variants of its
one structural setting and as many rates as every other: the variant is chosen on books that are not
seeds (`frontier.choose`), the curve runs through the rates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from texts import Base
from torch import Tensor
from tuned import Score, adamw, sgd, tuned

import nestling
from nestling.stacking import Learner, Limits

Learn = Callable[[Base, Tensor, float], Score]


class Arm(NamedTuple):
    """Which rates are tried, and the variants: how to learn a stream at a rate."""

    rates: tuple[float, ...]
    variants: dict[str, Learn]


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
    limits = Limits(drift=1e9)  # an arm may ruin itself: that is a result
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
            limits=Limits(drift=1e9),
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
SMALL, LARGE, STEPS = (0.015, 0.04, 0.08), (0.005, 0.015, 0.04), (5e-5, 1.5e-4, 4e-4)
SMOLLM2: dict[str, Arm] = {  # one variant each, as every run takes half a minute
    "k=1": Arm(STEPS, {"Adam, chunk 64": memory([64], **ADAM)}),
    "3 levels": Arm(STEPS, {"Adam, retain 0.95": moved(THREE, 0.95, **ADAM)}),
    "k=1, descent": Arm((0.01, 0.03, 0.06), {"chunk 64": memory([64], **LAST)}),
    "3 levels, descent": Arm(SMALL, {"retain 0.95": moved(THREE, 0.95, **LAST)}),
    "4 levels, descent": Arm(SMALL, {"retain 0.95": moved([64, 128, 256, 1024], 0.95, **LAST)}),
    "SGD": Arm(LARGE, {"step 64": tuned(sgd, last=10)}),
    "AdamW": Arm((1e-5, 3e-5, 1e-4), {"step 64": tuned(adamw, last=10)}),
    "LoRA": Arm((3e-4, 1e-3, 3e-3), {"rank 8": tuned(adamw, lora=8, last=10)}),
    "dynamic evaluation": Arm((3e-5, 1e-4, 3e-4), {"decay 0.02": tuned(sgd, decay=0.02, last=10)}),
    "replay": Arm(LARGE, {"every 4th window": tuned(sgd, replay=4, last=10)}),
    "EWC": Arm(LARGE, {"penalty 100": tuned(sgd, penalty=100.0, last=10)}),
}
