"""The recipe of the older synthetic studies: AdamW, a short rise, a cosine, models in lockstep."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from studies.harness.lockstep import Lockstep
from studies.harness.loop import train
from studies.harness.models import weighted

__all__ = ["Batch", "train_all"]

Batch = tuple[Tensor, Tensor, Tensor]  # tokens, targets, weights: [B, T] each


def schedule(step: int, steps: int) -> float:
    """Up over 50 steps, down to a fiftieth along a cosine."""
    decay = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(1.0, (step + 1) / 50) * decay


def train_all(
    models: list[nn.Module],
    batches: list[Callable[[int], Batch]],
    *,
    steps: int,
    rates: list[float],
) -> list[list[float]]:
    """Train on the weighted cross-entropy; the losses of each model.

    Several models (of Hope, alike but for their weights) go in lockstep.
    """
    forward = Lockstep(models) if len(models) > 1 else lambda ids: [models[0](ids[0])]
    groups = [{"params": list(m.parameters()), "lr": r} for m, r in zip(models, rates, strict=True)]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01, betas=(0.9, 0.98))

    def loss(step: int) -> list[Tensor]:
        given = [draw(step) for draw in batches]
        logits = forward([ids for ids, _, _ in given])
        return [weighted(y, *rest) for y, (_, *rest) in zip(logits, given, strict=True)]

    return train(models, loss, optimizer, steps=steps, schedule=schedule).losses
