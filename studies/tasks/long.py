"""Training on long texts: questions one after another, in stages, the same for any arm.

    batch = batches(needles(data, ("s1",)), plan, seed=0)
    ids, targets, noise = batch(step)

A sequence holds many questions, each followed by its answer; memories are carried from one to the
next. Only answers are learned, and that noise is not written down (`studies.tasks.quiet`). A stage
says how far facts are apart: first there is no noise, and facts and questions are short.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from nestling.evaluate import longhealth, ruler
from nestling.evaluate.samples import Books, Sample, Tokens, Words
from studies.harness.loop import Trained, cosine, train
from studies.harness.models import IGNORE
from studies.tasks.quiet import loudness, watched
from studies.tasks.vocabulary import END, PAD, Vocabulary, load, shelf

__all__ = [
    "Curriculum",
    "Draw",
    "Row",
    "Stage",
    "batches",
    "learn",
    "letters",
    "mixed",
    "needles",
    "spread",
]


class Row(NamedTuple):
    """Tokens, the token wanted after each (`IGNORE` where nothing is learned), which are noise."""

    ids: list[int]
    targets: list[int]
    noise: list[bool]

    def add(self, ids: Sequence[int], *, noise: bool = False) -> None:
        """Go on with these tokens, of which nothing is learned."""
        self.ids.extend(ids)
        self.targets.extend([IGNORE] * len(ids))
        self.noise.extend([noise] * len(ids))

    def answer(self, wanted: Sequence[int]) -> None:
        """Go on with these tokens and the end, all of which are learned."""
        self.targets[-1] = wanted[0]
        self.add((*wanted, END))
        self.targets[-len(wanted) - 1 : -1] = [*wanted[1:], END]

    def cut(self, length: int) -> Row:
        """Exactly so many tokens of it, with padding at the end."""
        ids, targets, noise = (part[:length] for part in self)
        missing = length - len(ids)
        return Row(ids + [PAD] * missing, targets + [IGNORE] * missing, noise + [False] * missing)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of the training. until: its end as a share of the steps; length: of a sequence.

    noise: tokens between two facts, at most on average (0: none; sequences differ).
    short: share of facts in which words are left out; bare: of questions without the prompt.
    early: share of prompts after which the answer comes before "Answer:", anywhere in it.
    related: share of sentences of noise that name a person, place or thing of the stories.
    near: share of sentences of noise with pieces of facts in them, none whole.
    quiet: weight of what memories write of noise, beside the loss of the answers.
    """

    until: float
    length: int
    noise: int = 0
    short: float = 0.0
    bare: float = 0.0
    early: float = 0.0
    related: float = 0.0
    near: float = 0.0
    quiet: float = 0.0


Draw = Callable[[random.Random, Stage], Row]
"""A sequence of a stage's length."""


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """The same for every arm. embeddings: the standard deviation with which they start."""

    steps: int
    tokens: int = 4096  # of a step
    stages: tuple[Stage, ...]
    embeddings: float = 0.5
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.98)

    def part(self, share: float) -> Curriculum:
        """All stages in a share of the steps."""
        return replace(self, steps=max(2, round(share * self.steps)))

    def stage(self, step: int) -> Stage:
        """What is learned at a step."""
        return next(stage for stage in self.stages if step < stage.until * self.steps)


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


def batches(
    draw: Draw, plan: Curriculum, seed: int
) -> Callable[[int], tuple[Tensor, Tensor, Tensor]]:
    """Step -> tokens, targets and noise [rows, length]; the same for the same seed."""

    def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
        rng = random.Random(1_000_003 * (seed + 1) + step)
        stage = plan.stage(step)
        rows = [draw(rng, stage) for _ in range(max(1, plan.tokens // stage.length))]
        ids, targets, noise = (torch.tensor(part) for part in zip(*rows, strict=True))
        return ids, targets, noise

    return batch


def learn(
    model: Any, draw: Draw, plan: Curriculum, *, rate: float, seed: int, save: Path | None
) -> Trained:
    """Train a fresh model, or one that was trained before, on the answers."""
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
        ids, targets, noise = batch(step)
        if model.learns_now:  # levels learn from the text, training from the answers
            made: Tensor = model(input_ids=ids, shift_labels=targets, use_cache=False).loss
            return made
        seen()
        read = model.model(input_ids=ids, use_cache=False).last_hidden_state
        asked = targets != IGNORE
        wrong = cross_entropy(model.lm_head(read[asked]), targets[asked])
        quiet = plan.stage(step).quiet
        return wrong + quiet * loudness(seen(), noise) if quiet else wrong

    model.train()
    schedule = cosine(warm=min(50, plan.steps // 4), end=0.05)
    with watched(model) as seen:
        return train([model], loss, optimizer, steps=plan.steps, schedule=schedule, save=save)


def spread(model: Any, plan: Curriculum) -> Any:
    """The untrained model with embeddings as far apart as the curriculum says."""
    if plan.embeddings:
        torch.nn.init.normal_(model.get_input_embeddings().weight, std=plan.embeddings)
    return model


def _append(row: Row, made: Sample, answer: str, vocabulary: Vocabulary) -> None:
    """A sample and its answer; all but the first and last piece and the needles are noise."""
    pieces = [vocabulary(text).input_ids for text in made.pieces()]
    told = ["special magic" in text for text in made.pieces()]
    for ids, needle in zip(pieces, told, strict=True):
        row.add(ids, noise=not needle)
    row.add(vocabulary(made.question + made.prefix).input_ids)
    row.answer(vocabulary(answer).input_ids)


# RULER's needles


def needles(data: Path, tasks: Sequence[str]) -> Draw:
    """Needle tasks one after another, each in a haystack of its own."""
    words, books, vocabulary = Words.load(data / "ruler_words"), excerpts(data), load()
    tokens = Tokens(vocabulary)

    def draw(rng: random.Random, stage: Stage) -> Row:
        row, length = Row([], [], []), stage.length
        while len(row.ids) < length:
            task, left = rng.choice(tuple(tasks)), length - len(row.ids)
            essay = Books(tuple(rng.sample(books.sources, 3)))
            room = max(SHORTEST[task], int(left * rng.random()))
            made = ruler.sample(
                task, room, rng.getrandbits(48), words=words, books=essay, tokens=tokens
            )
            _append(row, made, f" {', '.join(made.answers)}.", vocabulary)
        return row.cut(length)

    return draw


def letters(data: Path) -> Draw:
    """Patients' letters and a question about them, one patient after another."""
    del data  # they are made up
    vocabulary = load()

    def draw(rng: random.Random, stage: Stage) -> Row:
        row, length = Row([], [], []), stage.length
        while len(row.ids) < length:
            room = max(LETTERS, int((length - len(row.ids)) * rng.random()))
            made = longhealth.sample(room, rng.getrandbits(48), tokens=Tokens(vocabulary))
            _append(row, made, f" {made.answers[0]}", vocabulary)
        return row.cut(length)

    return draw


def mixed(draws: Sequence[Draw]) -> Draw:
    """A sequence of one of these kinds."""
    return lambda rng, stage: rng.choice(draws)(rng, stage)


LETTERS = 1100
"""Tokens in which a patient's letters surely fit."""
SHORTEST = dict(zip(ruler.NEEDLES, (320, 320, 380, 420, 380, 640, 420, 480), strict=True))
"""Tokens in which a needle task surely fits, room to answer (128) included."""
