"""How good a model is on text it is not trained on, and what each of its levels is worth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nestling.losses import IGNORE
from nestling.train.batches import Shuffled
from nestling.train.distributed import World
from nestling.train.packed import PackedCorpus
from nestling.train.recipe import Recipe
from nestling.train.step import loss_sum, precision


@torch.no_grad()
def validation_loss(
    model: nn.Module,
    packed: PackedCorpus,
    recipe: Recipe,
    world: World,
    *,
    learn: bool | Sequence[str] = True,
    windows: int | None = None,
) -> float:
    """The mean next-token loss on the first windows of a packed corpus.

    learn: which levels learn while they read, in a model whose levels do.
    """
    windows = recipe.run.eval_windows if windows is None else windows
    rows = max(world.size, min(recipe.run.rows, windows))
    batches = Shuffled(packed=packed, rows=rows, length=recipe.data.length, seed=0)
    steps = max(1, min(windows, batches.windows) // rows)
    summed, count = torch.zeros((), dtype=torch.float64, device=world.device), 0.0
    model.eval()
    for step in range(steps):
        batch = batches(step, world.rank, world.size)
        with precision(recipe.run, world):
            loss, _ = loss_sum(model, batch, world.device, learn=learn)
        summed += loss
        count += float((batch.targets != IGNORE).sum())
    model.train()
    total, count = world.sum(float(summed), count)
    return total / count


EFFECT_WINDOWS = 8
"""Windows of validation text on which the effect of each level is measured."""


def effects(
    model: nn.Module,
    packed: PackedCorpus,
    recipe: Recipe,
    world: World,
    levels: Sequence[str],
) -> dict[str, float]:
    """The worth of each learning level on a slice of the text, in nats per token.

    The effect of a level is the loss with it frozen minus the loss with all of them learning.
    """

    def loss(names: Sequence[str]) -> float:
        return validation_loss(model, packed, recipe, world, learn=names, windows=EFFECT_WINDOWS)

    together = loss(levels)
    return {name: loss([each for each in levels if each != name]) - together for name in levels}


@torch.no_grad()
def level_measures(model: Any, ids: Tensor, levels: Sequence[str]) -> dict[str, float]:
    """Each learning level's gradient norm and distance at its last update on some text."""
    model.eval()
    updates = model(ids, measure=True, use_cache=False, learn=levels).updates
    model.train()
    found = {}
    for update in updates or ():
        found[f"inner_gradient_norm/{update.level}"] = float(update.grad_norm.mean())
        found[f"distance/{update.level}"] = float(update.distance.mean())
    return found
