"""What the studies of synthetic tasks share: models in lockstep, counted states."""

from __future__ import annotations

from dataclasses import replace

import torch

from nestling.models import presets
from studies.harness.lockstep import Lockstep
from studies.harness.models import arm_of, state_size, weighted
from studies.harness.verdict import interval, percent

SIZE = presets.Size(width=16, layers=2, heads=2, vocabulary=8, parameters=12_000)


def test_logits_and_gradients_are_those_of_each_model_alone():
    models = []
    for seed in range(3):
        torch.manual_seed(seed)
        models.append(arm_of("hope", SIZE, {"chunk": 1, "chunk_others": 1}).double())
    ids = [torch.randint(8, (rows, size)) for rows, size in ((2, 7), (1, 5), (3, 6))]
    targets = [torch.randint(8, i.shape) for i in ids]
    weights = [torch.rand(i.shape, dtype=torch.float64) for i in ids]
    together = Lockstep(models)(ids)
    sum(map(weighted, together, targets, weights)).backward()
    found = [[p.grad.clone() for p in model.parameters()] for model in models]
    for model, i, y, logits, w, grads in zip(
        models, ids, targets, together, weights, found, strict=True
    ):
        model.zero_grad()
        alone = model(i)
        torch.testing.assert_close(logits, alone, rtol=0, atol=1e-10)
        weighted(alone, y, w).backward()
        for grad, parameter in zip(grads, model.parameters(), strict=True):
            torch.testing.assert_close(grad, parameter.grad, rtol=0, atol=1e-9)


def test_states_are_counted_alike():
    width, tail = 40, 3 * 40
    small = presets.Size(width=width, layers=1, heads=1, vocabulary=128, parameters=30_000)
    assert state_size(arm_of("deltanet", small, {})) == width**2 + tail
    assert state_size(arm_of("hope", small, {})) == 5 * width**2 + tail
    split = replace(small, heads=5)  # five memories of five heads: a fifth of the width each
    assert state_size(arm_of("hope", split, {})) == width**2 + tail


def test_interval_of_the_mean():
    mean, half = interval([0.9, 1.0, 0.8])
    assert abs(mean - 0.9) < 1e-12
    assert abs(half - 4.303 * 0.1 / 3**0.5) < 1e-12
    assert percent([1.0, 1.0]) == "100"
