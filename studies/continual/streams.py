"""Class-incremental streams of labelled text, with a split that tuning may see and one it may not.

A data set has three splits. Methods learn from `train`. Settings are chosen on `valid`, which is
held out from the training data; `test` is read once, for the final numbers. The order of the
classes, and with it the tasks, is drawn from the seed.
"""

from __future__ import annotations

import csv
import gzip
import json
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

__all__ = ["STREAMS", "Dataset", "Split", "class_order", "load", "shuffled_labels", "sliced"]

_SPLIT_SEED = 20_25  # fixes which examples are held out; not the seed of a run


@dataclass(frozen=True, kw_only=True)
class Split:
    """Texts and the number of the class of each."""

    texts: tuple[str, ...]
    labels: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.texts) != len(self.labels):
            raise ValueError(f"{len(self.texts)} texts but {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A classification problem cut into tasks of classes; `classes` are readable label texts."""

    name: str
    classes: tuple[str, ...]
    tasks: int
    train: Split
    valid: Split
    test: Split

    def __post_init__(self) -> None:
        if not 1 <= self.tasks <= len(self.classes):
            raise ValueError(
                f"{self.name}: tasks must be between 1 and {len(self.classes)}, the number of"
                f" classes; got {self.tasks}"
            )


def class_order(dataset: Dataset, seed: int) -> tuple[tuple[int, ...], ...]:
    """The classes of each task, in an order drawn from the seed."""
    order = list(range(len(dataset.classes)))
    random.Random(seed).shuffle(order)
    size, extra = divmod(len(order), dataset.tasks)
    tasks, begin = [], 0
    for task in range(dataset.tasks):
        end = begin + size + (task < extra)
        tasks.append(tuple(order[begin:end]))
        begin = end
    return tuple(tasks)


def load(name: str, data: Path) -> Dataset:
    """The stream of this name, read from a folder of data sets."""
    if name not in STREAMS:
        raise ValueError(f"unknown stream {name!r}; known: {', '.join(STREAMS)}")
    return STREAMS[name](data)


def sliced(dataset: Dataset, *, classes: int, tasks: int, per_class: int) -> Dataset:
    """The first classes and a few examples of each: what a quick run or a test uses."""
    if not 1 <= classes <= len(dataset.classes):
        raise ValueError(f"classes must be 1 to {len(dataset.classes)}; got {classes}")

    def cut(split: Split) -> Split:
        kept = _take(zip(split.texts, split.labels, strict=True), lambda c: per_class)[0]
        return _split([(text, label) for text, label in kept if label < classes])

    return replace(
        dataset,
        classes=dataset.classes[:classes],
        tasks=tasks,
        train=cut(dataset.train),
        valid=cut(dataset.valid),
        test=cut(dataset.test),
    )


def shuffled_labels(dataset: Dataset, seed: int) -> Dataset:
    """The same texts with training labels that mean nothing: every method must fall to chance."""
    labels = list(dataset.train.labels)
    random.Random(seed).shuffle(labels)
    return replace(dataset, train=replace(dataset.train, labels=tuple(labels)))


Pair = tuple[str, int]


def _split(pairs: Sequence[Pair]) -> Split:
    return Split(texts=tuple(t for t, _ in pairs), labels=tuple(c for _, c in pairs))


def _take(pairs: Iterable[Pair], count: Callable[[int], int]) -> tuple[list[Pair], list[Pair]]:
    """The first `count(number in the class)`... of each class, and the rest."""
    groups: dict[int, list[Pair]] = defaultdict(list)
    for pair in pairs:
        groups[pair[1]].append(pair)
    taken, rest = [], []
    for label in sorted(groups):
        cut = count(len(groups[label]))
        taken += groups[label][:cut]
        rest += groups[label][cut:]
    return taken, rest


def _mixed(pairs: list[Pair]) -> list[Pair]:
    random.Random(_SPLIT_SEED).shuffle(pairs)
    return pairs


def _readable(label: str) -> str:
    """`card_arrival`, `EducationalInstitution` -> lower-case words."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", label.replace("_", " "))
    return re.sub(r"[?!]", "", spaced).lower().strip()


def _need(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; --data names the folder of the data sets")
    return path


def _clinc150(data: Path) -> Dataset:
    """15 tasks of 10 intents; 100 / 20 / 30 examples of each, as published."""
    splits = json.loads(_need(data / "clinc150" / "data_full.json").read_text(encoding="utf-8"))
    names = sorted({label for _, label in splits["train"]})
    number = {label: i for i, label in enumerate(names)}
    made = {
        ours: _split([(text, number[label]) for text, label in splits[theirs]])
        for ours, theirs in (("train", "train"), ("valid", "val"), ("test", "test"))
    }
    return Dataset(name="clinc150", classes=tuple(map(_readable, names)), tasks=15, **made)


def _banking77(data: Path) -> Dataset:
    """7 tasks of 11 intents; 15% of the training data of each class is held out."""
    folder = data / "banking77"
    names = json.loads(_need(folder / "categories.json").read_text(encoding="utf-8"))
    number = {label: i for i, label in enumerate(names)}

    def read(file: str) -> list[Pair]:
        with open(_need(folder / file), encoding="utf-8", newline="") as rows:
            return [(row["text"], number[row["category"]]) for row in csv.DictReader(rows)]

    valid, train = _take(_mixed(read("train.csv")), lambda n: max(1, n * 15 // 100))
    return Dataset(
        name="banking77",
        classes=tuple(map(_readable, names)),
        tasks=7,
        train=_split(train),
        valid=_split(valid),
        test=_split(read("test.csv")),
    )


def _dbpedia70(data: Path) -> Dataset:
    """7 tasks of 10 topics; 10,000 / 1,000 / 1,000 articles, very uneven classes."""
    path = _need(data / "dbpedia_classes70" / "dbpedia_classes70.csv.gz")
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        rows = [(row["text"], row["l2"]) for row in csv.DictReader(file)]
    names = sorted({label for _, label in rows})
    number = {label: i for i, label in enumerate(names)}
    pairs = _mixed([(text, number[label]) for text, label in rows])
    total = len(pairs)
    test, rest = _take(pairs, lambda n: max(1, round(n * 1000 / total)))
    valid, rest = _take(rest, lambda n: max(1, round(n * 1000 / len(rest))))
    return Dataset(
        name="dbpedia70",
        classes=tuple(map(_readable, names)),
        tasks=7,
        train=_split(_mixed(rest)[:10_000]),
        valid=_split(valid),
        test=_split(test),
    )


def _dbpedia14(data: Path) -> Dataset:
    """7 tasks of 2 topics; words in lower case, as the two samples were tokenised differently."""
    folder = data / "dbpedia14"
    names = _need(folder / "classes.txt").read_text(encoding="utf-8").split()
    with gzip.open(_need(folder / "keaml_train_14000.csv.gz"), "rt", newline="") as file:
        rows = [(_words(text), int(label)) for label, text in list(csv.reader(file))]
    number = {_readable(name).replace(" ", ""): i for i, name in enumerate(names)}
    with gzip.open(_need(folder / "test.json.gz"), "rt", encoding="utf-8") as file:
        entries = json.load(file)
    test = [
        (_words(e["sentence"].partition("Text:")[2]), number[e["label"].lower().replace(" ", "")])
        for e in entries
    ]
    valid, train = _take(_mixed(rows), lambda n: n // 10)
    return Dataset(
        name="dbpedia14",
        classes=tuple(map(_readable, names)),
        tasks=7,
        train=_split(train),
        valid=_split(valid),
        test=_split(_take(_mixed(test), lambda n: 100)[0]),
    )


def _words(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


STREAMS: dict[str, Callable[[Path], Dataset]] = {
    "clinc150": _clinc150,
    "banking77": _banking77,
    "dbpedia70": _dbpedia70,
    "dbpedia14": _dbpedia14,
}
"""Streams by name."""
