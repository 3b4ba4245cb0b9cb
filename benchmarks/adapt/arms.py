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


def levels(chunks: list[int], retains: tuple[tuple[float, ...], ...], **options: Any) -> Any:
    """Several levels; a variant is what each retains."""
    return {
        f"retain {'/'.join(f'{r:g}' for r in kept)}": memory(
            chunks, scale=1.0, retain=list(kept), **options
        )
        for kept in retains
    }


THREE, FOUR = [64, 256, 1024], [64, 128, 512, 2048]
KEPT3 = ((0.9, 0.95, 1.0), (0.95, 0.98, 1.0))
KEPT4 = ((0.9, 0.92, 0.96, 1.0), (0.95, 0.96, 0.98, 1.0))


def windows(make: Any, **options: Any) -> dict[str, Learn]:
    """Fine-tuning; a variant is how many tokens a step sees."""
    return {f"step {size}": tuned(make, window=size, **options) for size in (64, 128)}


ARMS: dict[str, Arm] = {
    "k=1": Arm(
        (0.004, 0.01, 0.022, 0.045),
        {f"chunk {chunk}": memory([chunk]) for chunk in (32, 64)},
    ),
    "k=1, retention": Arm(
        (0.008, 0.02, 0.045, 0.09),
        {f"retain {kept}": memory([64], retain=kept) for kept in (0.99, 0.97)},
    ),
    "3 levels": Arm((0.003, 0.007, 0.015, 0.032), levels(THREE, KEPT3)),
    "4 levels": Arm((0.0025, 0.006, 0.013, 0.028), levels(FOUR, KEPT4)),
    "SGD": Arm((0.002, 0.006, 0.014, 0.03), windows(sgd)),
    "AdamW": Arm((5e-5, 1.5e-4, 3e-4, 6e-4), windows(adamw)),
    "LoRA": Arm(
        (4e-4, 1e-3, 2e-3, 4e-3),
        {f"rank {rank}": tuned(adamw, lora=rank) for rank in (4, 16)},
    ),
    "dynamic evaluation": Arm(
        (3e-5, 1e-4, 3e-4, 8e-4),
        {f"decay {decay}": tuned(sgd, decay=decay) for decay in (0.005, 0.02)},
    ),
    "replay": Arm(
        (0.002, 0.006, 0.014, 0.03),
        {f"every {n}th window": tuned(sgd, replay=n) for n in (2, 4)},
    ),
    "EWC": Arm(
        (0.001, 0.003, 0.006, 0.012),
        {f"penalty {p:g}": tuned(sgd, penalty=p) for p in (3e3, 3e4)},
    ),
}
LAST = {"layers": "last 10"}
SMOLLM2: dict[str, Arm] = {  # one variant and three rates each; what matters most first
    "k=1": Arm((0.01, 0.03, 0.08), {"chunk 64": memory([64], **LAST)}),
    "3 levels": Arm((0.007, 0.02, 0.05), levels(THREE, KEPT3[:1], **LAST)),
    "AdamW": Arm((1e-5, 3e-5, 1e-4), {"step 64": tuned(adamw, last=10)}),
    "LoRA": Arm((2e-4, 6e-4, 2e-3), {"rank 8": tuned(adamw, lora=8, last=10)}),
    "SGD": Arm((0.003, 0.01, 0.03), {"step 64": tuned(sgd, last=10)}),
    "4 levels": Arm((0.006, 0.016, 0.04), levels([64, 128, 256, 1024], KEPT4[:1], **LAST)),
    "replay": Arm((0.003, 0.01, 0.03), {"every 4th window": tuned(sgd, replay=4, last=10)}),
    "EWC": Arm((0.003, 0.01, 0.03), {"penalty 1e4": tuned(sgd, penalty=1e4, last=10)}),
    "dynamic evaluation": Arm((3e-5, 1e-4, 3e-4), {"decay 0.02": tuned(sgd, decay=0.02, last=10)}),
}
