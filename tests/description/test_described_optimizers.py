"""The memory of optimizers as `describe` tells it: as large, and as often changed, as it is."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from described import hope
from torch import nn

from nestling import rules
from nestling.description import describe
from nestling.optim import (
    DGD,
    M3,
    DeepMomentum,
    DeltaMomentum,
    Muon,
    capture,
    compose,
)


@pytest.mark.parametrize(
    ("make", "memories"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), {}),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {"SGD.momentum_buffer": 1}),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), {"AdamW.max_exp_avg_sq": 1}),
        (
            lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
            {"RMSprop.square_avg": 1, "RMSprop.momentum_buffer": 1, "RMSprop.grad_avg": 1},
        ),
        (lambda p: torch.optim.Adagrad(p), {"Adagrad.sum": 1}),
    ],
)
def test_what_torch_optimizers_remember_is_what_they_then_hold(make, memories):
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters())
    description = describe(model, optimizer)
    before = {c.name: c.state for c in description.components if c.kind == "optimizer memory"}
    assert memories.keys() <= before.keys()
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    held: dict[str, int] = {}
    for state in optimizer.state.values():
        for name, value in state.items():
            if torch.is_tensor(value) and value.numel() > 1:
                key = f"{type(optimizer).__name__}.{name}"
                held[key] = held.get(key, 0) + value.numel()
    assert before == held


OURS = {
    "M3": lambda m: M3(m.parameters(), lr=1e-3, chunk=4),
    "Muon": lambda m: Muon(m.parameters()),
    "DeltaMomentum": lambda m: DeltaMomentum(m.parameters()),
    "DeepMomentum": lambda m: DeepMomentum(m.parameters()),
    "DGD": lambda m: DGD(m.parameters(), inputs=capture(m)),
    "Composed": lambda m: compose(m.parameters(), rules.momentum(), rules.adam()),
}


@pytest.mark.parametrize("name", OURS)
def test_our_optimizers_state_has_the_size_we_say(name):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = OURS[name](model)
    description = describe(model, optimizer)
    memories = [c for c in description.components if c.kind == "optimizer memory"]
    model(torch.randn(16, 6)).square().mean().backward()
    optimizer.step()
    held = [v for s in optimizer.state.values() for n, v in s.items() if n != "step"]
    assert sum(c.state for c in memories) == sum(v.numel() for v in held)
    assert all(c.objective != "its rule's" for c in memories)
    assert bool(memories) == (name != "DGD")


def test_a_slow_momentum_is_slower_than_the_weights_that_follow_it():
    model = hope()
    description = describe(model, M3(model.parameters(), lr=1e-3, chunk=4))
    assert description["M3.slow"].chunk == 4
    assert description.level_of("M3.slow") == 1
    assert description.level_of("M3.fast") > description.level_of("model.norm")


def test_an_unknown_rule_is_not_given_an_objective():
    class Own(NamedTuple):
        memory: torch.Tensor

    def step(write, state, weight, gates):
        return write, state

    rule = rules.Rule(lambda weight: Own(torch.zeros_like(weight)), step)
    model = nn.Linear(2, 2)
    assert describe(model, compose(model.parameters(), rule))["Composed.memory"].objective == (
        "its rule's"
    )
