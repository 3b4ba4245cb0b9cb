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
from pathlib import Path
from typing import Any

import torch

import nestling
from studies.adapt.arms import Arm, Learn
from studies.adapt.texts import TUNING, Base
from studies.harness.store import key_of
from studies.harness.verdict import judged, show


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
                        key_of(f"{name} {label}, {variant} {rate:g} tune {which}"),
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
            key_of(f"{name} frozen book {seed}"), lambda s=seed: frozen(base, data, s, size)
        )
        for label, arm in arms.items():
            if arm.seeds is not None and number >= arm.seeds:
                continue
            variant = chosen[label]["variant"]
            for rate in arm.rates:
                done = store.get(
                    key_of(f"{name} {label}, {variant} {rate:g} book {seed}"),
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


COLOURS = (
    *("#8c8c8c", "#57534e", "#d1495b", "#00798c", "#edae49"),
    *("#8d6a9f", "#4d7c0f", "#0369a1", "#9d174d", "#b45309"),
)
LEVELS = ("3 levels", "4 levels")
SHARES = (0.5, 0.75, 0.9)


def section(
    title: str, said: str, part: dict[str, Any], picture: Path, text: str = "book"
) -> list[str]:
    """Title, what was done, picture, table and verdicts; a seed is a `text`."""
    targets, shared = _targets(part), _shared(part)
    shares = list(next(iter(targets.values())))
    start = {key: show([s[key] for s in part["frozen"].values()]) for key in ("new", "old")}
    lines = [
        f"## {title}",
        "",
        f"{part['size'][0]:,} tokens of a {text} are learned in one pass; *new* is the loss on the"
        f" {part['size'][1]:,} tokens after them, *old* the loss on held-out text of the kind the"
        f" base model knows. {len(part['frozen'])} {text}s. Frozen model: new {start['new']}, old"
        f" {start['old']}. {said} The table gives the rise of the old loss where an arm's curve"
        " over its rates reaches a share of the best gain on the new text that k=1 has at any"
        " rate, and the best new loss of the arm (-: never reached; a mean over fewer of them where"
        " some do not reach it). Picture and best new loss: the"
        f" {len(shared)} {text}s that all arms have.",
        "",
        f"![Frontier]({picture.name})",
        "",
        "| | variant | "
        + " | ".join(f"old rises at {s} of the gain" for s in shares)
        + " | best new |",
        "|---|---|" + "---|" * (len(shares) + 1),
    ]
    rises: dict[str, dict[str, dict[str, float]]] = {}
    for arm, seeds in part["arms"].items():
        rises[arm] = {share: _rises(part, seeds, targets, share) for share in shares}
        best = [min(point["new"] for point in seeds[seed]) for seed in shared]
        cells = [show(list(rises[arm][share].values())) for share in shares]
        variant = part["chosen"][arm]["variant"]
        lines.append(f"| {arm} | {variant} | {' | '.join(cells)} | {show(best)} |")
    lines += ["", "Claim: at the same new loss the old loss rises less with 3 or 4 levels.", ""]
    for arm in LEVELS:
        for other in part["arms"]:
            if arm in rises and other not in LEVELS:
                lines.append(f"- {arm} against {other}: " + _compare(rises, arm, other, shares))
    _plot(part, picture)
    return [*lines, ""]


def _shared(part: dict[str, Any]) -> list[str]:
    """The seeds that every arm has."""
    return [seed for seed in part["frozen"] if all(seed in arm for arm in part["arms"].values())]


def _targets(part: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Per seed the new losses at which arms are compared: shares of what k=1 gains at its best."""
    found: dict[str, dict[str, float]] = {}
    for seed, start in part["frozen"].items():
        gain = start["new"] - min(point["new"] for point in part["arms"]["k=1"][seed])
        found[seed] = {f"{share:.0%}": start["new"] - share * gain for share in SHARES}
    return found


def _rises(part: Any, seeds: Any, targets: Any, share: str) -> dict[str, float]:
    found = {}
    for seed, points in seeds.items():
        curve = [part["frozen"][seed], *points]  # from rate 0 on
        old = old_at(curve, targets[seed][share])
        if old is not None:
            found[seed] = old - part["frozen"][seed]["old"]
    return found


def _compare(rises: Any, arm: str, other: str, shares: list[str]) -> str:
    said = []
    for share in shares:
        mine, its = rises[arm][share], rises[other][share]
        both = [seed for seed in mine if seed in its]
        if len(both) > 1:
            few = "" if len(both) == len(mine) else f" on {len(both)} of {len(mine)}"
            gaps = [mine[s] - its[s] for s in both]
            said.append(f"at {share}{few} {judged(gaps, higher=False)}")
    return ("; ".join(said) or "no common new loss on two of them") + "."


def _plot(part: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 5))
    shared, highest = _shared(part), 0.0
    start = {k: statistics.fmean(part["frozen"][s][k] for s in shared) for k in ("new", "old")}
    for number, (arm, seeds) in enumerate(part["arms"].items()):
        xs, ys = [start["new"]], [start["old"]]
        for i in range(len(seeds[shared[0]])):
            xs.append(statistics.fmean(seeds[seed][i]["new"] for seed in shared))
            ys.append(statistics.fmean(seeds[seed][i]["old"] for seed in shared))
        ours = arm == "k=1" or arm in LEVELS
        highest = max([highest, *ys]) if ours else highest
        axis.plot(
            xs,
            ys,
            marker="o" if ours else "x",
            linestyle="-" if ours else "--",
            linewidth=2 if ours else 1,
            color=COLOURS[number % len(COLOURS)],
            label=arm,
        )
    gain = start["new"] - min(p["new"] for seed in shared for p in part["arms"]["k=1"][seed])
    axis.set_xlim(right=start["new"] + 0.15 * abs(gain))
    spread = 1.3 * (highest - start["old"])  # what ruins itself may leave the picture
    axis.set_ylim(start["old"] - 0.05 * spread, start["old"] + spread)
    axis.set_xlabel("new: loss on the continuation of what was learned")
    axis.set_ylabel("old: loss on what the base model knew")
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
