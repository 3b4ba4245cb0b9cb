"""Streams beyond classes of text: pictures, and reading told by its family.

    python -m studies beyond      run what is missing, write docs/results/continual_beyond.md

The arms, the protocol and the metrics are those of `studies.continual.study`; the streams differ:

- `pictures`: CIFAR-10 in five tasks of two classes, class after class. The base is a small vision
  transformer that was trained to tell how far a picture is turned, without any label of a class.
- `reading`: ten families of bAbI questions, one after the other. A learner is told the family and
  chooses among its answers (task-incremental). The base is MiniLM-L6, which reads the question and
  the facts, the newest first, so that the oldest ones are cut from a long story.

Settings are chosen on the held-out part of the stream itself, in an order no reported seed uses,
because no other stream of the same kind is at hand.
"""

from __future__ import annotations

import random
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nestling.evaluate.babilong import parse
from nestling.files import BrokenFileError, load_tree, save_tree
from studies.continual import metrics
from studies.continual.bases import Base, load_base
from studies.continual.streams import Dataset, Split, class_order
from studies.continual.study import ARMS, MEASURES, Pairs, Shape, build, charts, run_stream
from studies.harness.page import Page
from studies.harness.store import Run
from studies.harness.study import Context, Job, Study, by_protocol, cells
from studies.harness.tables import table_page
from studies.optim.networks import ViT
from studies.optim.tasks import cifar

CLOSED = ("ours", "klda", "ranpac", "klda_places", "ranpac_places", "lda", "mean")
GRADIENT = ("joint", "replay_20", "ewc", "sequential")
FAMILIES = (1, 2, 4, 5, 6, 7, 9, 10, 12, 15)
"""bAbI: one to two facts, relations, yes and no, counting, negation, "maybe", "they", deduction."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The settings that were fixed before the first run."""

    picture_base: str = "ViT of width 64 and 4 blocks, 1,500 steps of 64 turned pictures"
    steps: int = 1_500
    rate: float = 1e-3
    families: tuple[int, ...] = FAMILIES
    questions: tuple[int, int, int] = (400, 100, 200)
    tokens_of_a_text: int = 96
    width_of_random_units: int = 3_000
    seeds: tuple[int, ...] = (60, 61, 62, 63, 64)
    tuning_seed: int = 160
    analysis: str = (
        "mean accuracy over tasks after the last one; forgetting: accuracy when learned minus at"
        " the end; paired by seed, 95%"
    )


QUICK = Protocol(
    steps=2, families=(1, 6), questions=(24, 8, 8), width_of_random_units=60, seeds=(60,)
)


class Stream(NamedTuple):
    """Features and classes of the three splits, and how classes are cut into tasks."""

    train: Pairs  # [N, P, D] and [N]
    valid: Pairs
    test: Pairs
    classes: int
    tasks: Callable[[int], Sequence[Sequence[int]]]  # by the seed
    told: bool  # a learner is told the task it is asked


def pictures(data: Path, folder: Path, protocol: Protocol, quick: bool) -> Stream:
    """CIFAR-10's staged subset: 8,500 pictures to learn from, 1,500 held out, 2,000 to test."""
    seen, labels = cifar(data, "train_10000", 600 if quick else None)
    asked, right = cifar(data, "test_2000", 100 if quick else None)
    base = turned_base(seen, folder, protocol)
    order = torch.randperm(len(seen), generator=torch.Generator().manual_seed(2025))
    held, rest = order.split([len(seen) * 15 // 100, len(seen) - len(seen) * 15 // 100])
    x = encode_pictures(base, seen)
    none = Split(texts=(), labels=())
    ten = Dataset(
        name="pictures", classes=tuple(map(str, range(10))), tasks=5, train=none, valid=none,
        test=none,
    )  # fmt: skip
    return Stream(
        (x[rest], labels[rest]),
        (x[held], labels[held]),
        (encode_pictures(base, asked), right),
        10,
        partial(class_order, ten),
        told=False,
    )


def turned_base(seen: Tensor, folder: Path, protocol: Protocol) -> ViT:
    """A ViT that was trained to tell how far a picture is turned: 0, 90, 180 or 270 degrees.

    It is kept in the folder of features, and trained when it is not there.
    """
    torch.manual_seed(0)
    base = ViT(width=64, heads=4, depth=4, size=32, patch=4, channels=3)
    name = f"turned-{protocol.steps}-{len(seen)}"
    try:
        weights, _ = load_tree(folder, name)
        base.load_state_dict(weights)
        return base.eval()
    except (BrokenFileError, FileNotFoundError):
        pass
    optimizer = torch.optim.AdamW(base.parameters(), lr=protocol.rate, weight_decay=0.05)
    for step in range(protocol.steps):
        for group in optimizer.param_groups:
            group["lr"] = protocol.rate * min(1.0, (step + 1) / 50) * (1 - step / protocol.steps)
        flow = torch.Generator().manual_seed(step)
        chosen = seen[torch.randint(len(seen), (64,), generator=flow)]
        turns = torch.randint(4, (64,), generator=flow)
        given = torch.stack([p.rot90(int(n), (1, 2)) for p, n in zip(chosen, turns, strict=True)])
        loss = nn.functional.cross_entropy(base(given)[:, :4], turns)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    save_tree(folder, name, dict(base.state_dict()), {"steps": protocol.steps})
    return base.eval()


@torch.no_grad()
def encode_pictures(base: ViT, given: Tensor) -> Tensor:
    """[N, P, D] in float16: every block's output, as its mean, its first patch and its maximum."""
    outputs: list[Tensor] = []
    hooks = [
        block.register_forward_hook(lambda *args: outputs.append(args[-1]))
        for block in base.trunk.blocks
    ]
    rows = []
    for part in given.split(250):
        outputs.clear()
        base(part)
        places = [pool for x in outputs for pool in (x.mean(1), x[:, 0], x.amax(1))]
        rows.append(torch.stack(places, 1).half())
    for hook in hooks:
        hook.remove()
    return torch.cat(rows)


def reading(data: Path, folder: Path, protocol: Protocol, quick: bool) -> Stream:
    """bAbI families as tasks; the class of a question is its family and its answer."""
    base = replace(load_base("minilm"), length=protocol.tokens_of_a_text)
    learn, hold, ask = protocol.questions
    texts: list[list[str]] = [[], [], []]
    names: list[list[tuple[int, str]]] = [[], [], []]
    for family in protocol.families:
        kept = _questions(data, family, "train", learn + hold)
        asked = _questions(data, family, "test", ask)
        for split, some in enumerate((kept[:learn], kept[learn:], asked)):
            texts[split] += [text for text, _ in some]
            names[split] += [(family, answer) for _, answer in some]
    known = sorted(set(names[0]))
    number = {name: i for i, name in enumerate(known)}
    train, valid, test = (
        _encoded(base, t, n, number, folder) for t, n in zip(texts, names, strict=True)
    )
    own = {f: [number[name] for name in known if name[0] == f] for f in protocol.families}

    def tasks(seed: int) -> Sequence[Sequence[int]]:
        order = list(protocol.families)
        random.Random(seed).shuffle(order)
        return [own[family] for family in order]

    return Stream(train, valid, test, len(known), tasks, told=True)


def _questions(data: Path, family: int, split: str, count: int) -> list[tuple[str, str]]:
    """Questions with their facts, the newest first, and answers; the same sample every time."""
    with zipfile.ZipFile(data / "babi" / "babi_v1-2_en.zip") as archive:
        ending = f"_{split}.txt"
        member = next(
            name
            for name in archive.namelist()
            if Path(name).match(f"en/qa{family}_*") and name.endswith(ending)
        )
        found = list(parse(archive.read(member).decode()))
    some = random.Random(2025).sample(found, min(count, len(found)))
    return [(" ".join((s.question, *reversed(s.facts))), s.answer) for s in some]


def _encoded(
    base: Base, texts: list[str], names: list[tuple[int, str]], number: Mapping[Any, int],
    folder: Path,
) -> Pairs:  # fmt: skip
    """Features and classes; questions whose answer training does not have are left out."""
    known = [i for i, name in enumerate(names) if name in number]
    classes = torch.tensor([number[names[i]] for i in known])
    return base.features([texts[i] for i in known], folder), classes


STREAMS = {"pictures": pictures, "reading": reading}


@cache
def stream_of(task: str, data: Path, folder: Path, protocol: Protocol, quick: bool) -> Stream:
    """The stream of this name; features are read from the folder, or made."""
    return STREAMS[task](data, folder, protocol, quick)


def make(job: Job, context: Context, protocol: Protocol, quick: bool) -> Run:
    """One arm on one stream: the accuracy matrix and what it costs."""
    folder = context.models.parent.parent / "features"
    stream = stream_of(job.task, context.data, folder, protocol, quick)
    shape = Shape(stream.classes, stream.train[0].shape[-1], protocol.width_of_random_units)
    learner = build(job.arm, shape, job.setting, job.seed)
    tested = stream.valid if job.trial else stream.test
    matrix, seconds = run_stream(
        learner, stream.train, tested, stream.tasks(job.seed), last=job.trial, told=stream.told
    )
    run: Run = {"accuracy": metrics.average_accuracy(matrix), "seconds": seconds}
    if job.trial:
        return run
    return run | {
        "forgetting": metrics.forgetting(matrix),
        "matrix": matrix,
        "parameters": learner.stored(),
    }


LIMITS = (
    "Ours was found on streams of text (page class after class) and taken over unchanged, its two"
    " settings aside.",
    "The picture base has 0.2M parameters and never saw a label of a class; what it does not see,"
    " no arm can learn.",
    "A sentence encoder is not made to follow who went where: the stream compares learners, not"
    " readers. Questions whose answer training does not have are left out.",
    "Nothing here has a second time scale; streams in which things change are on the page of time"
    " scales.",
)


def page(study: Study, runs: Mapping[str, Run]) -> Page:
    """Findings, one chart per stream, tables."""
    return table_page(
        study,
        runs,
        title="Streams beyond classes of text",
        hero="ours",
        measures=MEASURES,
        limits=LIMITS,
        picture=charts(study, cells(runs)),
        caption="Accuracy of every arm on each stream, with 95% intervals",
    )


def study(quick: bool = False) -> Study:
    """The study; `quick` is a slice of it."""
    protocol = QUICK if quick else Protocol()
    arms = ("ours", "lda") if quick else (*CLOSED, *GRADIENT)
    return by_protocol(
        protocol,
        {name: ARMS[name].title for name in arms},
        partial(make, quick=quick),
        name="beyond",
        tasks=tuple(STREAMS),
        settings={name: ARMS[name].settings[: 1 if quick else 6] for name in arms},
        judged="accuracy",
        page=page,
        page_name="continual_beyond",
        needs=("seconds", "accuracy"),
    )
