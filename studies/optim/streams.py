"""Part (c): DGD against gradient descent on streams, 30 seeds.

- "iid": inputs are independent;
- "AR(1)": each input is 0.95 of the last plus noise, so neighbours are nearly parallel;
- "AR(1), 8 rows": the same, eight neighbours a step;
- "orthogonal": four tasks on orthogonal subspaces in turn (Eq. 45).

A linear layer learns a noisy linear target with a squared error. Every rule tries the same rates;
the best by final loss on the tuning seeds is run on the others, all seeds and rates as one batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nestling.paper.exhibits.tasks import OrthogonalTasks
from nestling.rules import Gates, Rule, Write, apply, dgd, identity

INPUTS, OUTPUTS, STEPS, NOISE, SEEDS, KEEP = 16, 4, 400, 0.3, 30, 0.95
STREAMS = ("iid", "AR(1)", "AR(1), 8 rows", "orthogonal")
RULES: dict[str, Rule] = {
    "gradient descent": identity,
    "DGD": dgd(mean=True, erase=0.0),
    "DGD as printed": dgd(mean=True, erase=1.0),
}
RATES = torch.logspace(-3, 1.5, 24)
TASKS = OrthogonalTasks(noise=NOISE)


def pairs(
    stream: str, generator: torch.Generator, truth: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows of each step for every seed: x [S, n, Di], y [S, n, Do]."""
    seeds, rows = truth.shape[0], 8 if "8 rows" in stream else 1
    keep = KEEP if stream.startswith("AR") else 0.0
    x = torch.randn(seeds, INPUTS, generator=generator)
    for step in range(STEPS):
        seen = []
        for _ in range(rows):
            fresh = torch.randn(seeds, INPUTS, generator=generator)
            x = keep * x + (1 - keep**2) ** 0.5 * fresh
            seen.append(x)
        inputs = torch.stack(seen, 1)
        if stream == "orthogonal":
            task = step * TASKS.tasks // STEPS
            block = TASKS.truth()[0][:, task * TASKS.width : (task + 1) * TASKS.width]
            inputs = inputs[..., : TASKS.width] @ block.mT
        noise = NOISE * torch.randn(seeds, rows, OUTPUTS, generator=generator)
        yield inputs, inputs @ truth.mT + noise


def run(stream: str, rule: Rule, rates: Tensor, seed: int, seeds: int) -> dict[str, Tensor]:
    """Final loss, mean loss along the way and forgetting, each [rates, seeds]."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(seeds, OUTPUTS, INPUTS, generator=generator)
    basis = TASKS.truth()[0].reshape(INPUTS, TASKS.tasks, -1)

    def losses(weight: Tensor) -> Tensor:  # per task: E |W x - T x|^2 for unit covariance
        miss = torch.einsum("rsoi,itw->rstow", weight - truth, basis)
        return miss.square().sum((-2, -1))

    weight = torch.zeros(len(rates), seeds, OUTPUTS, INPUTS)
    state = rule.init(weight)
    online, ended = torch.zeros(len(rates), seeds), list[Tensor]()
    for step, (x, y) in enumerate(pairs(stream, generator, truth), 1):
        miss = x @ weight.mT - y
        online += miss.square().sum(-1).mean(-1) / STEPS
        surprise = miss / x.shape[-2]  # the loss is a mean over the rows
        write = Write(surprise.mT @ x, x, -surprise)
        gates = Gates(rate=rates[:, None, None, None], step=step)
        weight, state = apply(rule, weight, write, state, gates)
        if step % (STEPS // TASKS.tasks) == 0:
            ended.append(losses(weight)[..., len(ended)])
    last = losses(weight)
    lost = (last - torch.stack(ended, -1))[..., :-1].mean(-1)
    return {"final": last.sum(-1), "online": online, "forgetting": lost}


def compare(rates: Tensor = RATES) -> dict[str, Any]:
    """Every stream and rule: the best rate and its numbers on 30 seeds not used to find it."""
    results: dict[str, Any] = {}
    for stream in STREAMS:
        for name, rule in RULES.items():
            trial = run(stream, rule, rates, seed=1, seeds=10)["final"].mean(1)
            rate = rates[trial.nan_to_num(nan=torch.inf).argmin()]
            numbers = run(stream, rule, rate[None], seed=2, seeds=SEEDS)
            results.setdefault(stream, {})[name] = {
                "rate": float(rate),
                **{key: value[0].tolist() for key, value in numbers.items()},
            }
    return results
