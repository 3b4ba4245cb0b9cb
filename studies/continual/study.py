"""Class after class on frozen bases that can: closed-form memories against the field (Fig. 6).

    python -m studies continual      run what is missing, write docs/results/continual.md

Classes arrive in tasks, in an order drawn from the seed; after each task a learner is tested on all
classes so far and is not told the task. It is handed the training data of the present task only;
test data goes in as inputs, and their labels are compared here. Every arm stands on the same
features (MiniLM-L6), computed once per text.

Settings are never chosen on the stream they are used on: every arm has six trials on the held-out
split of another stream, with a class order no reported seed uses.

Ours is the retaining rule's ridge regression over one Gaussian kernel of four places of the base,
in which the rows of a class count the square root of their number. It was found on the validation
splits of all three streams (class orders 160 to 162, one draw of random units, no test data). The
best of a few settings with 4,000 units had 92.8 / 96.4 / 90.8 (Banking-77 / CLINC-150 / DBpedia-70;
CLINC without the counting, which changes nothing there), KLDA 92.2 / 95.0 / 90.0 and RanPAC 92.9 /
95.1 (2,000 units) / 86.9: a lead over RanPAC on Banking-77 was not seen. Places and counting are
open to the rivals too, so they are also run with them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from studies.continual import metrics
from studies.continual.bases import load_base
from studies.continual.gradient import Dynamic, Elastic, Gradient, Network, PerTask, Replay
from studies.continual.memories import Fourier, Memory, Rectified, one_place
from studies.continual.streams import Dataset, class_order, load, sliced
from studies.harness.page import Page, Section, table
from studies.harness.store import Run
from studies.harness.study import Cell, Context, Job, Setting, Study, by_protocol, cells
from studies.harness.tables import Measure, dots, table_page
from studies.harness.verdict import ENOUGH, Interval, interval, paired, verdict

__all__ = ["ARMS", "Learner", "Shape", "accuracies", "build", "run_stream", "study"]

Pairs = tuple[Tensor, Tensor]
"""Features [N, P, D] and classes [N]."""
LAST = 9
"""The place of arms with one: the last layer's mean, which is the base's own sentence vector."""
PLACES = (9, 6, 3, 11)
"""Means of the last three layers and the maximum of the last."""
OTHER = {"clinc150": "banking77", "banking77": "clinc150", "dbpedia70": "clinc150"}
"""The stream on which the settings for a stream are chosen."""
GOALS = {"clinc150": 0.955, "banking77": 0.935, "dbpedia70": 0.85}


class Learner(Protocol):
    """A method: learns one task after another and scores all classes; `joint`: all at once."""

    joint: bool

    def learn(self, x: Tensor, y: Tensor) -> None:
        """One task: features [N, P, D] and classes [N]."""

    def scores(self, x: Tensor) -> Tensor:
        """[N, C]; the protocol decides which classes count."""

    def stored(self) -> int:
        """Numbers kept beyond the base."""


def accuracies(
    scores: Tensor,
    y: Tensor,
    tasks: Sequence[Sequence[int]],
    seen: Sequence[int],
    *,
    told: bool = False,
) -> list[float]:
    """The accuracy on each task's examples among all classes seen; 0 for a task not yet learned.

    told: a learner is told the task, and chooses among its classes alone.
    """
    found = []
    for task in tasks:
        own = torch.isin(y, torch.tensor(list(task)))
        mask = torch.full((scores.shape[1],), -math.inf)
        mask[list(task if told else seen)] = 0.0
        right = (scores[own] + mask).argmax(1) == y[own]
        found.append(float(right.double().mean()) if set(task) <= set(seen) else 0.0)
    return found


def run_stream(
    learner: Learner,
    train: Pairs,
    test: Pairs,
    tasks: Sequence[Sequence[int]],
    *,
    last: bool = False,
    told: bool = False,
) -> tuple[list[list[float]], float]:
    """The accuracy matrix R, and processor seconds of learning; `last`: only its last row counts.

    told: as for `accuracies`. A joint learner sees all tasks at once, and its row stands for all.
    """
    matrix: list[list[float]] = []
    seen: list[int] = []
    seconds = 0.0
    groups = [[c for task in tasks for c in task]] if learner.joint else tasks
    for number, classes in enumerate(groups):
        own = torch.isin(train[1], torch.tensor(list(classes)))
        if not own.any():
            raise ValueError(f"task {number} has no training examples (classes {list(classes)})")
        begin = time.process_time()
        learner.learn(train[0][own], train[1][own])
        seconds += time.process_time() - begin
        seen += classes
        if not last or number == len(groups) - 1:
            scores = learner.scores(test[0])
            matrix.append(accuracies(scores, test[1], tasks, seen, told=told))
    if len(matrix) < len(tasks):
        matrix = matrix[-1:] * len(tasks)
    return matrix, seconds


class Shape(NamedTuple):
    """The sizes a learner is built for: classes, the width of a place, and of the random units."""

    classes: int
    place: int = 384
    units: int = 3_000


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A method: its title, what builds it, and six settings to choose from.

    build: (shape, setting, seed) -> a learner.
    like: the arm whose settings it takes, in place of trials of its own.
    """

    title: str
    build: Callable[[Shape, Setting, int], Any]
    settings: Sequence[Setting] = ()
    like: str = ""


def _grid(**choices: Sequence[Any]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = [{}]
    for name, values in choices.items():
        made = [{**each, name: value} for each in made for value in values]
    return made


def _fourier(places: tuple[int, ...], shape: Shape, s: Setting, seed: int, **read: Any) -> Memory:
    gamma = s["gamma"] / len(places)  # of the mean squared distance over places
    rows = Fourier(places=places, width=shape.units, gamma=gamma, seed=seed, together=True)
    return Memory(shape.classes, rows, shrink=s["shrink"], **read)


def _ranpac(
    places: tuple[int, ...], shape: Shape, s: Setting, seed: int, even: float = 0.0
) -> Memory:
    rows = Rectified(places=places, width=shape.units, seed=seed)
    return Memory(shape.classes, rows, read="ridge", shrink=s["shrink"], even=even)


def _lda(shape: Shape, s: Setting, seed: int) -> Memory:
    return Memory(shape.classes, partial(one_place, place=LAST), shrink=s["shrink"])


def _mean(shape: Shape, s: Setting, seed: int) -> Memory:
    return Memory(shape.classes, partial(one_place, place=s["place"]), read="mean")


def _network(kind: Any, shape: Shape, s: Setting, seed: int, **more: Any) -> Any:
    torch.manual_seed(seed)
    network = Network(shape.place * len(PLACES), shape.classes)
    return kind(network, PLACES, **{"epochs": 3, **s, "seed": seed, **more})


def _dynamic(shape: Shape, s: Setting, seed: int) -> Gradient:
    made: Gradient = _network(Gradient, shape, {"rate": s["rate"], "epochs": 1}, seed)
    made.optimizer = Dynamic(made.network.parameters(), s["rate"], decay=s["decay"])
    return made


def _per_task(shape: Shape, s: Setting, seed: int) -> PerTask:
    torch.manual_seed(seed)
    width = shape.place * len(PLACES)
    return PerTask(width, shape.classes, **s, epochs=5, seed=seed, places=PLACES)


RIDGE = _grid(gamma=(0.125, 0.25, 0.5), shrink=(1e-3, 1e-2))
KLDA = _grid(gamma=(0.125, 0.25, 0.5), shrink=(1e-2, 1e-1))
RANPAC = _grid(shrink=(1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1))
RATES = _grid(rate=(3e-4, 1e-3, 3e-3), epochs=(3, 10))
ARMS: dict[str, Arm] = {
    "ours": Arm(
        title="retaining memory, four places, even",
        build=partial(_fourier, PLACES, read="ridge", even=0.5),
        settings=RIDGE,
    ),
    "klda": Arm(title="KLDA", build=partial(_fourier, (LAST,)), settings=KLDA),
    "ranpac": Arm(title="RanPAC", build=partial(_ranpac, (LAST,)), settings=RANPAC),
    "uneven": Arm(
        title="ours, every row counts alike",
        build=partial(_fourier, PLACES, read="ridge"),
        settings=RIDGE,
    ),
    "klda_places": Arm(title="KLDA on our places", build=partial(_fourier, PLACES), settings=KLDA),
    "ranpac_places": Arm(
        title="RanPAC on our places, even",
        build=partial(_ranpac, PLACES, even=0.5),
        settings=RANPAC,
    ),
    "lda": Arm(
        title="LDA", build=_lda, settings=_grid(shrink=(1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1))
    ),
    "mean": Arm(title="nearest mean", build=_mean, settings=_grid(place=(9, 10, 11, 6, 3, 0))),
    "joint": Arm(
        title="joint training",
        build=partial(_network, Gradient, joint=True),
        settings=_grid(rate=(3e-4, 1e-3, 3e-3), epochs=(5, 15)),
    ),
    "replay_20": Arm(
        title="replay, 20 per class", build=partial(_network, Replay, per_class=20), settings=RATES
    ),
    "replay_5": Arm(
        title="replay, 5 per class", build=partial(_network, Replay, per_class=5), like="replay_20"
    ),
    "lora": Arm(
        title="LoRA per task",
        build=_per_task,
        settings=_grid(rate=(3e-4, 1e-3, 3e-3), rank=(4, 16)),
    ),
    "ewc": Arm(
        title="EWC",
        build=partial(_network, Elastic),
        settings=_grid(rate=(3e-4, 1e-3, 3e-3), strength=(10.0, 1000.0)),
    ),
    "dynamic": Arm(
        title="dynamic evaluation",
        build=_dynamic,
        settings=_grid(rate=(1e-5, 1e-4, 1e-3), decay=(0.0, 1e-3)),
    ),
    "sequential": Arm(
        title="sequential fine-tuning", build=partial(_network, Gradient), settings=RATES
    ),
}


def build(name: str, shape: Shape, setting: Setting, seed: int) -> Learner:
    """The learner of this name."""
    if name not in ARMS:
        raise ValueError(f"unknown arm {name!r}; known: {', '.join(ARMS)}")
    made: Learner = ARMS[name].build(shape, setting, seed)
    return made


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """The settings that were fixed before the first run."""

    base: str = "minilm"
    tokens_of_a_text: int = 48
    width_of_random_units: int = 3_000
    trials_of_every_arm: int = 6
    chosen_on: str = "the held-out split of another stream: " + ", ".join(
        f"{stream} on {other}" for stream, other in OTHER.items()
    )
    seeds: tuple[int, ...] = (60, 61, 62, 63, 64)
    tuning_seed: int = 160
    analysis: str = (
        "mean accuracy over tasks after the last one; forgetting: accuracy when learned minus at"
        " the end; paired by seed, 95%"
    )


@cache
def _data(name: str, data: Path, folder: Path, base: str, trial: bool, quick: bool) -> tuple:
    """The stream, its training features and those it is tested on."""
    stream: Dataset = load(name, data)
    if quick:
        stream = sliced(stream, classes=6, tasks=3, per_class=12)
    tested = stream.valid if trial else stream.test
    parts = []
    for split in (stream.train, tested):
        x = load_base(base).features(split.texts, folder)
        parts.append((x, torch.tensor(split.labels)))
    return stream, *parts


def make(job: Job, context: Context, fixed: Fixed, quick: bool) -> Run:
    """One arm on one stream: the accuracy matrix and what it costs."""
    folder = context.models.parent.parent / "features"
    known = (job.task, context.data, folder, fixed.base, job.trial, quick)
    stream, train, test = _data(*known)
    shape = Shape(len(stream.classes), train[0].shape[-1], fixed.width_of_random_units)
    learner = build(job.arm, shape, job.setting, job.seed)
    tasks = class_order(stream, job.seed)
    matrix, seconds = run_stream(learner, train, test, tasks, last=job.trial)
    run: Run = {"accuracy": metrics.average_accuracy(matrix), "seconds": seconds}
    if job.trial:
        return run
    return run | {
        "forgetting": metrics.forgetting(matrix),
        "learned": sum(matrix[j][j] for j in range(len(matrix))) / len(matrix),
        "matrix": matrix,
        "parameters": learner.stored(),
    }


MEASURES = (
    Measure(name="accuracy", title="accuracy", higher=True, share=True),
    Measure(name="forgetting", title="forgetting", higher=False, share=True),
)
OURS = "ours"
CLAIMS: tuple[tuple[str, str, str, float, bool], ...] = (
    ("ahead of KLDA", "klda", "accuracy", 0.0, True),
    ("ahead of RanPAC", "ranpac", "accuracy", 0.0, True),
    ("forgetting less than KLDA", "klda", "forgetting", 0.0, False),
    ("forgetting less than RanPAC", "ranpac", "forgetting", 0.0, False),
    ("within one point of joint training", "joint", "accuracy", 0.01, True),
    ("ahead of replay, 20 per class", "replay_20", "accuracy", 0.0, True),
    ("ahead of EWC", "ewc", "accuracy", 0.0, True),
    ("even rows ahead of rows that count alike", "uneven", "accuracy", 0.0, True),
    ("ahead of KLDA on our places", "klda_places", "accuracy", 0.0, True),
    ("ahead of RanPAC on our places, even", "ranpac_places", "accuracy", 0.0, True),
)
"""The claims made for ours: the other arm, the measure, the margin, whether more is better."""


def judge(found: Mapping[tuple[str, str], Cell], task: str, claim: Sequence[Any]) -> str:
    """A claim's verdict on a stream, with the difference in points."""
    _, arm, name, margin, higher = claim
    both = [found.get((task, a), Cell({})).values(name) for a in (OURS, arm)]
    gaps = [gap + margin for gap in paired(*both)]
    if len(gaps) < ENOUGH:
        return "unfinished"
    gap = interval(gaps)
    said = verdict(gap, higher=higher)
    return f"**{said}** {100 * (gap.mean - margin):+.1f} ± {100 * gap.half:.1f}"


def _findings(found: Mapping[tuple[str, str], Cell], study: Study) -> list[str]:
    """Refuted claims first, then open ones, those that were shown, and the goals."""
    words = {"refuted": "Ours is not", "inconclusive": "It is open whether ours is"}
    lines = []
    for word, begin in (words | {"shown": "Ours is"}).items():
        said = []
        for claim in CLAIMS:
            judged = {task: judge(found, task, claim) for task in study.tasks}
            gaps = [f"{t} {j.split('** ')[1]}" for t, j in judged.items() if f"**{word}" in j]
            said += [f"{claim[0]} ({', '.join(gaps)})"] if gaps else []
        if said:
            lines.append(f"{begin}: {'; '.join(said)}.")
    goals = {task: _goal(found, task) for task in study.tasks}
    if there := [f"{task} {goal}" for task, goal in goals.items() if goal != "unfinished"]:
        lines.append(f"Goals for accuracy: {'; '.join(there)}.")
    return lines


def page(study: Study, runs: Mapping[str, Run]) -> Page:
    """Findings, claims by streams, one chart per stream."""
    found = cells(runs)
    rows = [(claim[0], *(judge(found, task, claim) for task in study.tasks)) for claim in CLAIMS]
    rows.append(("goal", *(_goal(found, task) for task in study.tasks)))
    made = table_page(
        study,
        runs,
        title="Class after class",
        hero=OURS,
        measures=MEASURES,
        limits=[
            "The base is frozen for every arm: gradient arms train an MLP and a head over the same"
            " features, and joint training is joint over those, not of the whole base.",
            "Joint training by gradients turned out to be no upper bound: closed forms are ahead of"
            " it on Banking-77, so being within a point of it says little. Four of its five seeds"
            " have the same total there (2,844 of 3,080), which looks odd; on the validation split"
            " three other seeds gave 1,343 to 1,348 of 1,464, and two of them differed from the"
            " third in 54 and 60 answers, so seeds do differ.",
            "Even a learner that forgets nothing loses accuracy as classes are added to choose"
            " from; that is what closed-form arms' forgetting is.",
            "Ours was found on the validation splits of all three streams (not their test splits or"
            " the reported class orders), and published rivals were not developed here; KLDA and"
            " RanPAC are also run with our places, RanPAC with our counting.",
            "Except against KLDA on Banking-77, most of the lead is the places' (against RanPAC"
            " also the counting's), which any closed form can take: compare the rows of KLDA and"
            " RanPAC on our places. Nothing here has a second time scale.",
            "The goals are judged by the mean; on CLINC-150 and Banking-77 the interval contains"
            " the goal.",
            "Several closed forms chose a setting at the edge of their grid (appendix): ours, KLDA,"
            " LDA, and RanPAC the least shrinkage for DBpedia-70, where validation data (not used"
            " for it) preferred more: 86.9 at 0.03, 85.8 at 0.001 with 4,000 units.",
            "All closed forms on random units have 3,000 of them (KLDA's authors take 5,000,"
            " RanPAC's 10,000); wider ones were mostly better in trials, for all three. RanPAC's"
            " adaptation of the base in the first task is left out.",
            "Intervals are over class orders and random units. The test texts are the same for all"
            " seeds, so what other texts would give is not in them: the accuracy of one classifier"
            " on 1,000 to 4,500 texts has a standard error of 0.3 to 0.9 points.",
            "A text is cut at 48 tokens; DBpedia-70's classes are very uneven and its accuracy is"
            " the mean over tasks.",
        ],
        more=[
            Section(
                title="Claims by streams (ours minus theirs in points, 95%)",
                body=table(["ours is ...", *study.tasks], rows),
            )
        ],
        picture=charts(study, found),
        caption="Accuracy of every arm on each stream, with 95% intervals",
    )
    return replace(made, findings=_findings(found, study) or made.findings)


def _goal(found: Mapping[tuple[str, str], Cell], task: str) -> str:
    values = found.get((task, OURS), Cell({})).values("accuracy")
    if len(values) < ENOUGH:
        return "unfinished"
    mean = interval(list(values.values())).mean
    word = "reached" if mean >= GOALS[task] else "missed"
    return f"**{word}** {100 * mean:.1f} (goal {100 * GOALS[task]:g})"


def charts(study: Study, found: Mapping[tuple[str, str], Cell]) -> str:
    """One chart per stream, below each other in one picture."""
    parts, height = [], 0
    for task in study.tasks:
        rows: dict[str, Interval] = {}
        for arm, title in study.arms.items():
            if values := list(found.get((task, arm), Cell({})).values("accuracy").values()):
                mean, half = interval(values)
                rows[title] = Interval(100 * mean, 100 * half)
        inner = dots(rows, f"accuracy %, {task}")
        tall = 40 + 24 * len(rows)
        parts.append(inner.replace("<svg ", f'<svg y="{height}" width="720" height="{tall}" ', 1))
        height += tall + 16
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}">\n'
    return head + "".join(parts) + "</svg>\n"


def study(quick: bool = False) -> Study:
    """The study; the quick one runs real features of a slice, with one seed."""
    fixed = Fixed(seeds=(60,), width_of_random_units=100) if quick else Fixed()
    chosen = ("ours", "klda", "ranpac", "lda", "mean", "joint", "ewc") if quick else tuple(ARMS)
    tasks = ("banking77",) if quick else tuple(OTHER)
    return by_protocol(
        fixed,
        {name: ARMS[name].title for name in chosen},
        partial(make, quick=quick),
        name="continual",
        tasks=tasks,
        settings={name: ARMS[name].settings[: 1 if quick else 6] for name in ARMS},
        borrowed={name: arm.like for name, arm in ARMS.items() if arm.like},
        judged="accuracy",
        page=page,
        page_name="continual",
        needs=("seconds", "accuracy"),
        tuned_on={} if quick else OTHER,
    )
