"""Part (d): delta momentum against momentum on the surface of Eq. 53, 100 starts, tuned rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nestling.paper.exhibits.tasks import SURFACE_START, surface
from nestling.rules import Gates, Rule, Write, apply, delta_momentum, momentum

DECAYS, STEPS, GOAL = (0.8, 0.9, 0.95), 300, 1e-3
RATES = torch.logspace(-3, 0.5, 15)
RULES = {
    "momentum": [momentum(decay) for decay in DECAYS],
    "delta momentum": [delta_momentum(decay=decay) for decay in DECAYS],
}
STEEPNESS = (2.0, 4.0, 10.0, 20.0)  # the paper gives no constants: several walls


def needed(rule: Rule, rates: Tensor, starts: Tensor, k: float) -> Tensor:
    """Steps until the loss stays below the goal, [rates, starts]; STEPS + 1 if it never does."""
    slope = torch.func.grad(lambda points: surface(points, k=k).sum())
    point = starts[None, :, None].expand(len(rates), -1, 1, 2).clone()
    state, steps = rule.init(point), torch.zeros(len(rates), len(starts))
    for step in range(1, STEPS + 1):
        gates = Gates(rate=rates[:, None, None, None], step=step)
        point, state = apply(rule, point, Write(slope(point)), state, gates)
        high = ~(surface(point, k=k)[..., 0] < GOAL)
        steps = torch.where(high, step + 1.0, steps)
    return steps


def compare(walls: Sequence[float] = STEEPNESS) -> dict[str, Any]:
    """Every steepness and rule: tuned on 50 starts, measured on 100 others and the paper's."""
    generator = torch.Generator().manual_seed(0)
    starts = 8.0 * torch.rand(150, 2, generator=generator) - 4.0
    tuning, fresh = starts[:50], torch.cat([torch.tensor([SURFACE_START]), starts[50:]])
    results: dict[str, Any] = {}
    for k in walls:
        for name, rules in RULES.items():
            scores = torch.stack([needed(rule, RATES, tuning, k).mean(1) for rule in rules])
            i, j = divmod(int(scores.argmin()), len(RATES))
            steps = needed(rules[i], RATES[j : j + 1], fresh, k)[0]
            results.setdefault(f"k = {k:g}", {})[name] = {
                "decay": DECAYS[i],
                "rate": float(RATES[j]),
                "paper": float(steps[0]),
                "steps": steps[1:].tolist(),
            }
    return results
