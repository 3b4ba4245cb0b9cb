"""Parts (a) and (b): tune every optimizer with the same number of trials, then run the seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from nestling.optim import M3, AdaMuon, Muon, param_groups
from studies.harness.loop import cosine
from studies.harness.loop import train as descend
from studies.harness.models import parameters
from studies.harness.store import Store, key_of
from studies.harness.tuning import best
from studies.optim.networks import cross_entropy
from studies.optim.tasks import Task

BETAS = (0.9, 0.95)
DECAY = 0.1
Maker = Callable[[nn.Module, float], torch.optim.Optimizer]


def adamw(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """torch's own, the baseline everyone uses."""
    return torch.optim.AdamW(model.parameters(), lr=rate, betas=BETAS, weight_decay=DECAY)


def orthogonal(kind: type, **options: Any) -> Maker:
    """M3, Muon or AdaMuon: hidden matrices orthogonalised, the rest by AdamW at the same rate."""

    def make(model: nn.Module, rate: float) -> torch.optim.Optimizer:
        groups = param_groups(model)
        return kind(groups, lr=rate, adam_betas=BETAS, weight_decay=DECAY, **options)

    return make


ARMS: dict[str, Maker] = {
    "AdamW": adamw,
    "Muon": orthogonal(Muon),
    "AdaMuon": orthogonal(AdaMuon),
    "M3": orthogonal(M3),
    "M3 literal": orthogonal(M3, literal=True),
}


def train(task: Task, make: Maker, rate: float, seed: int) -> dict[str, Any]:
    """Train once; the same seed gives every optimizer the same weights and the same batches."""
    torch.manual_seed(seed)
    model = task.model()
    generator = torch.Generator().manual_seed(1000 + seed)

    def loss(_: int) -> torch.Tensor:
        inputs, targets = task.batch(generator)
        return cross_entropy(model(inputs), targets)

    trained = descend([model], loss, make(model, rate), steps=task.steps, schedule=cosine())
    (losses,) = trained.losses
    return {
        "train": trained.last(0.05),
        **evaluate(model, task),
        "seconds": trained.seconds,
        "step_seconds": trained.stepping / len(losses),
        "steps": len(losses),
        "parameters": parameters(model),
        "curve": [sum(part) / len(part) for part in _pieces(losses, 40)],
    }


@torch.no_grad()
def evaluate(model: nn.Module, task: Task) -> dict[str, float]:
    """Loss and accuracy on the held-out batches."""
    model.eval()
    losses, right, total = [], 0, 0
    for inputs, targets in task.test():
        logits = model(inputs)
        losses.append(cross_entropy(logits, targets).item())
        right += int((logits.argmax(-1) == targets).sum())
        total += targets.numel()
    loss = sum(losses) / len(losses)
    return {"test": loss if math.isfinite(loss) else math.inf, "accuracy": right / total}


def _pieces(values: list[float], number: int) -> list[list[float]]:
    size = max(1, len(values) // number)
    return [values[i : i + size] for i in range(0, len(values), size)]


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


def tune(task: Task, arm: str, store: Store, tries: int | None) -> tuple[float, dict[float, float]]:
    """The rate with the least training loss on a seed that is not used afterwards; all trials."""
    losses = {
        rate: store.get(
            key_of(f"{task.name}{task.steps} {arm} tune {rate:g}"),
            lambda rate=rate: train(task, ARMS[arm], rate, TUNING_SEED),
        )["train"]
        for rate in SHIFTED.get((task.name, arm), RATES[arm])[:tries]
    }
    return best(list(losses), losses.__getitem__, lower=True), losses


def study(
    task: Task, store: Store, seeds: Sequence[int] | None = None, tries: int | None = None
) -> dict[str, Any]:
    """Every arm: its trials (at most `tries`), its rate, and one result per seed."""
    results: dict[str, Any] = {}
    rates = {arm: tune(task, arm, store, tries) for arm in ARMS}
    for seed in seeds or SEEDS[task.name]:  # seed by seed, so that a stopped study is balanced
        for arm in ARMS:
            rate, trials = rates[arm]
            run = store.get(
                key_of(f"{task.name}{task.steps} {arm} {rate:g} seed {seed}"),
                lambda arm=arm, rate=rate, seed=seed: train(task, ARMS[arm], rate, seed),
            )
            entry = results.setdefault(arm, {"rate": rate, "trials": trials, "runs": []})
            entry["runs"].append(run)
    return results
