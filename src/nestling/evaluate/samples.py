"""Questions about long texts, and what the texts are made of: words, books, a way to count tokens.

A sample's text is made while it is read, piece by piece, and comes out the same every time: ten
million tokens of it are never in memory at once. A piece carries the separator before it, so that
joining pieces is joining strings, and a tokenizer that cuts text at spaces finds the same tokens in
the pieces as in the whole.
"""

from __future__ import annotations

import gzip
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

__all__ = [
    "BYTES",
    "Books",
    "Sample",
    "Score",
    "Tokens",
    "Words",
    "draw",
    "parse_lengths",
    "scatter",
    "sentences",
]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One question about a long text.

    pieces: called, gives the text before the question, piece by piece, the same each time.
    question: what comes after the text. prefix: how the answer begins; the model goes on from it.
    answers: what is to be found. labels: all answers there could be, where the task has a list.
    length: tokens the sample was made for. answer_tokens: how many tokens an answer may take.
    """

    task: str
    length: int
    pieces: Callable[[], Iterator[str]]
    question: str
    prefix: str
    answers: tuple[str, ...]
    labels: tuple[str, ...] = ()
    answer_tokens: int = 128

    def stream(self) -> Iterator[str]:
        """Everything the model is to read: the text, the question and the answer's beginning."""
        yield from self.pieces()
        yield self.question + self.prefix

    def text(self) -> str:
        """All of it as one string (for short samples, and for models that cannot stream)."""
        return "".join(self.stream())


Score = Callable[[Sample, str], float]
"""How right an output is, from 0 to 1."""


@dataclass(frozen=True)
class Tokens:
    """How a tokenizer counts and cuts text; without one, tokens are the bytes of UTF-8."""

    tokenizer: Any = None

    def ids(self, text: str) -> list[int]:
        if self.tokenizer is None:
            return list(text.encode())
        found: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return found

    def count(self, text: str) -> int:
        return len(text.encode()) if self.tokenizer is None else len(self.ids(text))

    def cut(self, text: str, most: int) -> str:
        """The beginning of a text, of at most so many tokens."""
        if self.tokenizer is None:
            return text.encode()[:most].decode(errors="ignore")
        return str(self.tokenizer.decode(self.ids(text)[:most]))


BYTES = Tokens()
"""Tokens are bytes."""


@dataclass(frozen=True)
class Words:
    """Lists of words for keys and counting tasks."""

    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    verbs: tuple[str, ...] = ()

    @classmethod
    def load(cls, folder: str | Path) -> Words:
        """Lists as the wonderwords package has them: `adjectivelist.txt`, `nounlist.txt`, ..."""
        names = ("adjectivelist.txt", "nounlist.txt", "verblist.txt")
        if missing := [name for name in names if not Path(folder, name).is_file()]:
            raise ValueError(f"{folder}: no {missing[0]} here; word lists are {', '.join(names)}")
        return cls(*(_lines(Path(folder, name)) for name in names))

    @cached_property
    def all(self) -> tuple[str, ...]:
        """Every word once, sorted."""
        return tuple(sorted({*self.adjectives, *self.nouns, *self.verbs}))

    def key(self, rng: random.Random) -> str:
        """An `adjective-noun`."""
        return f"{rng.choice(self.adjectives)}-{rng.choice(self.nouns)}"


def _lines(path: Path) -> tuple[str, ...]:
    return tuple(line.strip() for line in path.read_text().splitlines() if line.strip())


PLAIN_WORDS = Words(
    tuple(
        "amber ancient brave bright broad calm clever cold crisp curious dark deep distant early"
        " eager faint fast fierce fine gentle golden grand green happy heavy hidden hollow honest"
        " humble idle keen kind large lively lonely loud mellow mild modest narrow noble odd pale"
        " patient plain polite proud quick quiet rare rough rusty shallow sharp shy silent silver"
        " simple slow small smooth soft solid steady still stout strange sturdy sudden swift tall"
        " tender tidy tiny vast warm weary white wide wild wise young".split()
    ),
    tuple(
        "acorn anchor apple arrow badge barrel basket beacon bell bench boat bottle branch bread"
        " bridge brook broom bucket button cabin candle canyon carpet castle chair chimney cliff"
        " clock cloud coin comet copper cradle crown desert dragon drum eagle engine falcon feather"
        " fence field flute forest fountain garden gate glove hammer harbor hill horse"
        " island kettle ladder lantern lemon letter lion lock lake maple meadow mirror moon"
        " needle ocean orchard otter paddle parrot pebble pencil piano pillow planet pocket"
        " rabbit ribbon river robin saddle shadow shell shield spoon stone stove table thimble"
        " thunder tiger tower valley violin wagon walnut window".split()
    ),
    tuple(
        "carry climb dance draw drift float follow gather glow grow hover jump leap listen mend"
        " paint plant pour reach rest roam sail scatter search sing sleep spin swim travel wander"
        " whisper".split()
    ),
)
"""Words of our own, for trying a task without data."""


@dataclass(frozen=True)
class Books:
    """Long texts, opened one at a time: files (.txt or .txt.gz), or functions that give a text."""

    sources: tuple[Path | Callable[[], str], ...]

    @classmethod
    def load(cls, folder: str | Path) -> Books:
        """All books of a folder, in the order of their names."""
        found = sorted(p for p in Path(folder).glob("*") if p.name.endswith((".txt", ".txt.gz")))
        if not found:
            raise ValueError(f"{folder}: no books (.txt, .txt.gz) in this folder")
        return cls(tuple(found))

    def text(self, number: int) -> str:
        """One book with its white space collapsed."""
        source = self.sources[number]
        if callable(source):
            raw = source()
        elif source.suffix == ".gz":
            with gzip.open(source, "rt", encoding="utf-8", errors="replace") as file:
                raw = file.read()
        else:
            raw = source.read_text(encoding="utf-8", errors="replace")
        return re.sub(r"\s+", " ", raw).strip()

    def sentences(self) -> Iterator[str]:
        """The sentences of all books in order, from the beginning again after the last."""
        while True:
            found = False
            for number in range(len(self.sources)):
                for sentence in sentences(self.text(number)):
                    found = True
                    yield sentence
            if not found:
                raise ValueError("the books hold no sentence")

    def background(self, rng: random.Random) -> Iterator[str]:
        """Sentences from a random place of a random book to its end, then of another, without end.

        The first and the last sentence of each stretch are dropped: they may be cut.
        """
        empty = 0
        while empty < 100:
            text = self.text(rng.randrange(len(self.sources)))
            held: str | None = None
            first = True
            empty += 1
            for sentence in sentences(text, rng.randrange(len(text)) if text else 0):
                if held is not None:
                    empty = 0
                    yield held
                held = None if first else sentence
                first = False
        raise ValueError("the books hold too little text for a background")


_END = re.compile(  # curly quotation marks are written as escapes
    "[.!?]+[\"'\u201d\u2019)\\]]*\\s+(?=[\"'\u201c\u2018(\\[]?[A-Z0-9])"
)
_SHORT = ("Mr.", "Mrs.", "Ms.", "Dr.", "St.", "Prof.", "Capt.", "Col.", "Gen.", "vs.", "etc.")


def sentences(text: str, start: int = 0) -> Iterator[str]:
    """The sentences of a text from a place on, without the white space between them."""
    for end in _END.finditer(text, start):
        found = text[start : end.end()].strip()
        if found.endswith(_SHORT) or re.search(r"\b[A-Z]\.$", found):
            continue
        start = end.end()
        yield found
    if rest := text[start:].strip():
        yield rest


def scatter(units: Iterable[str], placed: Iterable[tuple[int, str]]) -> Iterator[str]:
    """The units of a text with each of `placed` before the unit of its place, or at the end."""
    waiting = list(placed)
    for number, unit in enumerate(units):
        while waiting and waiting[0][0] <= number:
            yield waiting.pop(0)[1]
        yield unit
    for _, text in waiting:
        yield text


def draw(make: Callable[[random.Random], Any], rng: random.Random, count: int) -> list[Any]:
    """`count` different things made with the generator."""
    found: dict[Any, None] = {}
    for _ in range(1000 * count):
        found[make(rng)] = None
        if len(found) == count:
            return list(found)
    raise ValueError(f"{count} different things were asked for; only {len(found)} were found")


def parse_lengths(text: str) -> list[int]:
    """`1k,4k,1M` as numbers of tokens: k is 1,024, M is 1,024 * 1,024; `0k` is no background."""
    units = {"k": 1024, "m": 1024**2}
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*([kKmM]?)\s*", part)
        if match is None:
            raise ValueError(f"lengths are numbers like 512, 4k or 1M; got {part.strip()!r}")
        found.append(int(match[1]) * units.get(match[2].lower(), 1))
    return found
