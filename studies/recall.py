"""In-context recall (MQAR) at two state sizes, with and without noise between the questions.

    python -m studies recall      run what is missing, write docs/results/associative_recall.md

A sequence binds keys to values and then asks for every key once more. All arms have the same width
and parameters; each takes the number of heads whose state comes nearest to the task's, so that what
is compared is what a state of that size holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from nestling.models import presets
from studies import default
from studies.harness.loop import descend
from studies.harness.models import IGNORE, parameters, predict, state_size, weighted
from studies.harness.page import Page, Section, table
from studies.harness.store import Run
from studies.harness.study import Context, Job, Study, by_rate, cells
from studies.harness.tables import Measure, table_page
from studies.tasks.recall import accuracy, mqar

ARMS = ("hope", "hope_printed", "titans", "deltanet", "gated_delta", "linear")
BARE = ((0.4, 8, None), (0.55, 16, None), (0.7, 32, None), (1.0, 64, None))
NOISE = ((0.25, 4, 16), (0.35, 8, 32), (0.45, 16, 64), (0.55, 32, 256), (1.0, 64, 1024))


@dataclass(frozen=True, kw_only=True)
class Form:
    """A form of the task: how many pairs in how many tokens, as training goes on."""

    width: int
    vocabulary: int
    stages: tuple[tuple[float, int, int | None], ...]

    @property
    def size(self) -> presets.Size:
        """One layer; the heads are chosen for each arm."""
        parameters = 12 * self.width**2 + 10_000 + self.vocabulary * self.width
        return presets.Size(
            width=self.width,
            layers=1,
            heads=1,
            vocabulary=self.vocabulary,
            parameters=parameters,
        )

    @property
    def state(self) -> int:
        """The numbers a state should have: one matrix of the width."""
        return self.width**2


FORMS = {
    "bare, state 40x40": Form(width=40, vocabulary=128, stages=BARE),
    "bare, state 64x64": Form(width=64, vocabulary=128, stages=BARE),
    "noise, state 40x40": Form(width=40, vocabulary=256, stages=NOISE),
    "noise, state 64x64": Form(width=64, vocabulary=256, stages=NOISE),
}


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The settings that were fixed before the first run."""

    steps: int = 2_000
    questions: int = 512
    rates: tuple[float, ...] = (2.5e-3, 5e-3, 1e-2)
    weight_decay: float = 0.01
    tested: int = 200
    seeds: tuple[int, ...] = (40, 41, 42, 43, 44)
    tuning_seed: int = 100
    analysis: str = "share of questions answered rightly; paired by seed, 95%, five seeds"


QUICK = Protocol(steps=3, questions=64, rates=(5e-3,), tested=4, seeds=(40,))


@cache
def heads(arm: str, form: Form) -> int:
    """The number of heads whose state comes nearest to the form's, convolutions' tails aside."""

    def gap(count: int) -> int:
        model = default.build(default.ARMS[arm], replace(form.size, heads=count))
        return abs(state_size(model) - form.state)

    fits = [h for h in (1, 2, 4, 5, 8, 10) if form.width % h == 0 and form.width // h >= 8]
    return min(fits, key=gap)


def make(job: Job, context: Context, protocol: Protocol) -> Run:
    """Train one model and ask it for sequences it has not seen."""
    form = FORMS[job.task]
    torch.manual_seed(job.seed)
    size = replace(form.size, heads=heads(job.arm, form))
    torch.manual_seed(job.seed)
    model = default.build(default.ARMS[job.arm], size)

    def loss(step: int) -> Tensor:
        pairs, length = next((p, n) for end, p, n in form.stages if step < end * protocol.steps)
        made = mqar(
            max(1, protocol.questions // pairs),
            pairs=pairs,
            vocabulary=form.vocabulary,
            seed=1_000_000 * (job.seed + 1) + step,
            length=length,
        )
        return weighted(model(made.tokens), made.targets, (made.targets != IGNORE).float())

    decay, steps = protocol.weight_decay, protocol.steps
    done = descend(model, loss, job, context, steps=steps, decay=decay, betas=(0.9, 0.98), end=0.02)
    _, pairs, length = form.stages[-1]
    test = mqar(
        protocol.tested, pairs=pairs, vocabulary=form.vocabulary, seed=job.seed, length=length
    )
    return {
        "loss": done.last(),
        "right": accuracy(predict(model, test.tokens, 50), test.targets),
        "parameters": parameters(model),
        "state": state_size(model),
        "heads": size.heads,
        "seconds": done.seconds,
    }


LIMITS = (
    "One layer. Attention is left out: its state grows with the length.",
    "States are as near to each other as whole numbers of heads allow; the table gives them.",
)


def page(study: Study, runs: Mapping[str, Run]) -> Page:
    """Findings and tables."""
    right = Measure(name="right", title="questions answered rightly, %", higher=True, share=True)
    found = cells(runs)
    rows = [
        (title, *(_state(found.get((task, arm))) for task in study.tasks))
        for arm, title in study.arms.items()
    ]
    states = Section(title="State and heads", body=table(["", *study.tasks], rows))
    title = "In-context recall (MQAR) at two state sizes"
    return table_page(study, runs, title=title, measures=(right,), limits=LIMITS, more=(states,))


def _state(cell: object) -> str:
    runs = list(getattr(cell, "runs", {}).values())
    return f"{runs[0]['state']:,} ({runs[0]['heads']})" if runs else "-"


def study(quick: bool = False) -> Study:
    """The study; `quick` is a slice of it."""
    protocol = QUICK if quick else Protocol()
    arms = ("hope", "deltanet") if quick else ARMS
    return by_rate(
        protocol,
        {arm: default.ARMS[arm].title for arm in arms},
        make,
        name="recall",
        tasks=("bare, state 40x40",) if quick else tuple(FORMS),
        judged="loss",
        page=page,
        page_name="associative_recall",
        needs=("seconds", "parameters", "right"),
    )
