"""How much of a text is kept: it is read, then another one, then it goes on (A, B, A').

    python -m studies kept              run what is missing, write docs/results/kept.md

The models are those of `studies.levels` (kept there, or trained when missing). Each reads A, then
B of another book, and is asked about A' (the text right after A) and about A again. The same is
read with C of a third book in place of A; what is *kept* of A is the loss after C less the loss
after A. A lesion takes what one level has learned away before the question.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nestling.models import MemoryCache
from nestling.models.cache import Learned
from nestling.report import Line, lines
from studies import default, levels
from studies.harness.models import parameters
from studies.harness.page import Page, Section, table
from studies.harness.store import Run
from studies.harness.study import Cell, Context, Job, Study, by_protocol, cells
from studies.harness.tables import Measure, table_page
from studies.harness.verdict import interval, judged, paired, show
from studies.tasks import text

ARMS = {
    "hope": "Hope",
    "one": "Hope, one level",
    "switched": "Hope, trained plain",
    "plain": "Hope, trained plain, levels frozen",
    "transformer": "Transformer++",
}


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The settings that were fixed before the first run."""

    training: levels.Protocol
    rate: float = 8e-3
    length: int = 8192
    between: tuple[int, ...] = (0, 4096, 16384)
    asked: int = 2048
    streams: int = 8
    held_out: tuple[str, ...] = text.HELD_OUT
    seeds: tuple[int, ...] = (0, 1, 2)
    tuning_seed: int = 140
    analysis: str = (
        "nats per byte kept of A on A' after the longest B; paired by seed, 95% by Student's t"
    )


QUICK = Protocol(
    training=levels.QUICK,
    length=128,
    between=(0, 64),
    asked=64,
    streams=2,
    seeds=(40,),
)


class Texts(NamedTuple):
    """Streams of bytes: A, its continuation, B, and C in place of A."""

    first: Tensor  # [N, length + 1]
    after: Tensor  # [N, asked + 1]: what comes after A
    other: Tensor  # [N, longest B + 1]
    instead: Tensor  # [N, length + 1]


def texts(context: Context, protocol: Protocol) -> Texts:
    """Each stream takes A, B and C from three different books, at random places."""
    draw, novels = random.Random(8), text.novels(context.data)
    made: list[list[Tensor]] = [[], [], [], []]
    for _ in range(protocol.streams):
        one, two, three = (
            text.joined([novels[name]]).long() for name in draw.sample(protocol.held_out, 3)
        )
        whole = protocol.length + protocol.asked + 1
        a = one[(start := draw.randrange(len(one) - whole)) : start + whole]
        made[0].append(a[: protocol.length + 1])
        made[1].append(a[protocol.length :])
        for place, book, size in ((2, two, max(protocol.between)), (3, three, protocol.length)):
            start = draw.randrange(len(book) - size - 1)
            made[place].append(book[start : start + size + 1])
    return Texts(*(torch.stack(each) for each in made))


def without(cache: MemoryCache, level: int) -> MemoryCache:
    """The same memory with what one level has learned taken away."""
    twin, learned = cache.copy(), cache.learned
    if learned is None:
        raise ValueError("nothing was learned, so no level can be taken away")
    states = []
    for state in learned.states:
        mine = list(state.levels)
        nothing = (None,) * len(mine[level].fast)
        mine[level] = mine[level]._replace(fast=nothing, sums=nothing)
        states.append(state._replace(levels=tuple(mine)))
    twin.learned = Learned(learned.rows, tuple(states))
    return twin


def answers(model: Any, before: Tensor, given: Texts, protocol: Protocol) -> dict[str, Any]:
    """Losses on A' and on A again after every length of B, and on A' with each level taken away."""
    cache = MemoryCache(model.config.num_hidden_layers)
    text.read_on(model, before, cache)
    found: dict[str, Any] = {"after": [], "again": [], "lesions": []}
    read = 0
    for size in protocol.between:
        if size > read:
            text.read_on(model, given.other[:, read : size + 1], cache)
            read = size
        found["after"].append(text.read_on(model, given.after, cache.copy()))
        again = given.first[:, : protocol.asked + 1]
        found["again"].append(text.read_on(model, again, cache.copy()))
        if model.learns:
            found["lesions"].append(
                {
                    level.name: text.read_on(model, given.after, without(cache, number))
                    for number, level in enumerate(model.config.memory_levels)
                    if level.active
                }
            )
    return found


def make(job: Job, context: Context, protocol: Protocol) -> Run:
    """Read A, B, A' with one model."""
    begin = time.process_time()
    folder = context.models.parents[1] / "levels" / "models"
    trained_as = "plain" if job.arm == "switched" else job.arm
    model = levels.obtained(
        trained_as, job.seed, protocol.rate, context._replace(models=folder), protocol.training
    )
    if job.arm == "plain":
        model = default.switched(model, 0.0)
    given = texts(context, protocol)
    knows = answers(model, given.first, given, protocol)
    other = answers(model, given.instead, given, protocol)
    run: Run = {"parameters": parameters(model), "after": knows["after"], "again": knows["again"]}
    for name in ("after", "again"):
        both = zip(other[name], knows[name], strict=True)
        run[f"kept_{name}"] = [its - mine for its, mine in both]
    run["lesions"] = [
        {level: loss - now for level, loss in lost.items()}
        for lost, now in zip(knows["lesions"], knows["after"], strict=bool(knows["lesions"]))
    ]
    run["kept"], run["kept again"] = run["kept_after"][-1], run["kept_again"][-1]
    run["seconds"] = time.process_time() - begin
    return run


LIMITS = (
    "Models of 300,000 parameters, three English novels, texts of 8,192 bytes.",
    "Transformer++ reads all of A and B by full attention, beyond its trained length of 2,048.",
    "A level that is taken away also loses what it would have gone on with; lesions show what the"
    " rest relies on, not what each level holds alone.",
)


def page(study: Study, runs: Mapping[str, Run]) -> Page:
    """Findings, what is kept against the length of B, lesions."""
    found, protocol = cells(runs), study.protocol
    drawn, rows, lesions = [], [], []
    for arm, title in study.arms.items():
        cell = found.get(("books", arm))
        if cell is None:
            continue
        some = list(cell.runs.values())
        for name, what in (("kept_after", "on A'"), ("kept_again", "on A again")):
            each = list(zip(*(run[name] for run in some), strict=True))
            rows.append((title, what, *(show(values, 4, sign="+") for values in each)))
            if name == "kept_after":
                means = [interval(values).mean for values in each]
                drawn.append(Line(title, [float(size) for size in protocol.between], means))
        for level in some[0]["lesions"][0] if some[0]["lesions"] else ():
            rises = zip(*([lost[level] for lost in run["lesions"]] for run in some), strict=True)
            lesions.append((title, level, *(show(values, 4, sign="+") for values in rises)))
    sizes = [f"after {size:,} bytes of B" for size in protocol.between]
    hero = found.get(("books", "hope"), Cell({})).values("kept")
    said = [
        f"{study.arms['hope']} against {title}, kept of A on A' after the longest B: "
        + judged(paired(hero, found.get(("books", arm), Cell({})).values("kept")))
        + "."
        for arm, title in study.arms.items()
        if arm != "hope"
    ]
    made = table_page(
        study,
        runs,
        title="What learning levels keep of a text after another",
        measures=(
            Measure(name="kept", title="kept on A' after the longest B, nats", higher=True),
            Measure(name="kept again", title="the same on A again", higher=True),
        ),
        limits=LIMITS,
        more=(
            Section(
                title="Kept of A (loss after C, B less loss after A, B), nats per byte",
                body=table(["", "", *sizes], rows),
            ),
            Section(
                title="Lesions: how much the loss on A' rises without what a level has learned",
                body=table(["", "level", *sizes], lesions),
            ),
        ),
        picture=lines(drawn, x="bytes of B", y="kept of A (nats per byte)"),
        caption="What is kept of A",
    )
    return Page(**{**made.__dict__, "findings": said})


def study(quick: bool = False) -> Study:
    """The study; `quick` is a slice of it."""
    protocol = QUICK if quick else Protocol(training=levels.Protocol())
    arms = ("hope", "transformer") if quick else tuple(ARMS)
    return by_protocol(
        protocol,
        {arm: ARMS[arm] for arm in arms},
        make,
        name="kept",
        tasks=("books",),
        judged="kept",
        page=page,
        page_name="kept",
        needs=("seconds", "kept", "parameters"),
    )
