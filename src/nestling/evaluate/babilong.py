"""BABILong (Kuratov et al. 2024): facts of a bAbI story scattered over books, of any length.

A sample is one question of a story; its facts are all sentences before the question. They keep
their order and stand at random places between the sentences of a background text that starts
somewhere in a random book. Background and facts together take the length minus 300 tokens; the rest
is for the question and whatever a prompt adds.
"""

from __future__ import annotations

import io
import json
import random
import zipfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from nestling.checks import one_of
from nestling.evaluate.samples import BYTES, Books, Sample, Tokens, scatter

__all__ = ["LABELS", "TASKS", "Story", "chosen", "fitting", "parse", "sample", "score", "stories"]

_PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
LABELS = {
    **{f"qa{number}": _PLACES for number in range(1, 5)},
    "qa5": ("Bill", "Fred", "Jeff", "Mary", "apple", "football", "milk"),
}
"""The answers each task can have."""

TASKS = tuple(LABELS)
RESERVED = 300
"""Tokens of a length that are not for facts and background."""
SHORTEST = 10
"""Background sentences of fewer tokens are skipped."""


class Story(NamedTuple):
    """The facts before a question, in order, and its answer."""

    facts: tuple[str, ...]
    question: str
    answer: str


@lru_cache(maxsize=16)
def stories(
    folder: str | Path, task: str, split: str = "test", part: str = "en"
) -> tuple[Story, ...]:
    """All questions of a bAbI task: from `babi_v1-2_en.zip`, or from its text files in a folder.

    part: the folder inside the zip file; `en-10k` has ten times the training stories of `en`.
    """
    one_of("task", task, TASKS)
    name = f"{task}_*_{split}.txt"
    for path in sorted(Path(folder).glob("*.zip")):
        with zipfile.ZipFile(path) as archive:
            for member in sorted(archive.namelist()):
                if Path(member).match(f"{part}/{name}"):
                    return tuple(parse(io.TextIOWrapper(archive.open(member), "utf-8").read()))
    found = sorted(Path(folder).rglob(name))
    if not found:
        raise ValueError(f"{folder}: no {name} here, and no zip file of bAbI that holds it")
    return tuple(parse(found[0].read_text()))


def parse(text: str) -> Iterator[Story]:
    """The questions in a bAbI file: numbered lines; the numbers start again with each story."""
    facts: list[str] = []
    for line in text.splitlines():
        number, _, rest = line.partition(" ")
        if number == "1":
            facts = []
        question, *answer = rest.split("\t")
        if answer:
            yield Story(tuple(facts), question.strip(), answer[0].strip())
        elif rest.strip():
            facts.append(rest.strip())


def chosen(folder: str | Path, task: str) -> tuple[int, ...] | None:
    """The hundred questions the benchmark uses of a task, where its list lies in the folder."""
    path = Path(folder, "babilong_test_100_idxs.json")
    return tuple(json.loads(path.read_text())[task]) if path.is_file() else None


def fitting(given: tuple[Story, ...], length: int) -> tuple[Story, ...]:
    """The stories with few enough lines for a length (0: all of them)."""
    if not length:
        return given
    most = (length - RESERVED) // 8
    return tuple(story for story in given if len(story.facts) + 1 <= most)


def sample(
    task: str, length: int, seed: int, *, story: Story, books: Books, tokens: Tokens = BYTES
) -> Sample:
    """A story's question with its facts scattered over `length` tokens (0: the facts alone)."""
    budget = length - RESERVED
    room = budget - sum(tokens.count(" " + fact) for fact in story.facts)
    if length and (room < 0 or len(story.facts) + 1 > budget // 8):
        raise ValueError(
            f"{task}: a story of {len(story.facts)} facts does not fit in {length} tokens"
        )
    rng = random.Random(f"{task} {seed}")
    place = rng.random()

    def background() -> Iterator[str]:
        return _background(books, random.Random(place), room, tokens) if length else iter(())

    gaps = sum(1 for _ in background()) + 1
    places = sorted(rng.randrange(gaps) for _ in story.facts)

    def pieces() -> Iterator[str]:
        facts = (" " + fact for fact in story.facts)
        text = scatter(background(), zip(places, facts, strict=True))
        yield "<context>\n" + next(text, "").lstrip()
        yield from text

    return Sample(
        task=task,
        length=length,
        pieces=pieces,
        question=f"\n</context>\nQuestion: {story.question}",
        prefix="\nAnswer:",
        answers=(story.answer,),
        labels=LABELS[task],
        answer_tokens=16,
    )


def _background(books: Books, rng: random.Random, room: int, tokens: Tokens) -> Iterator[str]:
    """Sentences of exactly `room` tokens, the last one cut."""
    for sentence in books.background(rng):
        if room <= 0:
            return
        size = tokens.count(text := " " + sentence)
        if size - tokens.count(" ") < SHORTEST:
            continue
        yield text if size <= room else tokens.cut(text, room)
        room -= size


def score(given: Sample, output: str) -> float:
    """1 if the first sentence of the output names the answer and no other label.

    Labels that the question names do not count.
    """
    said = output.lower().split(".")[0]
    asked = given.question.lower()
    labels = {label.lower() for label in given.labels}
    named = {label for label in labels if label in said and label not in asked}
    return float(named == {given.answers[0].lower()})
