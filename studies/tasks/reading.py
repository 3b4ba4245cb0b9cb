"""Reading samples of a suite at growing lengths, and what pages show of it.

    record = read(model, {("babilong", "qa1"): {1024: 100, 65536: 100}}, data=data, ...)
    record["qa1"]["65536"]["scores"]

Samples are read side by side in constant memory; throughput and resident memory are kept with the
scores. What was read is kept in a folder, so that a killed job goes on where it stopped.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from nestling.evaluate.samples import Books, Tokens, Words
from nestling.evaluate.suites import SUITES, Sources, answer, samples
from nestling.files import write_atomic
from nestling.models import NestlingForCausalLM, presets
from nestling.report import Line, lines
from studies import default
from studies.harness.models import keep_model, kept_facts, kept_model, parameters
from studies.harness.page import Page, Section, table
from studies.harness.store import Run
from studies.harness.study import Context, Job, Study, cells
from studies.harness.verdict import interval, percent, wilson
from studies.tasks.long import Curriculum, Draw, learn
from studies.tasks.vocabulary import load, shelf

__all__ = [
    "Record",
    "SampleCounts",
    "bare",
    "held_out",
    "length_page",
    "mean",
    "mean_of",
    "read",
    "score_of",
    "short",
    "shown",
    "train_and_read",
]

Record = dict[str, dict[str, dict[str, Any]]]
"""By task and length: `scores` of the samples, `tokens`, processor `seconds`, resident `mb`."""

SampleCounts = Mapping[tuple[str, str], Mapping[int, int]]
"""By suite and task: how many samples at each length."""


def held_out(data: Path) -> Sources:
    """Books that no model was trained on, and the texts of the suites."""
    return Sources(
        words=Words.load(data / "ruler_words"),
        books=Books(tuple(shelf(data, held_out=True))),
        babi=data / "babi",
    )


def read(
    model: Any,
    plan: SampleCounts,
    *,
    data: Sources,
    keep: Path,
    floor: float = 0.0,
    side_by_side: int = 20,
    at_once: int = 10_240,
) -> Record:
    """The scores of a model; plan: by suite and task, how many samples at each length.

    floor: a task is not read at longer lengths once its score is at most this.
    keep: a file of what was read already. at_once: tokens in a forward pass, of all samples.
    """
    record: Record = json.loads(keep.read_text()) if keep.is_file() else {}
    vocabulary = load()
    for (suite, task), lengths in plan.items():
        done = record.setdefault(task, {})
        for length, count in sorted(lengths.items()):
            if str(length) not in done:
                begin = time.process_time()
                made = samples(
                    suite, task, length, data=data, count=count, tokens=Tokens(vocabulary)
                )
                scores: list[float] = []
                most = 0.0
                while some := list(islice(made, side_by_side)):
                    said = answer(model, some, vocabulary, piece=at_once // len(some))
                    scores += map(SUITES[suite].score, some, said)
                    most = max(most, resident())
                done[str(length)] = {
                    "scores": scores,
                    "tokens": length * count,
                    "seconds": time.process_time() - begin,
                    "mb": most,
                }
                keep.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(keep, json.dumps(record).encode())
            if mean(done[str(length)]) <= floor:
                break
    return record


def bare(model: default.Model, size: presets.Size) -> Any:
    """The untrained Hugging Face model of an arm; in training on answers levels stand still."""
    return NestlingForCausalLM(default.configuration(model, size, learning="plain"))


def train_and_read(
    job: Job,
    context: Context,
    *,
    build: Callable[[], Any],
    draw: Draw,
    curriculum: Curriculum,
    plan: SampleCounts,
    floor: float,
) -> Run:
    """One job: a model is trained and kept, then it reads; a trial is only trained.

    Levels learn while they read only if they did so in training: to predict the text, which
    models trained on answers alone have never learned.
    `gave up` says of which tasks longer texts were not read because of the floor.
    """
    folder = context.models / f"{job.task}-{job.arm}-{job.seed}"
    keep = folder.with_name(f"{folder.name}.read.json")  # the model may be asked to read on
    model: Any = None if job.trial else kept_model(folder)
    if model is None:
        torch.manual_seed(job.seed)
        model = build()
        rate, save = job.setting["rate"], context.scratch / "training"
        done = learn(model, draw, curriculum, rate=rate, seed=job.seed, save=save)
        facts = {"loss": done.last(), "seconds": done.seconds, "parameters": parameters(model)}
        if job.trial:
            return facts
        keep.unlink(missing_ok=True)
        keep_model(model, folder, facts)
    if model.learns and not model.config.learns_in_training:  # it was trained on answers only
        model = default.switched(model, 0.0)
    record = read(
        model.eval(),
        plan,
        data=held_out(context.data),
        keep=keep,
        floor=floor,
        side_by_side=4 if model.config.mixer == "attention" else 20,  # its cache grows
    )
    facts = kept_facts(folder)
    reading = sum(found["seconds"] for done in record.values() for found in done.values())
    return {
        **facts,
        "seconds": facts["seconds"] + reading,
        "read": record,
        "gave up": {task: len(record[task]) < len(plan[suite, task]) for suite, task in plan},
    }


def resident() -> float:
    """Megabytes of this process that are in memory now, after a batch (0 where it is not told)."""
    told = Path("/proc/self/statm")
    return (
        int(told.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
        if told.exists()
        else 0.0
    )


def mean(found: Mapping[str, Any]) -> float:
    """The mean score of the samples."""
    scores = found["scores"]
    return float(sum(scores) / len(scores))


def short(length: int) -> str:
    """`4K`, `1M`, or the number."""
    for size, unit in ((1 << 20, "M"), (1 << 10, "K")):
        if length >= size and length % size == 0:
            return f"{length // size}{unit}"
    return str(length)


def shown(runs: Sequence[Run], task: str, length: int) -> str:
    """Mean and 95% interval: over seeds where there are three, else over samples (Wilson)."""
    found = [r["read"][task][str(length)] for r in runs if str(length) in r["read"].get(task, {})]
    if not found:
        return "-"
    if len(found) > 2:
        return percent([mean(one) for one in found])
    scores = [score for one in found for score in one["scores"]]
    low, high = wilson(sum(scores), len(scores))
    return f"{100 * sum(scores) / len(scores):.0f} ({100 * low:.0f}-{100 * high:.0f})"


def score_table(
    titles: Mapping[str, str], cells: Mapping[str, Sequence[Run]], task: str, lengths: Sequence[int]
) -> list[str]:
    """Arms by lengths, in percent."""
    rows = [
        (titles[arm], *(shown(runs, task, length) for length in lengths))
        for arm, runs in cells.items()
    ]
    return table(["", *map(short, lengths)], rows)


def curve(
    name: str, runs: Sequence[Run], tasks: Sequence[str], lengths: Sequence[int]
) -> Line | None:
    """The mean over tasks against the length, as far as all tasks were read or given up."""
    x, y, low, high = [], [], [], []
    for length in lengths:
        each = [m for run in runs if (m := mean_of(run, tasks, length)) is not None]
        if each:
            x.append(float(length))
            found = interval(each)
            y.append(100 * found.mean)
            half = 100 * found.half if len(each) > 2 else 0.0
            low.append(y[-1] - half)
            high.append(y[-1] + half)
    return Line(name, x, y, low, high) if x else None


def score_of(run: Run, task: str, length: int) -> float | None:
    """A run's mean score; the last one of a task that was given up at a shorter length.

    None where the task was not meant to be read so far.
    """
    done = {int(at): mean(found) for at, found in run["read"].get(task, {}).items()}
    if length in done:
        return done[length]
    return done[max(done)] if done and max(done) < length and run["gave up"].get(task) else None


def scores_of(runs: Mapping[int, Run], task: str, length: int) -> dict[int, float]:
    """The mean score of every seed that was meant to read so far."""
    each = {seed: score_of(run, task, length) for seed, run in runs.items()}
    return {seed: score for seed, score in each.items() if score is not None}


def mean_of(run: Run, tasks: Sequence[str], length: int) -> float | None:
    """A run's mean over tasks; None where one of them was not meant to be read so far."""
    each = [score_of(run, task, length) for task in tasks]
    known = [score for score in each if score is not None]
    return sum(known) / len(each) if len(known) == len(each) else None


def speed_table(titles: Mapping[str, str], cells: Mapping[str, Sequence[Run]]) -> list[str]:
    """The longest texts each arm read: processor time of a text, tokens a second, memory."""
    rows = []
    for arm, runs in cells.items():
        read_ = [
            (int(length), found)
            for run in runs
            for done in run["read"].values()
            for length, found in done.items()
        ]
        if read_:
            longest = max(length for length, _ in read_)
            found = [f for length, f in read_ if length == longest]
            tokens, seconds = (sum(f[name] for f in found) for name in ("tokens", "seconds"))
            each = seconds / sum(len(f["scores"]) for f in found)
            rows.append(
                (titles[arm], short(longest), f"{each:.0f}", f"{tokens / seconds:,.0f}",
                 f"{max(f['mb'] for f in found):.0f}")
            )  # fmt: skip
    head = ["", "longest text", "processor s a text", "tokens a second", "resident MB"]
    return table(head, rows)


def length_page(
    study: Study,
    runs: Mapping[str, Run],
    *,
    title: str,
    lengths: Sequence[int],
    tasks: Sequence[str],
    findings: Sequence[str],
    limits: Sequence[str],
    caption: str,
    more: Sequence[Section] = (),
    drawn: Sequence[Line] = (),
) -> Page:
    """Scores against length: a picture of the mean over tasks, a table for each, and the speed.

    drawn: further lines of the picture.
    """
    found = cells(runs)
    mine = {
        arm: list(found[study.tasks[0], arm].runs.values())
        for arm in study.arms
        if (study.tasks[0], arm) in found
    }
    made = [curve(study.arms[arm], each, tasks, lengths) for arm, each in mine.items()]
    shown_ = [*(line for line in made if line is not None), *drawn]
    done, wanted = sum(map(len, mine.values())), len(study.arms) * len(study.seeds)
    unfinished = [f"**Unfinished**: {done} of {wanted} runs."] if done < wanted else []
    tables = [
        Section(
            title=f"{task}, % right, 95% interval",
            body=score_table(study.arms, mine, task, lengths),
        )
        for task in tasks
    ]
    speed = Section(title="Speed and memory, one thread", body=speed_table(study.arms, mine))
    return Page(
        title=title,
        command=f"python -m studies {study.name}",
        findings=findings,
        limits=[*unfinished, *limits],
        protocol=study.protocol,
        picture=lines(shown_, x="tokens", y="% right", log_x=True) if shown_ else "",
        caption=caption,
        sections=[*tables, speed, *more],
    )
