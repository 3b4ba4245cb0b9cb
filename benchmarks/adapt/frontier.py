"""(i) Plasticity against forgetting: the loss on what is learned and on what was known before.

Every arm learns the same stream once, at each of its rates; then the loss on the stream's
continuation (new) and on held-out text of the base model's own kind (old) is measured. The curve of
an arm runs through its rates. Arms are compared at the same new loss, by linear interpolation.
"""

from __future__ import annotations

import itertools
from typing import Any

from arms import PENALTIES, Arm, ewc
from texts import Base, book

import nestling

TUNING_BOOK = 7


def run(base: Base, data: Any, arm: Arm, rate: float, seed: int, size: tuple[int, int]) -> Any:
    """One arm at one rate on one book."""
    length, continued = size
    ids = book(base, data, seed, length + continued)
    score = arm.learn(base, ids[:length], rate)
    return {"new": score(ids[length:]), "old": score(base.old)}


def frozen(base: Base, data: Any, seed: int, size: tuple[int, int]) -> Any:
    """The base model itself."""
    length, continued = size
    ids = book(base, data, seed, length + continued)
    learner = nestling.adapt(base.model, [64], rate=0.0)
    return {"new": learner.score(ids[length:]), "old": learner.score(base.old)}


def study(
    name: str,
    base: Base,
    data: Any,
    store: Any,
    seeds: tuple[int, ...],
    arms: dict[str, Arm],
    size: tuple[int, int],
) -> dict[str, Any]:
    """Seed by seed, arm by arm, rate by rate."""
    results: dict[str, Any] = {"frozen": {}, "arms": {arm: {} for arm in arms}, "size": size}
    for seed in seeds:
        results["frozen"][seed] = store.get(
            f"{name} frozen seed {seed}", lambda s=seed: frozen(base, data, s, size)
        )
        for label, arm in arms.items():
            for rate in arm.rates:
                done = store.get(
                    f"{name} {label} {rate:g} seed {seed}",
                    lambda a=arm, r=rate, s=seed: run(base, data, a, r, s, size),
                )
                results["arms"][label].setdefault(seed, []).append({"rate": rate, **done})
    return results


def best_penalty(base: Base, data: Any, store: Any, size: tuple[int, int]) -> float:
    """EWC's penalty with the least new + old loss on a book that is not a seed."""
    sums = {}
    for penalty in PENALTIES:
        for rate in (0.003, 0.008):
            done = store.get(
                f"frontier EWC tune {penalty:g} {rate:g}",
                lambda p=penalty, r=rate: run(base, data, ewc(p), r, TUNING_BOOK, size),
            )
            sums[penalty] = min(sums.get(penalty, 1e9), done["new"] + done["old"])
    return min(sums, key=sums.__getitem__)


def old_at(points: list[dict[str, float]], new: float) -> float | None:
    """The old loss where an arm's curve through its rates first reaches this new loss.

    None where it never does, or only below its lowest rate, where the curve is not known.
    """
    for before, after in itertools.pairwise(points):
        if after["new"] <= new <= before["new"]:
            span = before["new"] - after["new"]
            share = (before["new"] - new) / span if span else 0.0
            return before["old"] + share * (after["old"] - before["old"])
    return None
