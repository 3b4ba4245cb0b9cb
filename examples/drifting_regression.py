"""Levels in a network that is no language model: a regression whose target keeps changing.

    python examples/drifting_regression.py

A stream of pairs (x, y) with y = sin(a x) + b: `a` never changes, `b` jumps every 100 pairs. A fast
level follows the jumps, a slow one learns what stays. The network itself is never changed; what was
learned lives in the continuum's state, one per stream.
"""

from __future__ import annotations

import torch
from torch import nn

from nestling.continuum import Continuum, MemoryLevel, shared_slots

STREAMS = 4

LEVELS = {
    "frozen": [],
    "one fast level": [("fast", 4, 0.1)],
    "one slow level": [("slow", 32, 0.1)],
    "two levels": [("fast", 4, 0.1), ("slow", 32, 0.1)],
}


def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square()


def stream(steps: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets [B, T, 1]."""
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(STREAMS, steps, 1, generator=generator) - 1
    jumps = torch.randn(STREAMS, steps // 100 + 1, 1, generator=generator)
    return x, torch.sin(3 * x) + jumps.repeat_interleave(100, 1)[:, :steps]


def run(steps: int = 1000) -> dict[str, float]:
    """The mean loss over the second half of the stream, for each set of levels."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    )
    x, y = stream(steps)
    found = {}
    for name, chosen in LEVELS.items():
        levels = [MemoryLevel(name=n, chunk=chunk, rate=rate) for n, chunk, rate in chosen]
        levels = levels or [MemoryLevel(name="none", chunk=4, rate=0.0)]
        continuum = Continuum(network, levels, shared_slots(network, len(levels)), loss=squared)
        out = continuum(x, targets=y, measure=False)
        found[name] = float(out.losses[:, steps // 2 :].mean())
    return found


if __name__ == "__main__":
    for name, loss in run().items():
        print(f"{name:16} {loss:.3f}")
