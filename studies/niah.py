"""Needles in haystacks (Table 1): RULER's S, MK, MV and MQ tasks far beyond the trained length.

    python -m studies niah        run what is missing, write docs/results/needles.md

Every arm has a million parameters and the same training: needle tasks at lengths that grow to 4,096
tokens, in books. It is then asked at 4K, 8K, 16K and 64K tokens, in books it never saw. Its rate is
chosen by the training loss alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nestling.models import presets
from studies import default
from studies.harness.page import Page, Section, table
from studies.harness.store import Run
from studies.harness.study import Context, Job, Study, by_rate, cells
from studies.harness.verdict import ENOUGH, PLACE, interval, paired, verdict
from studies.tasks.long import Curriculum, Stage, needles, spread
from studies.tasks.reading import SampleCounts, bare, length_page, score_of, short, train_and_read
from studies.tasks.vocabulary import SIZE as VOCABULARY

ARMS = ("hope", "transformer", "titans", "deltanet", "gated_delta")
TASKS = ("s1", "s2", "s3", "mk1", "mq", "mv")
SIZE = presets.Size(width=128, layers=3, heads=4, vocabulary=VOCABULARY, parameters=1_000_000)
K = 1 << 10
PAPER = {
    "Hope": (100, 78.2, 24.8, 14.8, 14.2, 11.4),
    "Titans": (100, 75.4, 21.2, 8.2, 9.4, 8.2),
    "Transformer": (79.8, 94.2, 40.8, 61.4, 29.8, 21.5),
}
"""Table 1 at 16K tokens, in the order of `TASKS`: other models, of another size."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The settings that were fixed before the first run."""

    curriculum: Curriculum = field(
        default_factory=lambda: Curriculum(
            steps=1000,
            stages=(
                Stage(until=0.4, length=512, quiet=0.2),
                Stage(until=0.6, length=1024, quiet=0.2),
                Stage(until=0.8, length=2048, quiet=0.2),
                Stage(until=1.0, length=4096, quiet=0.2),
            ),
        )
    )
    rates: tuple[float, ...] = (2e-3, 4e-3)
    trial_share: float = 0.2
    seeds: tuple[int, ...] = (0, 1, 2)
    tuning_seed: int = 100
    samples: tuple[tuple[int, int], ...] = ((4 * K, 50), (8 * K, 50), (16 * K, 50), (64 * K, 20))
    transformer: int = 16 * K  # how far attention reads
    floor: float = 0.0  # a task of which nothing is right is not read further
    analysis: str = (
        "share of the values named, as in RULER; lengths beyond 4K are used for no choice; paired"
        " by seed, 95% by Student's t"
    )

    def plan(self, arm: str) -> SampleCounts:
        """How many samples of each task at each length."""
        most = self.transformer if arm == "transformer" else max(n for n, _ in self.samples)
        return {
            ("ruler", task): {n: count for n, count in self.samples if n <= most} for task in TASKS
        }


QUICK = Protocol(
    curriculum=Curriculum(steps=4, tokens=1024, stages=(Stage(until=1.0, length=512, quiet=0.2),)),
    trial_share=0.5,
    seeds=(0,),
    samples=((1 * K, 2),),
    floor=-1.0,
)


def make(job: Job, context: Context, protocol: Protocol) -> Run:
    """Train one model and let it read."""
    plan = protocol.curriculum
    return train_and_read(
        job,
        context,
        build=lambda: spread(bare(default.ARMS[job.arm], SIZE), plan),
        draw=needles(context.data, TASKS),
        curriculum=plan.part(protocol.trial_share) if job.trial else plan,
        plan=protocol.plan(job.arm),
        floor=protocol.floor,
    )


LIMITS = (
    "Models of a million parameters, trained on these tasks, not language models that were never"
    " shown them: scores are not comparable with the paper's, orders perhaps.",
    "The arms' memories are of different sizes, as in the other tables.",
)


def findings(study: Study, runs: Mapping[str, Run]) -> list[str]:
    """Hope against every arm, at every task and length beyond training."""
    found = cells(runs)
    trained = study.protocol.curriculum.stages[-1].length
    lengths = [length for length, _ in study.protocol.samples if length > trained]
    hope = found.get((study.tasks[0], "hope"))
    if hope is None or len(hope.runs) < ENOUGH:
        return [f"Nothing is claimed: Hope has fewer than {ENOUGH} runs."]
    said = []
    if lengths:
        top = [score_of(run, "s1", max(lengths)) or 0.0 for run in hope.runs.values()]
        said.append(
            f"Hope on S-1 at {short(max(lengths))}: {interval(top)}%"
            f" (goal 100: {'reached' if min(top) == 1 else 'missed'})."
        )
    for arm, title in study.arms.items():
        other = found.get((study.tasks[0], arm))
        if arm == "hope" or other is None:
            continue
        count = dict.fromkeys(PLACE, 0)
        for task in TASKS:
            for length in lengths:
                both = [
                    {
                        s: v
                        for s, r in c.runs.items()
                        if (v := score_of(r, task, length)) is not None
                    }
                    for c in (hope, other)
                ]
                gaps = paired(*both)
                if len(gaps) >= ENOUGH:
                    count[verdict(interval(gaps), words=PLACE)] += 1
        listed = ", ".join(f"{word} {number}" for word, number in count.items())
        said.append(f"Beyond the trained length, Hope against {title}: {listed} (task x length).")
    return said


def page(study: Study, runs: Mapping[str, Run]) -> Page:
    """Findings, the scores against length, Table 1 beside it."""
    paper = table(["Table 1 at 16K", *TASKS], [(name, *row) for name, row in PAPER.items()])
    return length_page(
        study,
        runs,
        title="Needles in haystacks",
        lengths=[length for length, _ in study.protocol.samples],
        tasks=TASKS,
        findings=findings(study, runs),
        limits=LIMITS,
        caption="Share of the values named, mean of the needle tasks, against the length",
        more=(Section(title="The paper's numbers: other models, of another size", body=paper),),
    )


def study(quick: bool = False) -> Study:
    """The study; `quick` is a slice of it."""
    protocol = QUICK if quick else Protocol()
    arms = ("hope", "deltanet") if quick else ARMS
    return by_rate(
        protocol,
        {arm: default.ARMS[arm].title for arm in arms},
        make,
        name="niah",
        tasks=("needles",),
        judged="loss",
        page=page,
        page_name="needles",
        needs=("seconds", "parameters", "loss"),
    )
