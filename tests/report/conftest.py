"""A report with made-up figures, for the tests that look at it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nestling.continuum import MemoryLevel
from nestling.description import Timeline, describe
from nestling.levels import LevelUpdate
from nestling.report.demo import DemoResults, Trained


@pytest.fixture
def results() -> DemoResults:
    """Lines that end together, names of ordinary length, four levels."""
    timeline = Timeline()
    chunks = {"fast": 64, "middle": 256, "slow": 1024, "slowest": 4096}
    for position in range(64, 4097, 64):
        for name, chunk in chunks.items():
            if position % chunk == 0:
                surprise = 2.0 / position**0.2
                timeline.record(LevelUpdate(position, name, surprise, 0.5, 0.1, 0.1))
    places = [32.0, 96.0, 192.0, 384.0, 768.0, 1536.0, 3000.0]
    readers = ("Transformer", "Hope", "Hope, learning")
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    words = [(word, i % 5 / 2) for i, word in enumerate("Day 1 , spring. It <rained> all".split())]
    distances = {
        name: [(at, x / 4096) for x in range(0, 4097, chunk) for at in (x, min(x + chunk, 4096))]
        for name, chunk in chunks.items()
    }
    return DemoResults(
        result=["Hope, learning 1.003; Hope 1.005.", "Every level changed: fast 64 times."],
        trained=[
            Trained(name, 996_088, 491_520, 71.3, 1.2, [(1, 5.5), (10, 3.9), (120, 1.0)])
            for name in readers[:2]
        ],
        documents=4,
        positions={name: [(x, 1 + 10 / (x + i)) for x in places] for i, name in enumerate(readers)},
        kept={
            name: [(g, 0.3 / (1 + i * g)) for g in (0.0, 256.0, 1024.0)]
            for i, name in enumerate(readers)
        },
        passages={"the beginning": words * 6, "after 3,000 bytes": words * 6},
        description=describe(model, torch.optim.AdamW(model.parameters())),
        timeline=timeline,
        levels={
            name: MemoryLevel(name=name, chunk=chunk, rate=0.1) for name, chunk in chunks.items()
        },
        distances=distances,
        worth=dict.fromkeys(chunks, 0.01),
        samples=dict.fromkeys(readers[:2], "This is the chronicle of Mor. " * 8),
    )
