"""Bytes of books and articles to train on, and what language models are asked afterwards.

`corpus(data)` reads 13 novels and WikiText-2; three other novels and WikiText-2's validation part
are held out, and two novels (`DEVELOPMENT`) are for choosing settings. Last words (LAMBADA) and
choices between continuations (Table 2) come from `lm_evals`.
"""

from __future__ import annotations

import bz2
import gzip
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from nestling.models import MemoryCache

__all__ = [
    "CHOICES",
    "DEVELOPMENT",
    "HELD_OUT",
    "Corpus",
    "books",
    "by_position",
    "choices",
    "corpus",
    "joined",
    "last_words",
    "novels",
    "read_on",
    "validate",
    "windows",
]

HELD_OUT = ("emma", "the_war_of_the_worlds", "great_expectations")
DEVELOPMENT = ("treasure_island", "the_picture_of_dorian_gray")
"""Books on which settings may be chosen: neither trained on nor in a table."""
CHOICES = ("piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "siqa_3way", "boolq")
"""Table 2's tasks that are staged; models of a million parameters are at chance on most."""


class Corpus(NamedTuple):
    """Bytes to train on and bytes held out."""

    train: Tensor  # [N] uint8
    valid: Tensor


@cache
def novels(data: Path) -> dict[str, bytes]:
    """Every novel by its name, in the order of the names."""
    paths = sorted((data / "gutenberg_books").glob("*.txt.gz"))
    if not paths:
        raise FileNotFoundError(f"{data / 'gutenberg_books'}: no books there; see --data")
    return {path.name.split(".")[0]: gzip.decompress(path.read_bytes()) for path in paths}


def joined(texts: Iterable[bytes]) -> Tensor:
    """Texts one after the other: [N] uint8."""
    return torch.frombuffer(bytearray(b"\n\n".join(texts)), dtype=torch.uint8)


@cache
def corpus(data: Path) -> Corpus:
    """Books and articles; the same bytes everywhere."""
    wiki = data / "wikitext2"
    parts: list[list[bytes]] = [[], []]
    for name, novel in novels(data).items():
        if name not in DEVELOPMENT:
            parts[name in HELD_OUT].append(novel)
    for part, file in zip(parts, ("train.txt.gz", "valid.txt.gz"), strict=True):
        part.append(gzip.decompress((wiki / file).read_bytes()))
    return Corpus(*map(joined, parts))


@cache
def books(data: Path) -> Tensor:
    """The bytes of the held-out books alone."""
    found = novels(data)
    return joined(found[name] for name in HELD_OUT)


def windows(data: Tensor, count: int, length: int, seed: int) -> Tensor:
    """Windows of `length + 1` bytes from random places, [count, length + 1]."""
    flow = torch.Generator().manual_seed(seed)
    first = torch.randint(len(data) - length - 1, (count,), generator=flow)
    return data[first[:, None] + torch.arange(length + 1)].long()


@torch.no_grad()
def validate(model: Any, data: Tensor, *, count: int, length: int) -> float:
    """The mean loss in nats per byte over windows of the trained length."""
    losses = []
    for ids in windows(data, count, length, seed=7).split(8):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        losses.append(cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item())
    return sum(losses) / len(losses)


@torch.no_grad()
def by_position(
    model: Any,
    data: Tensor,
    *,
    streams: int,
    length: int,
    times: int,
    seed: int = 8,
    learn: bool | Sequence[str] = True,
) -> list[float]:
    """The loss of streams beyond the trained length, one value for every `length` bytes.

    learn: which levels learn while they read, in a model whose levels do.
    """
    ids = windows(data, streams, times * length, seed=seed)
    cache, losses = MemoryCache(model.config.num_hidden_layers), []
    for start in range(0, times * length, length):
        piece = ids[:, start : start + length + 1]
        losses.append(read_on(model, piece, cache, learn=learn))
    return losses


@torch.no_grad()
def read_on(
    model: Any, ids: Tensor, cache: MemoryCache, *, learn: bool | Sequence[str] = True
) -> float:
    """Read all of ids [B, T] but the last, from the cache on; the mean loss of what follows."""
    logits = model(ids[:, :-1], past_key_values=cache, use_cache=True, learn=learn).logits
    return float(cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))


@torch.no_grad()
def _scored(model: Any, context: str, ending: str, room: int = 512) -> tuple[float, bool]:
    """The mean loss of the ending's bytes after the context, and whether each was the likeliest."""
    before, after = context.encode(), ending.encode()
    ids = torch.tensor([list((before + after)[-room:])])
    size = min(len(after), ids.shape[1] - 1)
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0, -size:].float()
    wanted = ids[0, -size:]
    right = bool((logits.argmax(-1) == wanted).all())
    return cross_entropy(logits, wanted).item(), right


def last_words(model: Any, data: Path, count: int) -> dict[str, float]:
    """LAMBADA: the share of last words that are written rightly byte by byte, and their loss."""
    scores = [
        _scored(model, line["context"], " " + line["continuation"])
        for line in _picked(_lines(data / "lm_evals" / "lambada_openai.jsonl.gz"), count)
    ]
    return {
        "last words": sum(right for _, right in scores) / len(scores),
        "last words loss": sum(loss for loss, _ in scores) / len(scores),
    }


def choices(model: Any, data: Path, count: int) -> dict[str, float]:
    """The share of right choices in each set of `CHOICES`, by the mean loss of a byte."""
    found = {}
    for name in CHOICES:
        right = 0
        asked = _picked(_asked(data / "lm_evals", name), count)
        for pairs, gold in asked:
            losses = [_scored(model, context, " " + ending)[0] for context, ending in pairs]
            right += losses.index(min(losses)) == gold
        found[name] = right / len(asked)
    return found


def _asked(folder: Path, name: str) -> list[tuple[list[tuple[str, str]], int]]:
    """Pairs (context, ending) to choose from, and the number of the right one."""
    if name == "hellaswag":
        lines = bz2.decompress((folder / "hellaswag_val_full.txt.bz2").read_bytes()).decode()
        rows = lines.splitlines()
        return [
            ([(rows[i], ending) for ending in rows[i + 2 : i + 6]], int(rows[i + 1]))
            for i in range(0, len(rows) - 5, 6)
        ]
    made = []
    for line in _lines(folder / f"{name}.jsonl.gz"):
        if "context_options" in line:
            pairs = [(context, line["continuation"]) for context in line["context_options"]]
        else:
            pairs = [(line["query"], ending) for ending in line["choices"]]
        made.append((pairs, int(line["gold"])))
    return made


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def _picked(items: Any, count: int) -> list[Any]:
    """A sample that is the same for every model."""
    made = list(items)
    return random.Random(0).sample(made, min(count, len(made)))
