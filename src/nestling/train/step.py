"""One step: losses and gradients of a batch, over micro-batches and processes, and their sizes."""

from __future__ import annotations

import contextlib
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nestling.losses import IGNORE, pair_losses
from nestling.models.cache import MemoryCache
from nestling.train.batches import Batch
from nestling.train.optimizers import level_of
from nestling.train.recipe import Run
from nestling.train.restart import Restarts
from nestling.train.world import World
from nestling.tree import state_detach

__all__ = ["Gradients", "gradients", "level_norms", "loss_sum"]


class Gradients(NamedTuple):
    """What a backward pass found: the mean loss over all processes, and the memories after it."""

    loss: float
    tokens: int
    carry: list[Any] | None


def loss_sum(
    model: nn.Module, batch: Batch, states: Any = None, *, keep: bool = False
) -> tuple[Tensor, Any]:
    """The summed next-token loss of a batch, and the memory states after it (when kept)."""
    options: dict[str, Any] = {"use_cache": keep}
    if keep and states is not None:
        options["past_key_values"] = MemoryCache(len(states), states)
    mask = None if bool(batch.mask.all()) else batch.mask
    out = model(input_ids=batch.ids, attention_mask=mask, **options)
    loss = pair_losses(out.logits, batch.targets).sum()
    return loss, out.past_key_values.states if keep else None


def gradients(
    model: nn.Module,
    batch: Batch,
    run: Run,
    world: World,
    carry: list[Any] | None = None,
    restarts: Restarts | None = None,
) -> Gradients:
    """Add the gradient of the batch's mean loss to `.grad`, the mean taken over all processes.

    With `restarts`, memories carry on: `carry` holds each micro-batch's states from the step
    before, and rows that start a document start anew. The states of the returned carry have no
    history (truncated backpropagation).
    """
    keep = restarts is not None
    total = world.sum(float((batch.targets != IGNORE).sum()))[0]
    pieces = _micro(batch, run.micro)
    after: list[Any] = []
    summed = 0.0
    for number, piece in enumerate(pieces):
        states = None if carry is None else carry[number]
        last = number == len(pieces) - 1
        anew = restarts.rows(piece.fresh) if restarts else contextlib.nullcontext()
        with anew, _synchronised(model, last):
            with _precision(run, world):
                loss, states = loss_sum(model, _to(piece, world.device), states, keep=keep)
            # DDP and FSDP average over processes; the sum over all of them is what counts.
            (loss * (world.size / total)).backward()
        summed += float(loss.detach())
        after.append(state_detach(states) if keep else None)
    return Gradients(world.sum(summed)[0] / total, int(total), after if keep else None)


def _micro(batch: Batch, rows: int | None) -> list[Batch]:
    if rows is None or rows >= len(batch.ids):
        return [batch]
    return [Batch(*part) for part in zip(*(field.split(rows) for field in batch), strict=True)]


def _to(batch: Batch, device: torch.device) -> Batch:
    return Batch(*(field.to(device) for field in batch))


@contextlib.contextmanager
def _synchronised(model: nn.Module, last: bool) -> Any:
    """Exchange gradients between processes in the last micro-batch only."""
    if isinstance(model, nn.parallel.DistributedDataParallel) and not last:
        with model.no_sync():
            yield
        return
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)  # type: ignore[operator]
    yield


def _precision(run: Run, world: World) -> Any:
    if run.precision == "bf16":
        return torch.autocast(world.device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()


def level_norms(model: Any) -> dict[str, float]:
    """The gradient's norm per level: `mixer`, each level of the channel memory by name, `rest`."""
    squares: dict[str, float] = {}
    for name, weight in model.named_parameters():
        if weight.grad is None:
            continue
        grad = weight.grad.full_tensor() if hasattr(weight.grad, "full_tensor") else weight.grad
        where = level_of(model, name)
        squares[where] = squares.get(where, 0.0) + float(grad.square().sum())
    return {where: math.sqrt(square) for where, square in squares.items()}
