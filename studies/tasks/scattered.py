"""bAbI's stories to train on: facts among sentences of books, with many questions.

    draw = stories(data, ("qa1",))
    ids, targets, noise = draw(random.Random(0), stage)

A story is asked about again and again, all the people it has told of, so that a short sequence has
many answers. Stories of qa1 are made up without end, those of the other tasks are bAbI's training
stories with their names exchanged. What a stage may leave out makes the beginning easier: without
"to the", a short convolution sees who went where.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from nestling.evaluate import babilong
from nestling.evaluate.samples import sentences
from studies.tasks.long import Draw, Row, Stage, excerpts
from studies.tasks.vocabulary import Vocabulary, load

__all__ = ["Part", "stories"]

PEOPLE = ("Mary", "John", "Daniel", "Sandra")
PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
THINGS = ("apple", "football", "milk")
NAMES = (PEOPLE, PLACES, THINGS)
GIVERS = (("Bill", "Fred", "Jeff", "Mary"), *NAMES[1:])
MOVES = ("moved to", "went to", "journeyed to", "travelled to", "went back to")
OTHERS = ("he", "she", "they", "I", "who", "it")
SHORTEST = babilong.SHORTEST
TAIL = 6
"""Tokens of a prompt after its question mark."""
STILL = 0.15
"""The share of sequences without noise in every stage."""


class Part(NamedTuple):
    """Some facts, and questions after them with their answers."""

    facts: Sequence[str]
    asked: Sequence[tuple[str, str]]


def walk(rng: random.Random) -> Iterator[Part]:
    """A story of qa1 without end: people go to places, and are asked for."""
    at: dict[str, str] = {}
    while True:
        facts = []
        for _ in range(rng.choice((1, 1, 2, 2, 3, 4))):
            who, where = rng.choice(PEOPLE), rng.choice(PLACES)
            at[who] = where
            facts.append(f"{who} {rng.choice(MOVES)} the {where}.")
        asked = rng.sample(sorted(at), min(len(at), rng.randint(1, 3)))
        yield Part(facts, [(f"Where is {who}?", at[who]) for who in asked])


def _chains(told: Sequence[babilong.Story]) -> list[list[babilong.Story]]:
    """The questions of each story together: facts of one begin with those of the one before."""
    chains: list[list[babilong.Story]] = []
    for story in told:
        before = chains[-1][-1].facts if chains else None
        if before is not None and story.facts[: len(before)] == before:
            chains[-1].append(story)
        else:
            chains.append([story])
    return chains


def renamed(story: babilong.Story, names: Sequence[Sequence[str]], rng: random.Random) -> Any:
    """The story with its people, places and things exchanged among each other."""
    new: dict[str, str] = {}
    for group in names:
        new |= dict(zip(group, rng.sample(group, len(group)), strict=True))

    def said(text: str) -> str:
        return re.sub(r"\w+", lambda word: new.get(word[0], word[0]), text)

    return babilong.Story(tuple(map(said, story.facts)), said(story.question), said(story.answer))


def _told(folder: Path, task: str) -> Callable[[random.Random], Iterator[Part]]:
    """A task's training stories (10,000 questions, 1,000 of qa3) with other names."""
    chains = _chains(babilong.stories(folder, task, "train", "en" if task == "qa3" else "en-10k"))
    names = GIVERS if task == "qa5" else NAMES

    def tell(rng: random.Random) -> Iterator[Part]:
        same, seen = rng.getrandbits(48), 0
        for question in rng.choice(chains):
            story = renamed(question, names, random.Random(same))
            facts, seen = story.facts[seen:], len(story.facts)
            yield Part(facts, [(story.question, story.answer)])

    return tell


def shortened(fact: str, rng: random.Random) -> str:
    """A fact without "the", without "to the", or without its verb."""
    words = fact.split(" ")
    if "the" not in words[2:]:
        return fact
    at = words.index("the", 2)
    keep = rng.choice(((1, at), (1, 2), (at, at + 1)))
    return " ".join((words[0], *words[slice(*keep)], *words[at + 1 :]))


def near(sentence: Sequence[int], rng: random.Random, vocabulary: Vocabulary) -> list[int]:
    """A sentence of noise with pieces of facts in it, none of them whole and none side by side."""
    made = list(sentence)
    places = {vocabulary(f" {where}").input_ids[0] for where in PLACES}
    others = [token for token in sentence if token not in places] or list(sentence[:1])
    inside = range(1, len(sentence) - 1, 2)
    for at in sorted(rng.sample(inside, min(len(inside), rng.choice((1, 1, 2, 3)))), reverse=True):
        who, where, went = rng.choice(PEOPLE), rng.choice(PLACES), rng.choice(MOVES)
        before, after = rng.choice(
            (
                (f" {who}", ""),
                (f" the {where}", ""),
                (f" {went} the {where}", ""),
                (f" {rng.choice(OTHERS)} {went} the {where}.", ""),
                (f" {who} {went} the", "."),
                (f" {who}", f" the {where}"),
            )
        )
        piece = vocabulary(before).input_ids
        if after:
            something = rng.choices(others, k=rng.randint(1, 3))
            piece = [*piece, *something, *vocabulary(after).input_ids]
        made[at:at] = piece
    return made


@cache
def _sentences(data: Path) -> tuple[str, ...]:
    """Sentences of the books to train on."""
    books, vocabulary = excerpts(data), load()
    chosen = random.Random(0).sample(range(len(books.sources)), min(200, len(books.sources)))
    found = (" " + text for number in chosen for text in sentences(books.text(number)))
    return tuple(text for text in found if len(vocabulary(text).input_ids) > SHORTEST)


def _noise(rng: random.Random, stage: Stage, mean: float, data: Path) -> Iterator[list[int]]:
    """Sentences of books, of `mean` tokens together on average."""
    vocabulary, left = load(), int(rng.expovariate(1 / mean)) if mean else 0
    while left > 0:
        ids = vocabulary(rng.choice(_sentences(data))).input_ids
        if rng.random() < stage.near:
            ids = near(ids, rng, vocabulary)
        if len(ids) > left and rng.random() < 0.5:  # as the last sentence of a sample is cut
            ids = ids[:left]
        yield ids
        left -= len(ids)


def stories(data: Path, tasks: Sequence[str] = babilong.TASKS) -> Draw:
    """Stories of these tasks, one after another, among sentences of books."""
    vocabulary = load()
    tell = {task: walk if task == "qa1" else _told(data / "babi", task) for task in tasks}

    def ask(row: Row, part: Part, stage: Stage, rng: random.Random) -> None:
        prompt = rng.random() >= stage.bare
        if prompt:
            row.add(vocabulary("\n</context>").input_ids)
        for question, answer in part.asked:
            text = f"\nQuestion: {question}\nAnswer:" if prompt else f" {question}"
            ids = vocabulary(text).input_ids
            if prompt and rng.random() < stage.early:  # nearer to the name that is asked for
                ids = ids[: -rng.randint(1, TAIL)]
            row.add(ids)
            row.answer(vocabulary(" " + answer).input_ids)

    def draw(rng: random.Random, stage: Stage) -> Row:
        row = Row([], [], [])
        if rng.random() >= stage.bare:
            row.add(vocabulary("<context>\n").input_ids)
        mean = math.exp(rng.uniform(0, math.log(stage.noise))) if stage.noise else 0.0
        if rng.random() < STILL:
            mean = 0.0
        while len(row.ids) < stage.length:
            for part in tell[rng.choice(tuple(tell))](rng):
                for fact in part.facts:
                    for ids in _noise(rng, stage, mean, data):
                        row.add(ids, noise=True)
                    said = shortened(fact, rng) if rng.random() < stage.short else fact
                    row.add(vocabulary(" " + said).input_ids)
                for ids in _noise(rng, stage, mean, data):
                    row.add(ids, noise=True)
                ask(row, part, stage, rng)
                if len(row.ids) >= stage.length:
                    break
        return row.cut(stage.length)

    return draw
