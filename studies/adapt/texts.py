"""The texts of the studies: what the base model knows, and what it is to learn."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nestling.adaptation import load_pretrained
from studies.harness.store import Store, key_of

BOOKS = (
    "moby_dick_or_the_whale",
    "dracula",
    "the_adventures_of_sherlock_holmes",
    "treasure_island",
    "emma",
    "the_war_of_the_worlds",
    "great_expectations",
    "the_picture_of_dorian_gray",
    "middlemarch",
    "wuthering_heights",
    "a_tale_of_two_cities",
    "the_count_of_monte_cristo",
    "adventures_of_huckleberry_finn",
    "crime_and_punishment",
    "war_and_peace",
    "david_copperfield",
    "pride_and_prejudice",
    "the_brothers_karamazov",
)
TUNING = (7, 6)  # books on which settings are chosen; never seeds

PARTS = (5, 8, 11, 14, 17, 6, 9, 12)
"""Twentieths of the grammar at which the seeds' parts begin."""


class Base(NamedTuple):
    """A pretrained model, its tokenizer, ids of the kind of text it knows, and what it is to learn.

    `text(base, data, number, count)` gives `count` tokens of text `number`.
    """

    model: Any
    tokenizer: Any
    old: Tensor  # held out, for measuring
    replay: Tensor  # other text of the same kind, for replay and Fisher information
    text: Callable[..., Tensor]


def stories(data: Path) -> Base:
    """stories260K, which knows TinyStories."""
    model, tokenizer = load_pretrained(data / "stories260k" / "stories260K.bin")
    model.requires_grad_(False)
    measured = _stories(tokenizer, data / "tinystories" / "stories_b_3118.txt.gz", 4096)
    replay = _stories(tokenizer, data / "tinystories" / "stories_a_3117.txt.gz", 16384)
    return Base(model, tokenizer, measured, replay, book)


def smollm2(path: Path, store: Store) -> Base:
    """SmolLM2-135M; what it knows is what it says: conversations sampled from the model itself.

    The loss on them is least for the model as it is, so forgetting shows whatever is learned.
    """
    model, tokenizer = load_pretrained(path)
    model.requires_grad_(False)
    said = store.get(key_of("smollm2 own text"), lambda: {"ids": _conversations(model, tokenizer)})[
        "ids"
    ]
    old, replay = (torch.tensor(said[i]).flatten() for i in (slice(4), slice(4, None)))
    return Base(model, tokenizer, old, replay, grammar)


@torch.no_grad()
def _conversations(model: Any, tokenizer: Any, rows: int = 16, length: int = 256) -> list[Any]:
    """[rows, length] tokens, sampled at temperature 1 from where a user begins to speak."""
    torch.manual_seed(0)
    begin = tokenizer("<|im_start|>user\n", add_special_tokens=False).input_ids
    ids = torch.tensor([begin] * rows)
    cache, said = None, [ids]
    while sum(part.shape[1] for part in said) < length:
        out = model(ids, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        ids = torch.multinomial(out.logits[:, -1].softmax(-1), 1)
        said.append(ids)
    return torch.cat(said, 1).tolist()


def _stories(tokenizer: Any, path: Path, count: int) -> Tensor:
    with gzip.open(path, "rt") as file:
        ids: list[int] = []
        for story in file.read().split("<|endoftext|>"):
            ids += tokenizer(story.strip()).input_ids
            if len(ids) >= count:
                break
    return torch.tensor(ids[:count])


@cache
def _book(data: Path, name: str) -> str:
    with gzip.open(data / "gutenberg_books" / f"{name}.txt.gz", "rt") as file:
        return file.read()


def book(base: Base, data: Path, seed: int, count: int) -> Tensor:
    """`count` tokens of the book with this number, from its middle on."""
    text = _book(data, BOOKS[seed % len(BOOKS)])
    middle = len(text) // 3
    ids = base.tokenizer(text[middle : middle + 8 * count], add_special_tokens=False).input_ids
    return torch.tensor(ids[:count])


def grammar(base: Base, data: Path, seed: int, count: int) -> Tensor:
    """`count` tokens of "A grammar of Kalamang" (LaTeX), another part for each seed."""
    with gzip.open(data / "kalamang" / "grammar_of_kalamang.tex.gz", "rt") as file:
        text = file.read()
    start = len(text) // 20 * PARTS[seed]
    ids = base.tokenizer(text[start : start + 8 * count], add_special_tokens=False).input_ids
    return torch.tensor(ids[:count])


def articles(base: Base, data: Path, seed: int, count: int) -> Tensor:
    """`count` tokens of WikiText-2, another part for each seed: far from stories and from books."""
    with gzip.open(data / "wikitext2" / "train.txt.gz", "rt") as file:
        text = file.read()
    start = len(text) // 16 * (seed % 16)
    ids = base.tokenizer(text[start : start + 8 * count], add_special_tokens=False).input_ids
    return torch.tensor(ids[:count])
