"""One small training loop: batches by step, any optimizer, checkpoints it goes on from.

    trained = train([model], loss, optimizer, steps=1000, schedule=cosine(), save=folder)

`loss(step)` gives one loss per model, so that several models can share a forward pass. Where it
depends on nothing but the step and the weights, a run that was killed ends as if it had not been.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nestling.train.checkpoint import load_latest, save_checkpoint
from nestling.train.optimizers import decayed
from studies.harness.study import Context, Job

__all__ = ["Schedule", "Trained", "constant", "cosine", "descend", "train"]

Schedule = Callable[[int, int], float]
"""step, steps -> a factor of the rate."""


class Trained(NamedTuple):
    """The losses of each model, step by step, and processor seconds: all, and the optimizer's."""

    losses: list[list[float]]
    seconds: float
    stepping: float

    def last(self, share: float = 0.1) -> float:
        """The mean of the last losses of the first model; infinity if it diverged."""
        losses = self.losses[0]
        tail = losses[-max(1, int(share * len(losses))) :]
        return sum(tail) / len(tail) if all(map(math.isfinite, tail)) else math.inf


def cosine(*, warm: int | None = None, share: float = 0.05, end: float = 0.1) -> Schedule:
    """A linear rise over `warm` steps (or a share of them), then a cosine down to `end`."""

    def factor(step: int, steps: int) -> float:
        rise = max(1, round(share * steps)) if warm is None else warm
        if step < rise:
            return (step + 1) / rise
        return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * (step - rise) / (steps - rise)))

    return factor


def constant(step: int, steps: int) -> float:
    """The rate as it is."""
    return 1.0


def descend(
    model: nn.Module,
    loss: Callable[[int], Tensor],
    job: Job,
    context: Context,
    *,
    steps: int,
    decay: float,
    betas: tuple[float, float] = (0.9, 0.999),
    vectors: bool = True,
    end: float = 0.1,
) -> Trained:
    """Train the model of a job by AdamW at its rate, with a cosine down to `end`.

    vectors: these (norms, gates, biases) decay, too.
    """
    groups = model.parameters() if vectors else decayed(model)
    rate = job.setting["rate"]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=betas, weight_decay=decay)
    shape = cosine(end=end)
    return train([model], loss, optimizer, steps=steps, schedule=shape, save=context.scratch)


def train(
    models: Sequence[nn.Module],
    loss: Callable[[int], Tensor | Sequence[Tensor]],
    optimizer: torch.optim.Optimizer,
    *,
    steps: int,
    schedule: Schedule = constant,
    clip: float = 1.0,
    save: Path | None = None,
    every: float = 120.0,
    progress: Callable[[int, float], None] | None = None,
) -> Trained:
    """Train; each model's gradient is clipped to the norm `clip`.

    save: a folder for checkpoints, one every so many seconds; a run found there goes on.
    A run whose losses are all not finite ends at once.
    """
    losses: list[list[float]] = [[] for _ in models]
    rates = [group["lr"] for group in optimizer.param_groups]
    seconds = stepping = 0.0
    if save is not None and (found := load_latest(save)) is not None:
        for model, state in zip(models, found.states["models"], strict=True):
            model.load_state_dict(state)
        optimizer.load_state_dict(found.states["optimizer"])
        torch.set_rng_state(found.states["random"])
        losses, rates = found.states["losses"], found.states["rates"]
        seconds, stepping = found.states["seconds"]
    saved = time.monotonic()
    for step in range(len(losses[0]), steps):
        begin = time.process_time()  # of one thread: other work does not count
        factor = schedule(step, steps)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        each = loss(step)
        each = each if isinstance(each, Tensor) else torch.stack(list(each))
        optimizer.zero_grad(set_to_none=True)
        each.sum().backward()
        for model in models:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        before = time.process_time()
        optimizer.step()
        stepping += time.process_time() - before
        now = each.detach().flatten().tolist()
        seconds += time.process_time() - begin
        for record, value in zip(losses, now, strict=True):
            record.append(value)
        if progress is not None:
            progress(step + 1, now[0])
        if not any(map(math.isfinite, now)):
            break
        if save is not None and time.monotonic() - saved > every and step + 1 < steps:
            states: dict[str, Any] = {
                "models": [dict(model.state_dict()) for model in models],
                "optimizer": optimizer.state_dict(),
                "random": torch.get_rng_state(),
                "losses": losses,
                "rates": rates,
                "seconds": (seconds, stepping),
            }
            save_checkpoint(save, step + 1, states, {}, keep=1)
            saved = time.monotonic()
    return Trained(losses, seconds, stepping)
