"""How many levels, how slow (Fig. 7): one to four learning levels by the slowest level's chunk.

    python -m studies levels_chunks        run what is missing, write docs/results/levels_chunks.md

All arms start from the same model, trained without learning levels on needles and on patients'
letters. Each then goes on for as many steps with its own levels learning while it reads, and is
asked at twice the trained length. All have the four levels, and so the same parameters: what
differs is which of them learn, after how many tokens. The control of each is its fastest level
alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nestling.models import NestlingForCausalLM, presets
from nestling.report import Line, lines
from studies import default
from studies.harness.models import keep_model, kept_model
from studies.harness.page import Page, Section, table
from studies.harness.store import Run
from studies.harness.study import Cell, Context, Job, Study, by_rate, cells
from studies.harness.tables import unfinished
from studies.harness.verdict import ENOUGH, PLACE, interval, paired, percent, verdict
from studies.tasks.long import Curriculum, Stage, learn, letters, mixed, needles, spread
from studies.tasks.reading import SampleCounts, score_of, train_and_read
from studies.tasks.vocabulary import SIZE as VOCABULARY

SIZE = presets.Size(width=128, layers=2, heads=4, vocabulary=VOCABULARY, parameters=1_000_000)
TASKS = {"mk1": "ruler", "longhealth": "longhealth"}
SLOWEST = (512, 2048)
COUNT = 4


def chunks(count: int, slowest: int) -> tuple[int, ...]:
    """The chunks of so many levels, fastest first, each twice as slow as the one before."""
    return tuple(slowest >> i for i in reversed(range(count)))


ARMS = {"none": ()} | {
    f"{count} to {slowest}": chunks(count, slowest)
    for slowest in SLOWEST
    for count in range(1, COUNT + 1)
}
CONTROLS = {
    f"only {fast}": (fast,)
    for fast in sorted({made[0] for made in ARMS.values() if len(made) > 1})
    if (fast,) not in ARMS.values()
}


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The settings that were fixed before the first run."""

    base: Curriculum = field(
        default_factory=lambda: Curriculum(
            steps=800,
            stages=(
                Stage(until=0.7, length=1024, quiet=0.2),
                Stage(until=0.9, length=2048, quiet=0.2),
                Stage(until=1.0, length=4096, quiet=0.2),
            ),
        )
    )
    curriculum: Curriculum = field(
        default_factory=lambda: Curriculum(steps=100, stages=(Stage(until=1.0, length=4096),))
    )
    outer: float = 1e-3  # the optimizer's rate while levels learn; without levels 4e-3
    rates: tuple[float, ...] = (0.03, 0.3)  # of the levels; tried with one level, for all
    length: int = 8192
    samples: int = 60
    seeds: tuple[int, ...] = (0, 1, 2)
    tuning_seed: int = 100
    analysis: str = "share right; paired by seed, 95% by Student's t"


QUICK = Protocol(
    base=Curriculum(steps=2, tokens=1200, stages=(Stage(until=1.0, length=1200),)),
    curriculum=Curriculum(steps=2, tokens=1200, stages=(Stage(until=1.0, length=1200),)),
    length=1200,
    samples=2,
    seeds=(0,),
)


def built(learning: Sequence[int], rate: float, base: Any) -> Any:
    """The base with those levels learning whose chunks are given; the others stand still."""
    if not learning:
        return base
    still = (learning[-1],) * (COUNT - len(learning))
    levels = _levels((*learning, *still))
    for level in levels[: len(learning)]:
        level["rate"] = rate
    options = {"levels": levels, "learning": "first_order"}
    model = NestlingForCausalLM(default.configuration(default.ARMS["hope"], SIZE, **options))
    model.load_state_dict(base.state_dict())
    return model


def _levels(every: Sequence[int]) -> list[dict[str, Any]]:
    return [{"name": f"level {i}", "chunk": chunk} for i, chunk in enumerate(every, 1)]


def base_of(seed: int, context: Context, protocol: Protocol, draw: Any) -> Any:
    """The model all arms of a seed start from: the first job that needs it trains it."""
    folder = context.models / f"base-{seed}"
    found = kept_model(folder)
    if found is None:
        torch.manual_seed(seed)
        levels = _levels((SLOWEST[0],) * COUNT)
        config = default.configuration(default.ARMS["hope"], SIZE, levels=levels)
        found = spread(NestlingForCausalLM(config), protocol.base)
        save = context.scratch / "base"
        learn(found, draw, protocol.base, rate=4e-3, seed=seed, save=save)
        keep_model(found, folder, {"seed": seed})
    return found


def make(job: Job, context: Context, protocol: Protocol) -> Run:
    """Let one set of levels learn, and ask."""
    draw = mixed([needles(context.data, ("mk1",)), letters(context.data)])
    base = base_of(job.seed, context, protocol, draw)
    learning = (ARMS | CONTROLS)[job.arm]
    counts = {protocol.length: protocol.samples}
    asked: SampleCounts = {(s, task): counts for task, s in TASKS.items()}
    return train_and_read(
        job._replace(setting={"rate": protocol.outer}),
        context,
        build=lambda: built(learning, job.setting["rate"], base),
        draw=draw,
        curriculum=protocol.curriculum,
        plan=asked,
        floor=-1.0,
    )


LIMITS = (
    "Models of a million parameters at 8,192 tokens, slowest chunks of 512 and 2K; the paper's"
    " models are a thousand times larger (512, 2K, 8K), and Fig. 7 has no numbers in its text.",
    "Patients' letters are made up, in LongHealth's form; QASPER's staged questions are too few to"
    " train on.",
    "The levels' rate was tried with one level only.",
)


def scores(cell: Cell, task: str, length: int) -> dict[int, float]:
    """A score for every seed."""
    return {seed: score_of(run, task, length) or 0.0 for seed, run in cell.runs.items()}


def page(study: Study, runs: Mapping[str, Run]) -> Page:
    """Findings, the picture of Fig. 7, tables."""
    found = cells(runs)
    length = study.protocol.length
    mine = {arm: found[study.tasks[0], arm] for arm in study.arms if (study.tasks[0], arm) in found}
    rows, said, drawn = [], [], []
    for arm, cell in mine.items():
        each = [list(scores(cell, task, length).values()) for task in TASKS]
        rows.append((study.arms[arm], *map(percent, each)))
    for task in TASKS:
        for arm, cell in mine.items():
            made = ARMS.get(arm, ())
            alone = next((a for a, c in (ARMS | CONTROLS).items() if c == made[:1]), None)
            if len(made) < 2 or alone not in mine:
                continue
            gaps = paired(scores(cell, task, length), scores(mine[alone], task, length))
            if len(gaps) >= ENOUGH:
                gap = interval(gaps)
                said.append(
                    f"{task}: {study.arms[arm]} is {verdict(gap, words=PLACE)} its fastest level"
                    f" alone ({gap})."
                )
        for slowest in SLOWEST:
            names = [f"{count} to {slowest}" for count in range(1, COUNT + 1)]
            if all(name in mine for name in names):
                y = [
                    100 * interval(list(scores(mine[name], task, length).values())).mean
                    for name in names
                ]
                drawn.append(Line(f"{task}, slowest {slowest}", range(1, COUNT + 1), y))
    return Page(
        title="How many levels, how slow",
        command="python -m studies levels_chunks",
        findings=said or [f"Nothing is claimed: no arm has {ENOUGH} seeds beside its control."],
        limits=[*unfinished(study, found), *LIMITS],
        protocol=study.protocol,
        picture=lines(drawn, x="levels that learn", y="% right") if drawn else "",
        caption="Share right against the number of learning levels",
        sections=[
            Section(
                title=f"% right at {length:,} tokens, mean and 95% interval",
                body=table(["levels that learn", *TASKS], rows),
            )
        ],
    )


def study(quick: bool = False) -> Study:
    """The study; `quick` is a slice of it."""
    protocol = QUICK if quick else Protocol()
    every = {**ARMS, **CONTROLS}
    names = ("1 to 512", "2 to 512", "only 256") if quick else tuple(every)
    tuned = "1 to 512"
    return by_rate(
        protocol,
        {arm: _title(every[arm]) for arm in names},
        make,
        name="levels_chunks",
        tasks=("recall",),
        borrowed={arm: tuned for arm in names if arm != tuned},
        judged="loss",
        page=page,
        page_name="levels_chunks",
        needs=("seconds", "parameters", "loss"),
    )


def _title(made: Sequence[int]) -> str:
    if not made:
        return "none"
    return f"{len(made)}: every {', '.join(map(str, made))} tokens"
