"""(i) Plasticity against forgetting: the loss on what is learned and on what was known before.

Every arm learns the same stream once, at each of its rates; then the loss on the stream's
continuation (new) and on held-out text of the base model's own kind (old) is measured. The curve of
an arm runs through its rates. Arms are compared at the same new loss, by linear interpolation.

Each arm has as many variants and rates as every other. The variant is chosen on tuning books, which
are not seeds: the least new + old loss at its best rate, mean over the books.
"""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import torch

import nestling
from studies.adapt.arms import Arm, Learn
from studies.adapt.texts import TUNING, Base


def run(base: Base, data: Any, learn: Learn, rate: float, which: int, size: Any) -> Any:
    """One way of learning at one rate on one book."""
    length, continued = size
    ids = base.text(base, data, which, length + continued)
    score = learn(base, ids[:length], rate)
    return {"new": score(ids[length:]), "old": score(base.old)}


def frozen(base: Base, data: Any, which: int, size: tuple[int, int]) -> Any:
    """The base model itself."""
    length, continued = size
    ids = base.text(base, data, which, length + continued)
    learner = nestling.adapt(base.model, [64], rate=0.0)
    return {"new": learner.score(ids[length:]), "old": learner.score(base.old)}


def rate_zero(base: Base, data: Any) -> dict[str, Any]:
    """Whether a learner at rate 0 answers as the base model, to the bit, after reading."""
    ids = base.text(base, data, 0, 512)
    learner = nestling.adapt(base.model, [64, 128, 256], rate=0.0)
    learner.learn(ids[:384])
    with torch.no_grad():
        same = torch.equal(learner(ids[None]).logits, base.model(ids[None]).logits)
    return {"same": same, "tokens": len(ids)}


def choose(
    name: str, base: Base, data: Any, store: Any, label: str, arm: Arm, size: Any
) -> dict[str, Any]:
    """The variant with the least new + old loss on the tuning books; all sums are kept."""
    sums: dict[str, float] = {}
    if len(arm.variants) == 1:
        return {"variant": next(iter(arm.variants)), "tried": sums, "rates": list(arm.rates)}
    for variant, learn in arm.variants.items():
        found = {
            rate: statistics.fmean(
                sum(
                    store.get(
                        f"{name} {label}, {variant} {rate:g} tune {which}",
                        lambda r=rate, w=which, f=learn: run(base, data, f, r, w, size),
                    ).values()
                )
                for which in TUNING[:1]
            )
            for rate in arm.rates
        }
        sums[variant] = min((v for v in found.values() if math.isfinite(v)), default=math.inf)
    best = min(sums, key=sums.__getitem__)
    return {"variant": best, "tried": sums, "rates": list(arm.rates)}


def study(
    name: str,
    base: Base,
    data: Any,
    store: Any,
    seeds: tuple[int, ...],
    arms: dict[str, Arm],
    size: tuple[int, int],
) -> dict[str, Any]:
    """Choose every arm's variant; then seed by seed, arm by arm, rate by rate."""
    chosen = {
        label: choose(name, base, data, store, label, arm, size) for label, arm in arms.items()
    }
    results: dict[str, Any] = {
        "frozen": {}, "arms": {arm: {} for arm in arms}, "size": size, "chosen": chosen
    }  # fmt: skip
    for number, seed in enumerate(seeds):
        results["frozen"][seed] = store.get(
            f"{name} frozen book {seed}", lambda s=seed: frozen(base, data, s, size)
        )
        for label, arm in arms.items():
            if arm.seeds is not None and number >= arm.seeds:
                continue
            variant = chosen[label]["variant"]
            for rate in arm.rates:
                done = store.get(
                    f"{name} {label}, {variant} {rate:g} book {seed}",
                    lambda f=arm.variants[variant], r=rate, s=seed: run(base, data, f, r, s, size),
                )
                results["arms"][label].setdefault(seed, []).append({"rate": rate, **done})
    return results


def old_at(points: list[dict[str, float]], new: float) -> float | None:
    """The old loss where an arm's curve through its rates first reaches this new loss.

    None where it never does.
    """
    for before, after in itertools.pairwise(points):
        if after["new"] <= new <= before["new"]:
            span = before["new"] - after["new"]
            share = (before["new"] - new) / span if span else 0.0
            return before["old"] + share * (after["old"] - before["old"])
    return None
