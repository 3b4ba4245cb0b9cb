"""Models in lockstep get what each would get alone."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from lockstep import Lockstep
from synthetic import arm_of, weighted

from nestling.models import presets

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
