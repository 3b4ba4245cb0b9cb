"""Training on long texts: sequences of questions one after another, lengths in stages, any arm.

    batch = batches(stories(data), Curriculum(), seed=0)
    ids, targets = batch(step)

A sequence holds several samples of a suite, each followed by its answer; memories are carried from
one to the next. Only answers are learned. Samples of the later stages are further apart.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from nestling.evaluate import babilong, longhealth, ruler
from nestling.evaluate.samples import Books, Sample, Tokens, Words
from studies.harness.loop import Trained, cosine, train
from studies.harness.models import IGNORE
from studies.tasks.vocabulary import END, PAD, Vocabulary, load, shelf

__all__ = [
    "Curriculum",
    "Draw",
    "Row",
    "batches",
    "learn",
    "letters",
    "mixed",
    "needles",
    "stories",
]

Row = tuple[list[int], list[int]]
"""Tokens, and the token wanted after each (`IGNORE` where nothing is learned)."""
Draw = Callable[[random.Random, int], Row]
"""A sequence of so many tokens."""


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """The same for every arm. stages: (until which share of the steps, length in tokens)."""

    steps: int = 1200
    tokens: int = 4096  # of a step
    stages: tuple[tuple[float, int], ...] = (
        (0.4, 256),
        (0.6, 512),
        (0.75, 1024),
        (0.9, 2048),
        (1.0, 4096),
    )
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.95)

    def part(self, share: float) -> Curriculum:
        """All stages in a share of the steps."""
        return replace(self, steps=max(2, round(share * self.steps)))

    def length(self, step: int) -> int:
        """Tokens of a sequence at a step."""
        return next(size for until, size in self.stages if step < until * self.steps)


@cache
def excerpts(data: Path, letters: int = 20_000) -> Books:
    """The books to train on, in parts that are quick to open."""
    whole = Books(tuple(shelf(data, held_out=False)))
    texts = [whole.text(number) for number in range(len(whole.sources))]
    return Books(
        tuple(
            _given(text[at : at + letters]) for text in texts for at in range(0, len(text), letters)
        )
    )


def _given(text: str) -> Callable[[], str]:
    return lambda: text


def batches(draw: Draw, plan: Curriculum, seed: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Step -> tokens and targets [rows, length]; the same for the same seed."""

    def batch(step: int) -> tuple[Tensor, Tensor]:
        rng = random.Random(1_000_003 * (seed + 1) + step)
        length = plan.length(step)
        rows = [draw(rng, length) for _ in range(max(1, plan.tokens // length))]
        ids, targets = zip(*rows, strict=True)
        return torch.tensor(ids), torch.tensor(targets)

    return batch


def learn(
    model: Any, draw: Draw, plan: Curriculum, *, rate: float, seed: int, save: Path | None
) -> Trained:
    """Train on the answers."""
    batch = batches(draw, plan, seed)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1]},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=rate,
        betas=plan.betas,
        weight_decay=plan.weight_decay,
    )

    def loss(step: int) -> Tensor:
        ids, targets = batch(step)
        if model.learns_now:  # levels learn from the text, training from the answers
            made: Tensor = model(input_ids=ids, shift_labels=targets, use_cache=False).loss
            return made
        read = model.model(input_ids=ids, use_cache=False).last_hidden_state
        asked = targets != IGNORE
        return cross_entropy(model.lm_head(read[asked]), targets[asked])

    model.train()
    return train([model], loss, optimizer, steps=plan.steps, schedule=cosine(end=0.02), save=save)


def _append(row: Row, made: Sample, answer: str, vocabulary: Vocabulary) -> None:
    """A sample and its answer; the answer's tokens, and the end after it, are learned."""
    ids, targets = row
    for text in made.stream():
        some = vocabulary(text).input_ids
        ids += some
        targets += [IGNORE] * len(some)
    wanted = [*vocabulary(answer).input_ids, END]
    targets[-1] = wanted[0]
    ids += wanted
    targets += [*wanted[1:], IGNORE]


def _cut(row: Row, length: int) -> Row:
    ids, targets = (part[:length] for part in row)
    missing = length - len(ids)
    return ids + [PAD] * missing, targets + [IGNORE] * missing


# bAbI's stories among books

NAMES = (
    ("Mary", "John", "Daniel", "Sandra"),
    ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office"),
    ("apple", "football", "milk"),
)
GIVERS = (("Bill", "Fred", "Jeff", "Mary"), *NAMES[1:])


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


def stories(data: Path, tasks: Sequence[str] = babilong.TASKS) -> Draw:
    """Questions of training stories with the facts since the last one among sentences of books.

    The training stories of bAbI (10,000 questions each, 1,000 of qa3), with their names exchanged.
    """
    folder, books, vocabulary = data / "babi", excerpts(data), load()
    tokens = Tokens(vocabulary)
    told = {
        task: _chains(babilong.stories(folder, task, "train", "en" if task == "qa3" else "en-10k"))
        for task in tasks
    }

    def draw(rng: random.Random, length: int) -> Row:
        row: Row = ([], [])
        while len(row[0]) < length:
            task = rng.choice(tuple(told))
            names = GIVERS if task == "qa5" else NAMES
            same = rng.getrandbits(48)
            seen = 0
            for question in rng.choice(told[task]):
                if rng.random() < 0.5:
                    continue
                story = renamed(question, names, random.Random(same))
                part, seen = story._replace(facts=story.facts[seen:]), len(story.facts)
                made = babilong.sample(
                    task, _room(rng, part, length - len(row[0]), tokens), rng.getrandbits(48),
                    story=part, books=books, tokens=tokens,
                )  # fmt: skip
                _append(row, made, " " + story.answer, vocabulary)
                if len(row[0]) >= length:
                    break
        return _cut(row, length)

    return draw


def _room(rng: random.Random, story: babilong.Story, left: int, tokens: Tokens) -> int:
    """A sample's length: often the facts alone, otherwise some background within what is left."""
    least = max(
        8 * (len(story.facts) + 1), sum(tokens.count(" " + fact) for fact in story.facts) + 12
    )
    room = int(left * rng.random() ** 2)
    return 0 if rng.random() < 0.25 or room <= least else babilong.RESERVED + room


# RULER's needles


def needles(data: Path, tasks: Sequence[str]) -> Draw:
    """Needle tasks one after another, each in a haystack of its own."""
    words, books, vocabulary = Words.load(data / "ruler_words"), excerpts(data), load()
    tokens = Tokens(vocabulary)

    def draw(rng: random.Random, length: int) -> Row:
        row: Row = ([], [])
        while len(row[0]) < length:
            task, left = rng.choice(tuple(tasks)), length - len(row[0])
            essay = Books(tuple(rng.sample(books.sources, 3)))
            room = max(SHORTEST[task], int(left * rng.random()))
            made = ruler.sample(
                task, room, rng.getrandbits(48), words=words, books=essay, tokens=tokens
            )
            _append(row, made, f" {', '.join(made.answers)}.", vocabulary)
        return _cut(row, length)

    return draw


def letters(data: Path) -> Draw:
    """Patients' letters and a question about them, one patient after another."""
    del data  # they are made up
    vocabulary = load()

    def draw(rng: random.Random, length: int) -> Row:
        row: Row = ([], [])
        while len(row[0]) < length:
            room = max(LETTERS, int((length - len(row[0])) * rng.random()))
            made = longhealth.sample(room, rng.getrandbits(48), tokens=Tokens(vocabulary))
            _append(row, made, f" {made.answers[0]}", vocabulary)
        return _cut(row, length)

    return draw


def mixed(draws: Sequence[Draw]) -> Draw:
    """A sequence of one of these kinds."""
    return lambda rng, length: rng.choice(draws)(rng, length)


LETTERS = 1100
"""Tokens in which a patient's letters surely fit."""
SHORTEST = dict(zip(ruler.NEEDLES, (320, 320, 380, 420, 380, 640, 420, 480), strict=True))
"""Tokens in which a needle task surely fits, room to answer (128) included."""
