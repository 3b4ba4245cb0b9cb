"""RULER (Hsieh et al. 2024): find, follow and count things in texts of any length.

Eight needle tasks (S-1 to S-3, MK-1 to MK-3, MV, MQ), variable tracking (VT), common words (CWE)
and frequent words (FWE), in the original's words, generated while they are read. Three things
differ: the haystack is the largest that fits to the unit, where the original grows it in steps; a
distractor never carries a key that is asked for; a sentence ends where a plain rule says so.
"""

from __future__ import annotations

import itertools
import math
import random
import string
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from nestling.checks import one_of
from nestling.evaluate.samples import BYTES, Books, Sample, Tokens, Words, draw, scatter

__all__ = ["NEEDLES", "TASKS", "Needles", "sample", "score"]

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
DEPTHS = tuple(int(depth) for depth in np.round(np.linspace(0, 100, 40)))


@dataclass(frozen=True, kw_only=True)
class Needles:
    """A needle task: what keys and values are, how many there are, and where they hide."""

    haystack: str  # "noise", "essay" or "needle"
    key: str = "words"  # "words" or "uuids"
    value: str = "numbers"  # "numbers" or "uuids"
    keys: int = 1
    values: int = 1
    asked: int = 1


NEEDLES = {
    "s1": Needles(haystack="noise"),
    "s2": Needles(haystack="essay"),
    "s3": Needles(haystack="essay", value="uuids"),
    "mk1": Needles(haystack="essay", keys=4),
    "mk2": Needles(haystack="needle"),
    "mk3": Needles(haystack="needle", key="uuids", value="uuids"),
    "mv": Needles(haystack="essay", values=4),
    "mq": Needles(haystack="essay", keys=4, asked=4),
}
"""The needle tasks by name."""

TASKS = (*NEEDLES, "vt", "cwe", "fwe")
"""All tasks by name."""


def sample(
    task: str, length: int, seed: int, *, words: Words, books: Books, tokens: Tokens = BYTES
) -> Sample:
    """The sample of a task that a seed gives, of at most `length` tokens, room to answer included.

    task: one of `TASKS`. length: in tokens of `tokens` (by default bytes). words: for keys and
    lists. books: the essay haystacks, read from the first word on.
    """
    one_of("task", task, TASKS)
    rng = random.Random(f"{task} {seed}")
    if task == "vt":
        return _variables(length, rng, tokens)
    if task == "cwe":
        return _common(length, rng, words, tokens)
    if task == "fwe":
        return _frequent(length, rng, tokens)
    return _needles(task, length, rng, words, books, tokens)


def score(given: Sample, output: str) -> float:
    """The share of the answers that are in the output, whatever their case."""
    found = output.lower()
    return sum(answer.lower() in found for answer in given.answers) / len(given.answers)


# Needles


def _needles(
    task: str, length: int, rng: random.Random, words: Words, books: Books, tokens: Tokens
) -> Sample:
    kind = NEEDLES[task]
    make: dict[str, Callable[[random.Random], str]] = {
        "words": words.key,
        "numbers": lambda r: str(r.randint(10**6, 10**7 - 1)),
        "uuids": lambda r: str(uuid.UUID(int=r.getrandbits(128), version=4)),
    }
    keys = draw(make[kind.key], rng, kind.keys)
    values = draw(make[kind.value], rng, kind.keys * kind.values)
    pairs = [(keys[i // kind.values], value) for i, value in enumerate(values)]
    order = rng.sample(range(kind.keys), kind.asked)
    answers = tuple(value for i in order for key, value in pairs if key == keys[i])
    asked = [keys[i] for i in order]
    query = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
    head, question, prefix = _needle_prompt(kind.value, query, single=len(answers) == 1)
    needles = [NEEDLE.format(kind=kind.value, key=key, value=value) for key, value in pairs]
    rng.shuffle(needles)
    room = length - 128 - sum(map(tokens.count, (head, question + prefix)))

    def distractors() -> Iterator[str]:
        again = random.Random(f"{task} {keys[0]} {values[0]}")
        while True:
            key, value = make[kind.key](again), make[kind.value](again)
            if key not in keys and value not in values:
                yield NEEDLE.format(kind=kind.value, key=key, value=value)

    units: Callable[[], Iterator[str]]
    if kind.haystack == "essay":
        separator, units = " ", books.sentences
    else:
        separator = "\n"
        units = distractors if kind.haystack == "needle" else (lambda: itertools.repeat(NOISE))
    room -= sum(tokens.count(separator + needle) for needle in needles)
    count, last = _fill(units(), separator, room, tokens, whole=separator == "\n")
    if count < (1 if kind.haystack == "essay" else len(needles)):
        raise ValueError(f"{task} does not fit in {length} tokens: there is no room for a haystack")
    if kind.haystack == "essay":
        depths = rng.sample(DEPTHS, len(needles))
        places = sorted(count * depth // 100 for depth in depths)
    else:
        places = sorted(rng.sample(range(count), len(needles)))

    def pieces() -> Iterator[str]:
        yield head
        joined = ""  # the first piece follows the head's line end
        whole = itertools.islice(units(), count - (last is not None))
        hay = whole if last is None else itertools.chain(whole, [last])
        for text in scatter(hay, zip(places, needles, strict=True)):
            yield joined + text
            joined = separator

    return Sample(
        task=task, length=length, pieces=pieces, question=question, prefix=prefix, answers=answers
    )


def _needle_prompt(kind: str, query: str, *, single: bool) -> tuple[str, str, str]:
    if single:
        kind = kind[:-1]
    some, are, all_are = ("A", "is", "is") if single else ("Some", "are", "are all")
    head = (
        f"{some} special magic {kind} {are} hidden within the following text. Make sure to memorize"
        f" it. I will quiz you about the {kind} afterwards.\n"
    )
    question = (
        f"\nWhat {all_are} the special magic {kind} for {query} mentioned in the provided text?"
    )
    return (
        head,
        question,
        f" The special magic {kind} for {query} mentioned in the provided text {are}",
    )


def _fill(
    units: Iterator[str], separator: str, room: int, tokens: Tokens, *, whole: bool
) -> tuple[int, str | None]:
    """How many units fit in the room, and the last one if it had to be cut at a word."""
    count, used, known = 0, 0, dict[str, int]()
    for unit in units:
        text = separator + unit if count else unit
        size = known.get(text) or tokens.count(text)
        if unit == NOISE:
            known[text] = size
        if used + size > room:
            return (count, None) if whole else _cut(unit, count, room - used, separator, tokens)
        count, used = count + 1, used + size
    raise ValueError("the haystack ended before the length was reached")


def _cut(
    unit: str, count: int, room: int, separator: str, tokens: Tokens
) -> tuple[int, str | None]:
    """As many words of a last sentence as fit."""
    words = unit.split(" ")
    most = 0
    while most < len(words) and tokens.count(separator + " ".join(words[: most + 1])) <= room:
        most += 1
    return (count + 1, " ".join(words[:most])) if most else (count, None)


# Variable tracking

HOPS = 4


def _variables(length: int, rng: random.Random, tokens: Tokens) -> Sample:
    example = _chain_text(5, 3, rng)
    shown = example.text() + " " + " ".join(example.answers) + "\n\n\n\n"
    noise = tokens.count(f" {NOISE}\n")
    room = length - 30 - tokens.count(shown) - tokens.count(_chain_text(0, 5, rng).text())
    lines = room // noise
    if lines <= HOPS:
        raise ValueError(f"vt does not fit in {length} tokens: there is no room for noise")
    made = _chain_text(lines, 5, rng)
    return replace(made, length=length, pieces=partial(_after, shown, made.pieces))


def _chain_text(lines: int, letters: int, rng: random.Random) -> Sample:
    """One chain of assignments, in order, among lines of noise."""
    names = draw(lambda r: "".join(r.choices(string.ascii_uppercase, k=letters)), rng, HOPS + 1)
    value = rng.randint(10000, 99999)
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {new} = VAR {old} " for old, new in itertools.pairwise(names)]
    places = sorted(rng.sample(range(lines), HOPS + 1)) if lines > HOPS else [0] * (HOPS + 1)

    def pieces() -> Iterator[str]:
        yield (
            "Memorize and track the chain(s) of variable assignment hidden in the following"
            " text.\n\n"
        )
        joined = ""
        for text in scatter(itertools.repeat(NOISE + "\n", lines), zip(places, chain, strict=True)):
            yield joined + text
            joined = " "

    return Sample(
        task="vt",
        length=0,
        pieces=pieces,
        question=f"\nQuestion: Find all variables that are assigned the value {value} in the text"
        " above.",
        prefix=" Answer: According to the chain(s) of variable assignment in the text above,"
        f" {HOPS + 1} variables are assgined the value {value}, they are: ",  # sic, as in RULER
        answers=tuple(names),
        answer_tokens=30,
    )


# Common words and frequent words

COMMON = 10


def _common(length: int, rng: random.Random, words: Words, tokens: Tokens) -> Sample:
    """Ten words come often in a numbered list, the others seldom; one solved example before it.

    They come 30 and 3 times, below 4,096 tokens 6 times and once, and so too where tokens are so
    short (bytes) that the longer list does not fit.
    """
    forms = (_Lists(40, (10, 3), (30, 3)), _Lists(20, (3, 1), (6, 1)))
    for form in forms[length < 4096 :]:
        example = _list_text(form.shown, form.shown_repeats, rng, words)
        answer = " ".join(f"{i}. {word}" for i, word in enumerate(example.answers, 1))
        shown = example.text() + answer + "\n"
        room = length - 120 - tokens.count(shown)
        found = _longest_list(room, form.repeats, rng.random(), words, tokens)
        if found is not None:
            return replace(found, length=length, pieces=partial(_after, shown, found.pieces))
    raise ValueError(f"cwe does not fit in {length} tokens: there is no room for a list")


class _Lists(NamedTuple):
    """How many words the example has, and how often frequent and rare words come."""

    shown: int
    shown_repeats: tuple[int, int]
    repeats: tuple[int, int]


def _after(shown: str, pieces: Callable[[], Iterator[str]]) -> Iterator[str]:
    yield shown
    yield from pieces()


def _longest_list(
    room: int, repeats: tuple[int, int], seed: float, words: Words, tokens: Tokens
) -> Sample | None:
    """The list of most words that fits in the room; None if not even the frequent ones do."""

    def made(count: int) -> Sample:
        return _list_text(count, repeats, random.Random(seed), words)

    def fits(count: int) -> bool:
        return sum(map(tokens.count, made(count).stream())) <= room

    low, high = COMMON, len(words.all)
    if not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return made(low)


def _list_text(count: int, repeats: tuple[int, int], rng: random.Random, words: Words) -> Sample:
    if count > len(words.all):
        raise ValueError(
            f"a list of {count} words needs as many; the word lists hold {len(words.all)}"
        )
    drawn = rng.sample(words.all, count)
    listed = drawn[:COMMON] * repeats[0] + drawn[COMMON:] * repeats[1]
    rng.shuffle(listed)

    def pieces() -> Iterator[str]:
        yield (
            "Below is a numbered list of words. In these words, some appear more often than others."
            " Memorize the ones that appear most often.\n"
        )
        for number, word in enumerate(listed, 1):
            yield f" {number}. {word}" if number > 1 else f"{number}. {word}"

    return Sample(
        task="cwe",
        length=0,
        pieces=pieces,
        question="\nQuestion: What are the 10 most common words in the above list?",
        prefix=" Answer: The top 10 words that appear most often in the list are:",
        answers=tuple(drawn[:COMMON]),
        answer_tokens=120,
    )


_BLOCK = 1 << 16  # words shuffled at a time


def _frequent(length: int, rng: random.Random, tokens: Tokens) -> Sample:
    """Made-up words with counts that fall as 1 / rank^2; the commonest stands as `...`."""
    head = (
        "Read the following coded text and track the frequency of each coded word. Find the three"
        " most frequently appeared coded words."
    )
    question = (
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the"
        " three most frequently appeared words in the above coded text?"
    )
    prefix = (
        " Answer: According to the coded text above, the three most frequently appeared words are:"
    )
    room = length - 50 - tokens.count(head) - tokens.count(question + prefix)
    most = min(length // 50, 8 + math.isqrt(max(length, 0)))  # further ranks never come up
    if most < 4 or room < 1:
        raise ValueError(f"fwe does not fit in {length} tokens: there is no room for words")
    coded = draw(lambda r: "".join(r.choices(string.ascii_lowercase, k=6)), rng, most)
    coded[0] = "..."
    ranks = np.arange(1, most + 1, dtype=np.float64)
    share = ranks**-2 / (math.pi**2 / 6)
    sizes = np.array([tokens.count(" " + word) for word in coded])
    low, high = 0, max(room, 1)
    while low < high:  # the largest number of words that fits
        middle = (low + high + 1) // 2
        fits = int((np.floor(middle * share) * sizes).sum()) <= room
        low, high = (middle, high) if fits else (low, middle - 1)
    counts = np.floor(low * share).astype(np.int64)
    if counts[3] < 1 or counts[3] == counts[2]:
        raise ValueError(f"fwe does not fit in {length} tokens: ranks could not be told apart")
    seed = rng.getrandbits(63)

    def pieces() -> Iterator[str]:
        yield head
        for word in _shuffled(counts, seed):
            yield " " + coded[word]

    return Sample(
        task="fwe",
        length=length,
        pieces=pieces,
        question=question,
        prefix=prefix,
        answers=tuple(coded[1:4]),
        answer_tokens=50,
    )


def _shuffled(counts: np.ndarray, seed: int) -> Iterator[int]:
    """Every index as often as its count says, in random order, a block at a time."""
    random_ = np.random.default_rng(seed)
    left = counts.copy()
    while total := int(left.sum()):
        size = min(_BLOCK, total)
        some = random_.multivariate_hypergeometric(left, size, method="marginals")
        left -= some
        yield from random_.permutation(np.repeat(np.arange(len(some)), some)).tolist()
