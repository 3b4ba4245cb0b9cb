"""Parts (a) and (b): tune every optimizer with the same number of trials, then run the seeds."""

from __future__ import annotations

from typing import Any

from studies.harness.store import Store
from studies.optim.tasks import Task
from studies.optim.training import ARMS, train

TUNING_SEED = 100
SEEDS = {
    "vit": (10, 11, 12, 13, 14),  # 0 to 4 were seen before M3's defaults were settled
    "lm": tuple(range(10)),
}
RATES: dict[str, tuple[float, ...]] = {  # the same number for every arm
    "AdamW": (1e-3, 2e-3, 4e-3, 8e-3),
    "Muon": (4e-3, 8e-3, 16e-3, 32e-3),
    "AdaMuon": (4e-3, 8e-3, 16e-3, 32e-3),
    "M3": (4e-3, 8e-3, 16e-3, 32e-3),
    "M3 literal": (3e-6, 1e-5, 3e-5, 1e-4),
}
SHIFTED = {
    ("lm", "AdamW"): (2.5e-4, 5e-4, 1e-3, 2e-3)
}  # its best lay at the edge of the first grid


def tune(task: Task, arm: str, store: Store) -> tuple[float, dict[float, float]]:
    """The rate with the least training loss on a seed that is not used afterwards; all trials."""
    losses = {
        rate: store.get(
            f"{task.name}{task.steps} {arm} tune {rate:g}",
            lambda rate=rate: train(task, ARMS[arm], rate, TUNING_SEED),
        )["train"]
        for rate in SHIFTED.get((task.name, arm), RATES[arm])
    }
    return min(losses, key=losses.__getitem__), losses


def study(task: Task, store: Store, seeds: tuple[int, ...] | None = None) -> dict[str, Any]:
    """Every arm: its trials, its rate, and one result per seed."""
    results: dict[str, Any] = {}
    rates = {arm: tune(task, arm, store) for arm in ARMS}
    for seed in seeds or SEEDS[task.name]:  # seed by seed, so that a stopped study is balanced
        for arm in ARMS:
            rate, trials = rates[arm]
            run = store.get(
                f"{task.name}{task.steps} {arm} {rate:g} seed {seed}",
                lambda arm=arm, rate=rate, seed=seed: train(task, ARMS[arm], rate, seed),
            )
            entry = results.setdefault(arm, {"rate": rate, "trials": trials, "runs": []})
            entry["runs"].append(run)
    return results
