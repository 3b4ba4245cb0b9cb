"""BABILong to ten million tokens (Fig. 9): facts of a story scattered over books.

    python -m studies babilong        run what is missing, write docs/results/babilong.md

Every arm has a million parameters and the same training: stories of qa1 to qa5 among books, at
lengths that grow to 4,096 tokens. It is then asked BABILong's own questions among books it never
saw, at up to 10M tokens. Its rate is chosen by the training loss alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nestling.evaluate import babilong
from nestling.models import presets
from studies import default
from studies.harness.page import Page
from studies.harness.store import Run
from studies.harness.study import Context, Job, Study, by_rate, cells
from studies.harness.verdict import wilson
from studies.tasks.long import Curriculum, stories
from studies.tasks.reading import (
    SampleCounts,
    bare,
    length_page,
    mean,
    mean_of,
    short,
    train_and_read,
)
from studies.tasks.vocabulary import SIZE as VOCABULARY

ARMS = ("hope", "transformer", "titans", "deltanet", "gated_delta")
SIZE = presets.Size(width=128, layers=3, heads=4, vocabulary=VOCABULARY, parameters=1_000_000)
K, M = 1 << 10, 1 << 20


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The settings that were fixed before the first run."""

    curriculum: Curriculum = field(default_factory=lambda: Curriculum(steps=1200))
    rates: tuple[float, ...] = (2e-3, 4e-3)
    trial_share: float = 0.2
    seeds: tuple[int, ...] = (0, 1, 2)
    tuning_seed: int = 100
    samples: tuple[tuple[int, int], ...] = (
        (1 * K, 100),
        (4 * K, 100),
        (16 * K, 100),
        (64 * K, 100),
        (256 * K, 30),
        (1 * M, 30),
        (10 * M, 10),
    )
    qa1_at_10m: int = 20
    other_seeds: tuple[int, int] = (1 * M, 64 * K)  # how far they read qa1, and the other tasks
    transformer: int = 16 * K  # how far attention reads
    floor: float = 0.3  # a task is not read further once no more than this share is right
    analysis: str = (
        "one training for all tasks; lengths beyond 4K are used for no choice; 95% over seeds by"
        " Student's t where three were read, else over samples by Wilson"
    )

    def plan(self, arm: str, seed: int) -> SampleCounts:
        """How many samples of each task at each length."""
        made: dict[tuple[str, str], dict[int, int]] = {}
        for task in babilong.TASKS:
            most = max(length for length, _ in self.samples)
            if seed != self.seeds[0]:
                most = min(most, self.other_seeds[task != "qa1"])
            if arm == "transformer":
                most = min(most, self.transformer)
            asked = {length: n for length, n in self.samples if length <= most}
            if task == "qa1" and 10 * M in asked:
                asked[10 * M] = self.qa1_at_10m
            made["babilong", task] = asked
        return made


QUICK = Protocol(
    curriculum=Curriculum(steps=4, tokens=512, stages=((0.5, 128), (1.0, 256))),
    rates=(2e-3, 4e-3),
    trial_share=0.5,
    seeds=(0,),
    samples=((1 * K, 2), (4 * K, 2)),
    floor=-1.0,
)


def make(job: Job, context: Context, protocol: Protocol) -> Run:
    """Train one model and let it read."""
    plan = protocol.curriculum
    return train_and_read(
        job,
        context,
        build=lambda: bare(default.ARMS[job.arm], SIZE),
        draw=stories(context.data),
        curriculum=plan.part(protocol.trial_share) if job.trial else plan,
        plan=protocol.plan(job.arm, job.seed),
        floor=protocol.floor,
    )


LIMITS = (
    "Models of a million parameters, trained for the task on bAbI's own training stories (names"
    " exchanged), not pretrained models that are fine-tuned; a vocabulary of 2,048 byte pairs.",
    "The paper's Fig. 9 has no numbers in its text, so that no curve of it is drawn here.",
    "Background: six Project Gutenberg books that training did not have; at 10M tokens their"
    " sentences come back about ten times.",
)
GOAL = {"qa1": 0.95, "all": 0.80}


def findings(study: Study, runs: Mapping[str, Run], lengths: Sequence[int]) -> list[str]:
    """Sentences on what the longest texts show, against the goals, and where each arm ends."""
    found = cells(runs)
    said = []
    for arm, title in study.arms.items():
        cell = found.get((study.tasks[0], arm))
        run = cell.runs.get(study.seeds[0]) if cell else None
        if run is None:
            continue
        done = run["read"]["qa1"]
        longest = max(map(int, done))
        scores = done[str(longest)]["scores"]
        low, high = wilson(sum(scores), len(scores))
        whole = max((n for n in lengths if mean_of(run, babilong.TASKS, n) is not None), default=0)
        every = mean_of(run, babilong.TASKS, whole) if whole else None
        text = (
            f"{title}: qa1 {100 * mean(done[str(longest)]):.0f}% at {short(longest)}"
            f" ({100 * low:.0f}-{100 * high:.0f})"
        )
        if every is not None:
            text += f", qa1 to qa5 {100 * every:.0f}% at {short(whole)}"
        if arm == "hope":
            reached = mean(done[str(longest)]) >= GOAL["qa1"] and (every or 0) >= GOAL["all"]
            goal = "reached" if reached and whole == longest == max(lengths) else "missed"
            text += f"; the goal (95% and 80% at {short(max(lengths))}) is {goal}"
        said.append(text + ".")
    return said or ["Nothing is claimed: no run is finished."]


def page(study: Study, runs: Mapping[str, Run]) -> Page:
    """Findings, the picture of Fig. 9, tables."""
    lengths = [length for length, _ in study.protocol.samples]
    return length_page(
        study,
        runs,
        title="BABILong to ten million tokens",
        lengths=lengths,
        tasks=babilong.TASKS,
        findings=findings(study, runs, lengths),
        limits=LIMITS,
        caption="Share of right answers, mean of qa1 to qa5, against the length of the text",
    )


def study(quick: bool = False) -> Study:
    """The study; `quick` is a slice of it."""
    protocol = QUICK if quick else Protocol()
    arms = ("hope", "deltanet") if quick else ARMS
    return by_rate(
        protocol,
        {arm: default.ARMS[arm].title for arm in arms},
        make,
        name="babilong",
        tasks=("stories",),
        judged="loss",
        page=page,
        page_name="babilong",
        needs=("seconds", "parameters", "loss"),
    )
