"""One step: losses and gradients of a batch, over micro-batches and processes, and their sizes.

Memories that are carried from step to step start anew where a document starts (`FreshRows`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nestling.losses import IGNORE, pair_losses
from nestling.models.cache import Learned, MemoryCache
from nestling.models.learning import begin_rows
from nestling.shards import is_sharded, local
from nestling.train.batches import Batch
from nestling.train.distributed import World
from nestling.train.optimizers import places
from nestling.train.recipe import Run
from nestling.tree import state_detach, tree_map


class BackwardResult(NamedTuple):
    """The result of a backward pass: mean loss over all processes, and the memories after it."""

    loss: float
    tokens: int
    carry: list[Any] | None


class FreshRows:
    """Gives the rows of a batch that start a document the layers' trained initial states.

    The exchange happens inside each layer, before it reads: there FSDP2 has put its parameters
    together, and gradients reach the initial states in the same way for any number of processes.
    """

    def __init__(self, layers: Iterable[Any]) -> None:
        self._fresh: Tensor | None = None
        for layer in layers:
            layer.register_forward_pre_hook(self._exchange)

    @contextlib.contextmanager
    def rows(self, fresh: Tensor | None) -> Iterator[None]:
        """While this lasts, these rows ([B] bool) start anew."""
        self._fresh = fresh if fresh is not None and bool(fresh.any()) else None
        try:
            yield
        finally:
            self._fresh = None

    def _exchange(self, layer: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._fresh is None or len(arguments) < 2 or arguments[1] is None:
            return None
        x, states, *rest = arguments
        fresh = self._fresh.to(x.device)

        def pick(new: Tensor, old: Tensor) -> Tensor:
            if new.shape != old.shape:
                raise ValueError(
                    "this mixer's state grows with what it has read, so it cannot start anew row"
                    " by row; set data.carry=false (or give attention a window)"
                )
            return torch.where(fresh.view(-1, *[1] * (old.dim() - 1)), new, old)

        return (x, tree_map(pick, layer.init(len(fresh)), states), *rest)


def loss_sum(
    model: nn.Module,
    batch: Batch,
    device: torch.device,
    states: Any = None,
    *,
    keep: bool = False,
    learn: bool | Sequence[str] = True,
) -> tuple[Tensor, Any]:
    """The summed next-token loss of a batch, and the memory states after it (when kept).

    learn: which levels learn while they read, in a model whose levels do; that model computes the
    loss itself, as its gradients are made on the way. Kept states are then all that was learned.
    """
    options: dict[str, Any] = {"use_cache": keep}
    mask = None if bool(batch.mask.all()) else batch.mask.to(device)  # decided before it moves
    if getattr(getattr(model, "module", model), "learns_now", False):
        targets = batch.targets.to(device)
        options |= {"shift_labels": targets, "num_items_in_batch": 1.0, "learn": learn}
        cache = _carried(model, states, batch.fresh, learn) if keep else None
        options["past_key_values"] = cache
        loss = model(input_ids=batch.ids.to(device), attention_mask=mask, **options).loss
        return loss, None if cache is None else cache.learned or cache.states
    if keep and states is not None:
        options["past_key_values"] = MemoryCache(len(states), states)
    out = model(input_ids=batch.ids.to(device), attention_mask=mask, **options)
    loss = pair_losses(out.logits, batch.targets.to(device)).sum()
    return loss, out.past_key_values.states if keep else None


def _carried(model: Any, states: Any, fresh: Tensor, learn: bool | Sequence[str]) -> MemoryCache:
    """A cache that goes on from the step before; rows that start a document begin anew.

    Where no level learns (yet), `FreshRows` lets them begin anew.
    """
    bare = getattr(model, "module", model)
    cache = MemoryCache(bare.config.num_hidden_layers)
    if isinstance(states, Learned):
        cache.advance_learned(states, 0)
    elif states is not None:
        cache.advance(states, 0)
    learning = learn is not False or cache.learned is not None
    if states is not None and learning and bool(fresh.any()):
        begin_rows(bare, cache, fresh)
    return cache


def gradients(
    model: nn.Module,
    batch: Batch,
    run: Run,
    world: World,
    carry: list[Any] | None = None,
    fresh_rows: FreshRows | None = None,
    *,
    learn: bool | Sequence[str] = True,
) -> BackwardResult:
    """Add the gradient of the batch's mean loss to `.grad`, the mean taken over all processes.

    With `fresh_rows`, memories carry on: `carry` holds each micro-batch's states from the step
    before, and rows that start a document start anew. The states of the returned carry have no
    history (truncated backpropagation).
    """
    keep = fresh_rows is not None
    total = world.sum(float((batch.targets != IGNORE).sum()))[0]
    pieces = _micro(batch, run.micro)
    after: list[Any] = []
    summed = torch.zeros((), dtype=torch.float64, device=world.device)
    for number, piece in enumerate(pieces):
        states = None if carry is None else carry[number]
        last = number == len(pieces) - 1
        anew = fresh_rows.rows(piece.fresh) if fresh_rows else contextlib.nullcontext()
        with anew, _synchronised(model, last):
            with precision(run, world):
                loss, states = loss_sum(model, piece, world.device, states, keep=keep, learn=learn)
            # DDP and FSDP average over processes; the sum over all of them is what counts.
            (loss * (world.size / total)).backward()
        summed += loss.detach()
        after.append(state_detach(states) if keep else None)
    return BackwardResult(world.sum(float(summed))[0] / total, int(total), after if keep else None)


def _micro(batch: Batch, rows: int | None) -> list[Batch]:
    if rows is None or rows >= len(batch.ids):
        return [batch]
    return [Batch(*part) for part in zip(*(field.split(rows) for field in batch), strict=True)]


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


def precision(run: Run, world: World) -> Any:
    """The precision of forward passes: `run.precision`, by autocast."""
    if run.precision == "bf16":
        return torch.autocast(world.device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()


def level_norms(model: Any, world: World) -> dict[str, float]:
    """The gradient's norm per level: `mixer`, each level of the channel memory by name, `rest`.

    The squares are summed where the gradients are; one transfer brings them to the host.
    """
    place = places(model)
    found: list[tuple[str, bool]] = []  # of each gradient: its level, and whether it is cut
    squares: list[Tensor] = []
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            found.append((place[name], is_sharded(weight.grad)))
            squares.append(local(weight.grad).detach().float().square().sum())
    sums: dict[tuple[str, bool], float] = {}
    for key, square in zip(found, torch.stack(squares).tolist() if squares else []):
        sums[key] = sums.get(key, 0.0) + square
    shared = sorted({key for key in found if key[1]})
    if shared:
        totals = world.sum(*(sums[key] for key in shared))
        sums |= dict(zip(shared, totals, strict=True))
    levels = dict.fromkeys(where for where, _ in found)
    return {
        where: math.sqrt(sums.get((where, False), 0.0) + sums.get((where, True), 0.0))
        for where in levels
    }
