"""Formal languages of Table 5: can a model track state, and count, beyond the lengths it saw?

Six languages; every position of a string has a target, and a string counts only if all are right.
Strings of `parity`, `(aa)*` and `(abab)*` carry "is the prefix in the language"; `a^n b^n` and
`a^n b^n c^n` carry what may come next; `shuffle-2` (two interleaved bracket languages) carries
which closing brackets are allowed. Strings are drawn as in Bhattamishra et al. 2020: lengths 2-50
for training and bin 0, above 50 to 100 for bin 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "BIN0",
    "BIN1",
    "IGNORE",
    "LANGUAGES",
    "Language",
    "Merged",
    "Strings",
    "merge",
    "score",
    "strings",
]

BIN0, BIN1 = (2, 50), (51, 100)
"""Lengths of the training strings and the first test bin, and of the second test bin."""

IGNORE = -100
Sample = tuple[list[int], list[int]]
Draw = Callable[[np.random.Generator, int, int], Sample]


@dataclass(frozen=True, kw_only=True)
class Language:
    """A language: its symbols, its target classes and how to draw one string with its targets."""

    name: str
    symbols: int
    classes: int
    draw: Draw


@dataclass(frozen=True, kw_only=True)
class Strings:
    """Strings of one language, filled up on the right: `targets` there are -100."""

    tokens: Tensor  # [N, T] long
    targets: Tensor  # [N, T] long

    def __len__(self) -> int:
        return self.tokens.shape[0]


def strings(language: Language, count: int, lengths: tuple[int, int], seed: int) -> Strings:
    """Draw `count` strings with lengths in the window (both ends included)."""
    rng = np.random.default_rng(seed)
    drawn = [language.draw(rng, *lengths) for _ in range(count)]
    longest = max(len(tokens) for tokens, _ in drawn)
    tokens = torch.zeros(count, longest, dtype=torch.long)
    targets = torch.full((count, longest), IGNORE)
    for row, (symbols, wanted) in enumerate(drawn):
        tokens[row, : len(symbols)] = torch.tensor(symbols)
        targets[row, : len(wanted)] = torch.tensor(wanted)
    return Strings(tokens=tokens, targets=targets)


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The distinct strings of a set, for causal models: what begins another string is part of it.

    `weight` counts the strings that have this position, so that weighted sums over the merged
    positions equal sums over all; `row` says where each string went.
    """

    tokens: Tensor  # [R, T] long
    targets: Tensor  # [R, T] long
    weight: Tensor  # [R, T] float
    row: Tensor  # [N] long


def merge(given: Strings) -> Merged:
    """Join strings that begin others: ten thousand strings of `(aa)*` are one.

    Right for causal models only, and where a prefix has the targets it has in every longer string.
    """
    sizes = (given.targets != IGNORE).sum(1).tolist()
    rows = [tuple(t[:n]) for t, n in zip(given.tokens.tolist(), sizes, strict=True)]
    order = sorted(range(len(rows)), key=rows.__getitem__, reverse=True)
    heads: list[int] = []  # the longest string of each group
    place = torch.empty(len(rows), dtype=torch.long)
    for i in order:  # what begins with a string stands right before it
        if not heads or rows[heads[-1]][: len(rows[i])] != rows[i]:
            heads.append(i)
        place[i] = len(heads) - 1
    longest = max(sizes)
    tokens, targets = (part[heads, :longest] for part in (given.tokens, given.targets))
    real = given.targets[:, :longest] != IGNORE
    weight = torch.zeros(tokens.shape).index_add_(0, place, real.float())
    return Merged(tokens=tokens, targets=targets, weight=weight, row=place)


def score(predictions: Tensor, targets: Tensor) -> tuple[float, float]:
    """Share of strings with every position right, and of positions right."""
    real = targets != IGNORE
    right = (predictions == targets) | ~real
    return right.all(1).double().mean().item(), (right & real).sum().item() / int(real.sum())


def _parity(rng: np.random.Generator, low: int, high: int) -> Sample:
    """Bits until the coin stops it; a 1 is added if the ones are odd. Target: even so far?"""
    middle = (low + high) / 2
    going_on = middle / (1 + middle)
    while True:
        bits: list[int] = []
        while len(bits) <= high and rng.random() < going_on:
            bits.append(int(rng.integers(2)))
        if sum(bits) % 2:
            bits.append(1)
        if low <= len(bits) <= high:
            return bits, [int(odd % 2 == 0) for odd in np.cumsum(bits)]


def _repeat(word: list[int]) -> Draw:
    """Strings of `word` repeated; target: is the prefix a whole number of words?"""

    def draw(rng: np.random.Generator, low: int, high: int) -> Sample:
        size = len(word)
        times = int(rng.integers(-(-low // size), high // size + 1))
        return word * times, [int(i % size == 0) for i in range(1, times * size + 1)]

    return draw


def _blocks(letters: int) -> Draw:
    """`a^n b^n (c^n)`; targets: 0 = a or b, then the letter that must follow, last = end."""

    def draw(rng: np.random.Generator, low: int, high: int) -> Sample:
        n = int(rng.integers(-(-low // letters), high // letters + 1))
        symbols = [letter for letter in range(letters) for _ in range(n)]
        return symbols, [0] * n + [*symbols[n + 1 :], letters]

    return draw


def _dyck(rng: np.random.Generator, room: int) -> list[int]:
    """One bracket string (1 opens, -1 closes) of at most `room` symbols by the random grammar."""
    out: list[int] = []
    stack = ["S"]
    while stack:
        item = stack.pop()
        if item == ")":
            out.append(-1)
            continue
        draw = rng.random()
        if draw < 0.5:
            out.append(1)
            stack += [")", "S"]
        elif draw < 0.75:
            stack += ["S", "S"]
        if len(out) + stack.count(")") > room:
            return []
    return out


def _shuffle(rng: np.random.Generator, low: int, high: int) -> Sample:
    """Two bracket strings, interleaved at random; target: bit i says whether `)_i` is allowed."""
    while True:
        parts = [_dyck(rng, high), _dyck(rng, high)]
        total = sum(map(len, parts))
        if not low <= total <= high:
            continue
        turns = rng.permutation([0] * len(parts[0]) + [1] * len(parts[1]))
        at, depth = [0, 0], [0, 0]
        symbols, targets = [], []
        for turn in turns:
            step = parts[turn][at[turn]]
            at[turn] += 1
            depth[turn] += step
            symbols.append(2 * int(turn) + (step < 0))
            targets.append((depth[0] > 0) + 2 * (depth[1] > 0))
        return symbols, targets


LANGUAGES: dict[str, Language] = {
    language.name: language
    for language in (
        Language(name="parity", symbols=2, classes=2, draw=_parity),
        Language(name="(aa)*", symbols=1, classes=2, draw=_repeat([0, 0])),
        Language(name="(abab)*", symbols=2, classes=2, draw=_repeat([0, 1, 0, 1])),
        Language(name="a^n b^n", symbols=2, classes=3, draw=_blocks(2)),
        Language(name="a^n b^n c^n", symbols=3, classes=4, draw=_blocks(3)),
        Language(name="shuffle-2", symbols=4, classes=4, draw=_shuffle),
    )
}
"""The six languages of Table 5."""
