"""Titans' two-layer memory against the same with only the last layer learning (features).

    python -m studies deep_memory      run what is missing, write docs/results/deep_memory.md

Language modelling on bytes and in-context recall, both small. All arms are Titans with the same
width, heads and parameters, and differ in what learns in context: both layers, with momentum or
without, or the last layer alone, by the delta rule on what the first makes of the keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nestling.models import presets
from studies import default
from studies.harness.loop import descend
from studies.harness.models import IGNORE, parameters, state_size
from studies.harness.store import Run
from studies.harness.study import Context, Job, Study, by_rate
from studies.harness.tables import Measure, table_page
from studies.tasks import text
from studies.tasks.recall import mqar

ARMS = {
    "features": default.Model(
        title="last layer learns (features)",
        model="titans",
        mixer={"momentum": False, "features": True},
    ),
    "both": default.Model(title="both layers learn", model="titans", mixer={"momentum": False}),
    "momentum": default.Model(title="both layers learn, with momentum", model="titans"),
}
SIZES = {
    "language": presets.Size(width=96, layers=2, heads=4, vocabulary=256, parameters=300_000),
    "recall": presets.Size(width=40, layers=1, heads=1, vocabulary=128, parameters=34_000),
}


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The settings that were fixed before the first run."""

    language_steps: int = 60
    length: int = 1024
    rows: int = 4
    valid_windows: int = 64
    recall_steps: int = 600
    stages: tuple[tuple[float, int], ...] = ((0.4, 8), (0.7, 16), (1.0, 32))
    questions: int = 512
    tested: int = 200
    trial_share: float = 1 / 3
    rates: tuple[float, ...] = (5e-3, 1e-2)
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    seeds: tuple[int, ...] = (0, 1, 2)
    tuning_seed: int = 100
    analysis: str = "held-out loss decides; paired by seed, 95% by Student's t, three seeds"

    def steps(self, task: str, *, trial: bool) -> int:
        """Steps of training."""
        steps = self.language_steps if task == "language" else self.recall_steps
        return max(2, round(steps * self.trial_share)) if trial else steps


QUICK = Protocol(
    language_steps=2,
    length=64,
    valid_windows=2,
    recall_steps=3,
    stages=((1.0, 4),),
    questions=16,
    tested=4,
    rates=(1e-2,),
    seeds=(0,),
)


def batch(job: Job, context: Context, protocol: Protocol, step: int) -> tuple[Tensor, Tensor]:
    """The tokens of a training step and what they are to predict, [B, T] each."""
    place = 1_000_003 * (job.seed + 1) + step
    if job.task == "language":
        seen = text.corpus(context.data).train
        ids = text.windows(seen, protocol.rows, protocol.length, place)
        return ids[:, :-1], ids[:, 1:]
    share = step / protocol.steps(job.task, trial=job.trial)
    pairs = next(pairs for end, pairs in protocol.stages if share < end)
    rows = max(1, protocol.questions // pairs)
    made = mqar(rows, pairs=pairs, vocabulary=SIZES[job.task].vocabulary, seed=place)
    return made.tokens, made.targets


def held_out(job: Job, context: Context, protocol: Protocol) -> tuple[Tensor, Tensor]:
    """The held-out tokens and what they are to predict: the same for all arms and seeds."""
    if job.task == "language":
        valid = text.corpus(context.data).valid
        ids = text.windows(valid, protocol.valid_windows, protocol.length, seed=7)
        return ids[:, :-1], ids[:, 1:]
    size, (_, pairs) = SIZES[job.task], protocol.stages[-1]
    made = mqar(protocol.tested, pairs=pairs, vocabulary=size.vocabulary, seed=7)
    return made.tokens, made.targets


def loss_of(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    """The mean loss in nats per byte, or per question."""
    found: Tensor = model(tokens, shift_labels=targets.contiguous(), use_cache=False).loss
    return found


@torch.no_grad()
def asked(model: Any, tokens: Tensor, targets: Tensor) -> tuple[float, float]:
    """The mean loss, and the share that is right, of held-out tokens."""
    losses, right = [], []
    for ids, wanted in zip(tokens.split(8), targets.split(8), strict=True):
        out = model(ids, shift_labels=wanted.contiguous(), use_cache=False)
        here = wanted != IGNORE
        losses.append(out.loss.item())
        right.append((out.logits.argmax(-1) == wanted)[here].float().mean().item())
    return sum(losses) / len(losses), sum(right) / len(right)


def make(job: Job, context: Context, protocol: Protocol) -> Run:
    """Train one model and ask it."""
    torch.manual_seed(job.seed)
    made: Any = default.build(ARMS[job.arm], SIZES[job.task])
    inner = getattr(made, "model", made).train()
    done = descend(
        made,
        lambda step: loss_of(inner, *batch(job, context, protocol, step)),
        job,
        context,
        steps=protocol.steps(job.task, trial=job.trial),
        decay=protocol.weight_decay,
        betas=protocol.betas,
        vectors=False,
    )
    loss, right = asked(inner.eval(), *held_out(job, context, protocol))
    return {
        "loss": loss,
        "right": right,
        "train": done.last(),
        "parameters": parameters(made),
        "state": state_size(made),
        "seconds": done.seconds,
    }


LIMITS = (
    "Far shorter than the other studies: about one byte per parameter, and recall of 32 pairs in 96"
    " tokens. Longer training may rank the arms otherwise.",
    "Two rates, tried at a third of the steps on a seed that is not used again.",
    "The state of the arm whose last layer learns is half as large as that of both layers.",
)


MEASURES = (
    Measure(name="loss", title="held-out loss, nats", higher=False),
    Measure(name="right", title="predicted rightly, %", higher=True, share=True),
)


def study(quick: bool = False) -> Study:
    """The study; `quick` is a slice of it."""
    protocol = QUICK if quick else Protocol()
    return by_rate(
        protocol,
        {arm: model.title for arm, model in ARMS.items()},
        make,
        name="deep_memory",
        tasks=tuple(SIZES),
        judged="loss",
        page=partial(
            table_page,
            title="Titans: both layers of the memory learn, or the last one",
            measures=MEASURES,
            limits=LIMITS,
            hero="features",
        ),
        page_name="deep_memory",
        needs=("seconds", "parameters", "loss", "right"),
    )
