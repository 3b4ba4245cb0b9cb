"""Do several levels earn their place? One memory against several time scales, at equal size.

    python -m studies timescales   run what is missing, write results/continual_timescales.md

A level is a least-squares memory (the retaining rule's sums) that halves what it holds every so
many examples and falls back to zero where nothing was written. Levels stand in a chain: each
learns what the slower ones before it leave. One level must choose a time scale; several need not.

Two kinds of streams, in which some things stay and others change:

- *labels that move* (Banking-77, CLINC-150 on MiniLM): half of the classes keep their label but
  each appears in two of six phases only; the labels of the others are dealt out anew every phase.
- *domains* (novels, an encyclopedia, stories, a grammar, then the novels again): the next byte from
  the four before it.

All arms keep the same number of numbers, solve for no more than the single level does, and had the
same number of trials, on other seeds (and, for domains, other books).

Shapes: N examples, D features, W width of a level, C outputs.
"""

from __future__ import annotations

import gzip
import math
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from studies.continual.bases import load_base
from studies.continual.memories import one_place
from studies.continual.streams import load
from studies.harness.page import Page, Section, table
from studies.harness.store import Run
from studies.harness.study import Cell, Context, Job, Study, by_protocol, cells
from studies.harness.tables import Measure, table_page
from studies.harness.verdict import ENOUGH, interval, paired, percent, verdict

__all__ = ["Chain", "study"]

NEVER = math.inf


class Chain:
    """Least-squares memories over random units, the slowest first; each fits what is left over.

    halves: examples after which a level has forgotten half; `inf` for one that never forgets.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        halves: Sequence[float],
        *,
        width: int,
        keep: float,
        seed: int,
    ) -> None:
        if not halves or min(halves) <= 0:
            raise ValueError(f"halves must be above 0, one per level; got {list(halves)}")
        self.halves, self.keep = tuple(halves), keep
        draw = torch.Generator().manual_seed(seed)
        size = (len(halves), inputs, width)
        self.units = torch.randn(*size, generator=draw) * math.sqrt(2.0)  # [K, D, W]
        self.shift = 2 * math.pi * torch.rand(len(halves), 1, width, generator=draw)
        self.squares = torch.zeros(len(halves), width, width)
        self.products = torch.zeros(len(halves), width, outputs)
        self.weights = torch.zeros(len(halves), width, outputs)

    def rows(self, x: Tensor) -> Tensor:
        """[N, D] -> [K, N, W]."""
        return (x @ self.units + self.shift).cos() * math.sqrt(2 / self.units.shape[-1])

    def answers(self, x: Tensor) -> Tensor:
        """[K, N, C]: what each level adds."""
        return self.rows(x) @ self.weights

    def learn(self, x: Tensor, y: Tensor) -> None:
        """A chunk: every level learns what the slower ones, as they were before it, left over."""
        rows, outputs = self.rows(x), self.products.shape[-1]
        left = one_hot(y, outputs).float()
        eye = self.keep * torch.eye(rows.shape[-1])
        for k, half in enumerate(self.halves):
            stay = 0.5 ** (len(y) / half)
            said = rows[k] @ self.weights[k]
            self.squares[k] = stay * self.squares[k] + rows[k].mT @ rows[k]
            self.products[k] = stay * self.products[k] + rows[k].mT @ left
            root = torch.linalg.cholesky(self.squares[k] + eye)
            self.weights[k] = torch.cholesky_solve(self.products[k], root)
            left = left - said

    def numbers(self) -> int:
        """How many numbers it keeps."""
        return self.squares.numel() + self.products.numel()


def width_of(levels: int, numbers: int, outputs: int) -> int:
    """The width at which so many levels keep at most so many numbers."""
    each = numbers / levels
    return int((math.sqrt(outputs**2 + 4 * each) - outputs) / 2)


class Phase(NamedTuple):
    """Pairs to learn, and then to test: `stays` among old things, `moves` among what changed."""

    x: Tensor
    y: Tensor
    tests: Mapping[str, tuple[Tensor, Tensor]]


def moving_labels(
    train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], classes: int, seed: int
) -> list[Phase]:
    """Six phases; half of the classes stay and appear in two of them, the others' labels move."""
    draw = random.Random(seed)
    order = draw.sample(range(classes), classes)
    stay, move = order[: classes // 2], order[classes // 2 :]
    pairs = list(combinations(range(6), 2))
    when = {c: pairs[i % len(pairs)] for i, c in enumerate(draw.sample(stay, len(stay)))}
    found: list[Phase] = []
    for phase in range(6):
        label = torch.arange(classes)
        label[move] = torch.tensor(draw.sample(move, len(move)))
        here = [c for c in stay if phase in when[c]]
        seen = [c for c in stay if min(when[c]) <= phase]
        index: list[int] = []
        for c in (*here, *move):
            mine = (train[1] == c).nonzero().flatten().tolist()
            count = 2 if c in when else 6
            turn = when[c].index(phase) if c in when else phase
            index += mine[len(mine) * turn // count : len(mine) * (turn + 1) // count]
        draw.shuffle(index)
        tests = {}
        for name, some in (("stays", seen), ("moves", move)):
            own = torch.isin(test[1], torch.tensor(some))
            tests[name] = test[0][own], label[test[1][own]]
        found.append(Phase(train[0][index], label[train[1][index]], tests))
    return found


@cache
def _features(name: str, data: Path, folder: Path, valid: bool) -> tuple:
    """(train, test, classes) of a stream on MiniLM; `valid`: the held-out split for tests."""
    found, base = load(name, data), load_base("minilm")
    parts = []
    for split in (found.train, found.valid if valid else found.test):
        x = one_place(base.features(split.texts, folder), -3)
        parts.append((x, torch.tensor(split.labels)))
    return (*parts, len(found.classes))


LETTERS = " abcdefghijklmnopqrstuvwxyz.,"
BOOKS = {
    True: ("treasure_island", "wuthering_heights"),  # tuning
    False: ("emma", "dracula"),
}


def domains(data: Path, size: int, seed: int, *, tuning: bool) -> list[Phase]:
    """A novel, WikiText-2, TinyStories, a grammar, another novel; what moves is the present one."""
    first, last = BOOKS[tuning]
    part = "valid" if tuning else "test"
    files = (
        f"gutenberg_books/{first}.txt.gz",
        f"wikitext2/{part}.txt.gz",
        "tinystories/stories_a_3117.txt.gz",
        "kalamang/grammar_of_kalamang.tex.gz",
        f"gutenberg_books/{last}.txt.gz",
    )
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randn(4, len(LETTERS), 24, generator=draw) / math.sqrt(24)
    codes *= torch.tensor([0.5, 0.7, 1.0, 1.4])[:, None, None]  # the nearest counts most
    found, old = list[Phase](), list[tuple[Tensor, Tensor]]()
    for number, file in enumerate(files):
        text = _letters(data / file)
        begin = random.Random(100 * seed + number).randrange(len(text) - 3 * size)
        ids = torch.tensor([LETTERS.index(c) for c in text[begin : begin + size + size // 4 + 8]])
        windows = ids.unfold(0, 5, 1)  # [N, 5]
        x = torch.cat([codes[i][windows[:, i]] for i in range(4)], 1)  # [N, 96]
        new = x[size:], windows[size:, 4]
        tests = {"moves": new}
        if old:
            tests["stays"] = torch.cat([x for x, _ in old]), torch.cat([y for _, y in old])
        found.append(Phase(x[:size], windows[:size, 4], tests))
        old.append(new)
    return found


@cache
def _letters(path: Path) -> str:
    with gzip.open(path, "rt", encoding="utf-8", errors="ignore") as file:
        text = re.sub(r"[^a-z.,]+", " ", file.read(2_000_000).lower())
    return text[len(text) // 20 :]


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The settings that were fixed before the first run."""

    numbers: int = 60_000
    chunk: int = 64
    keep: float = 0.03
    bytes_of_a_domain: int = 4_000
    halves: tuple[int, ...] = (250, 500, 1_000, 2_000, 4_000)
    trials: int = 6
    seeds: tuple[int, ...] = (50, 51, 52, 53, 54)
    tuning_seed: int = 150
    analysis: str = (
        "after each phase the mean of the accuracy on what stays and on what moves; mean over"
        " phases; paired by seed, 95%"
    )

    def settings(self) -> dict[str, list[dict[str, float]]]:
        """As many for every arm: a slow level that never forgets, and where the fast ones stand."""
        h = self.halves
        return {
            "one": [{"slow": NEVER}, *({"slow": float(x)} for x in h)],
            "two": [{"slow": NEVER, "fast": float(x)} for x in h]
            + [{"slow": float(h[-1]), "fast": float(h[0])}],
            "three": [
                {"slow": NEVER, "middle": float(h[b]), "fast": float(h[a])}
                for a, b in ((0, 2), (0, 3), (0, 4), (1, 3), (1, 4), (2, 4))
            ],
        }


TASKS = ("moving labels, Banking-77", "moving labels, CLINC-150", "domains")
ARMS = {"two": "two levels", "one": "one level, the best time scale", "three": "three levels"}
LESIONS = {"slow": "without the slowest", "fast": "without the fastest"}


def _phases(job: Job, context: Context, protocol: Protocol, quick: bool) -> tuple[list[Phase], int]:
    if job.task == "domains":
        size = 600 if quick else protocol.bytes_of_a_domain
        return domains(context.data, size, job.seed, tuning=job.trial), len(LETTERS)
    name = "banking77" if "Banking" in job.task else "clinc150"
    if quick:
        draw = torch.Generator().manual_seed(1)
        centres, y = torch.randn(12, 16, generator=draw), torch.arange(12).repeat(30)
        x = centres[y] + 0.3 * torch.randn(len(y), 16, generator=draw)
        return moving_labels((x, y), (x, y), 12, job.seed), 12
    folder = context.models.parent.parent / "features"
    train, test, classes = _features(name, context.data, folder, job.trial)
    return moving_labels(train, test, classes, job.seed), classes


def make(job: Job, context: Context, protocol: Protocol, quick: bool) -> Run:
    """Learn the phases chunk by chunk; after each, ask about what stays and what moves."""
    begin = time.process_time()
    phases, outputs = _phases(job, context, protocol, quick)
    halves = [float(half) for half in job.setting.values()]
    width = width_of(len(halves), protocol.numbers, outputs)
    chain = Chain(
        phases[0].x.shape[1], outputs, halves, width=width, keep=protocol.keep, seed=job.seed
    )
    every = {"all": list(range(len(halves)))}
    if len(halves) > 1:
        every |= {"slow": every["all"][1:], "fast": every["all"][:-1]}
    scores: dict[str, dict[str, list[float]]] = {
        kind: {which: [] for which in every} for kind in ("stays", "moves")
    }
    for phase in phases:
        for x, y in zip(phase.x.split(protocol.chunk), phase.y.split(protocol.chunk), strict=True):
            chain.learn(x, y)
        for kind, (x, y) in phase.tests.items():
            said = chain.answers(x)
            for which, levels in every.items():
                right = said[levels].sum(0).argmax(1) == y
                scores[kind][which].append(float(right.double().mean()))

    def mean(kind: str, which: str) -> float:
        return sum(scores[kind][which]) / len(scores[kind][which])

    out: Run = {"stays": mean("stays", "all"), "moves": mean("moves", "all")}
    out["score"] = (out["stays"] + out["moves"]) / 2
    for lesion in set(every) - {"all"}:
        out |= {f"{kind} {LESIONS[lesion]}": mean(kind, lesion) for kind in ("stays", "moves")}
    return out | {"parameters": chain.numbers(), "seconds": time.process_time() - begin}


def _gap(found: Mapping[tuple[str, str], Cell], task: str, ours: str, name: str) -> str:
    both = [found.get((task, arm), Cell({})).values(name) for arm in (ours, "one")]
    gaps = paired(*both)
    if len(gaps) < ENOUGH:
        return "unfinished"
    gap = interval(gaps)
    return f"**{verdict(gap)}** {100 * gap.mean:+.1f} ± {100 * gap.half:.1f}"


def _parts(found: Mapping[tuple[str, str], Cell], arm: str, tasks: Sequence[str]) -> str:
    """On how many streams an arm is ahead and behind, for what stays and what moves."""
    said = ""
    for kind in ("stays", "moves"):
        gaps = [_gap(found, task, arm, kind) for task in tasks]
        ahead, behind = (sum(word in gap for gap in gaps) for word in ("shown", "refuted"))
        said += f" What {kind} alone: ahead on {ahead}, behind on {behind}."
    return said


def _verdict(found: Mapping[tuple[str, str], Cell], study: Study) -> list[str]:
    """The question of the page, answered for each number of levels, and what lesions say."""
    said = []
    for arm in ("two", "three"):
        gaps = {task: _gap(found, task, arm, "score") for task in study.tasks}
        there = {task: gap for task, gap in gaps.items() if gap != "unfinished"}
        shown = sum(gap.startswith("**shown**") for gap in there.values())
        if there:
            listed = "; ".join(f"{task}: {gap}" for task, gap in there.items())
            said.append(
                f"{ARMS[arm].capitalize()} against the best single one, accuracy on what stays and"
                f" what moves: ahead on {shown} of {len(there)} streams ({listed})."
                f"{_parts(found, arm, list(there))}"
            )
    for task in study.tasks:
        if (task, "two") in found:
            drop = {
                which: [
                    100 * (interval(_of(found, task, "two", f"{kind}{which}")).mean)
                    for kind in ("stays", "moves")
                ]
                for which in ("", *(f" {each}" for each in LESIONS.values()))
            }
            whole, slow, fast = drop.values()
            said.append(
                f"Lesion, {task}: with both levels {whole[0]:.1f} on what stays and {whole[1]:.1f}"
                f" on what moves; without the slow one {slow[0]:.1f} and {slow[1]:.1f}, without the"
                f" fast one {fast[0]:.1f} and {fast[1]:.1f}."
            )
    return said


def page(study: Study, runs: Mapping[str, Run]) -> Page:
    """Claims by streams, the measures, and what lesions do."""
    found = cells(runs)
    claims = {
        f"{ARMS[arm]} are ahead of the best single one in {said}": (arm, name)
        for arm in ("two", "three")
        for name, said in (
            ("score", "accuracy"),
            ("stays", "what stays"),
            ("moves", "what moves"),
        )
    }
    rows = [
        (claim, *(_gap(found, task, arm, name) for task in study.tasks))
        for claim, (arm, name) in claims.items()
    ]
    lesions = [
        (
            ARMS[arm],
            task,
            *(
                percent(_of(found, task, arm, f"{kind}{which}"))
                for kind in ("stays", "moves")
                for which in ("", *(f" {each}" for each in LESIONS.values()))
            ),
        )
        for arm in ("two", "three")
        for task in study.tasks
        if (task, arm) in found
    ]
    head = [
        "",
        "stream",
        *(
            f"{kind}{which}"
            for kind in ("stays", "moves")
            for which in ("", *(f", {each}" for each in LESIONS.values()))
        ),
    ]
    made = table_page(
        study,
        runs,
        title="Do several levels earn their place?",
        hero="two",
        measures=[
            Measure(name="score", title="accuracy, stays and moves", higher=True, share=True),
            Measure(name="stays", title="accuracy on what stays", higher=True, share=True),
            Measure(name="moves", title="accuracy on what moves", higher=True, share=True),
        ],
        limits=[
            "The streams are made so that some things stay while others change, which is what"
            " levels are for; on class-incremental streams, where nothing changes, one level that"
            " never forgets is the best ([how it is done](../continual.md)).",
            "Levels here are least-squares memories over frozen features or codes of four bytes,"
            " not levels inside a deep network.",
            "The single level may also never forget; all arms chose among the same time scales, on"
            " one tuning seed, so its scale is the best of that seed only.",
            "The sizes (numbers, bytes, keep) were set after trials on the tuning seed of domains,"
            " in which two levels were ahead by half a point. Tuning has other novels and another"
            " part of WikiText-2, but draws its places from the same stories and the same grammar;"
            " for labels that move it has another seed and the held-out split of the same stream.",
            "What stays and what moves count alike in the accuracy; where the claims below differ,"
            " levels buy the one with the other.",
        ],
        more=[
            Section(
                title="Claims by streams (difference in points, 95%)",
                body=table(["claim", *study.tasks], rows),
            ),
            Section(title="Lesions: a level taken out after learning", body=table(head, lesions)),
        ],
    )
    return replace(made, findings=_verdict(found, study) or made.findings)


def _of(found: Mapping[tuple[str, str], Cell], task: str, arm: str, name: str) -> list[float]:
    return list(found[task, arm].values(name).values())


def study(quick: bool = False) -> Study:
    """The study; the quick one has a slice of the data and one seed."""
    protocol = Protocol(seeds=(50,), numbers=4_000) if quick else Protocol()
    return by_protocol(
        protocol,
        ARMS,
        partial(make, quick=quick),
        name="timescales",
        tasks=TASKS,
        settings=protocol.settings(),
        judged="score",
        page=page,
        page_name="continual_timescales",
        needs=("seconds", "score"),
    )
