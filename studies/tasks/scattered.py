"""bAbI's stories to train on: facts among sentences of books, with many questions.

    draw = stories(data, ("qa1",))
    ids, targets, noise = draw(random.Random(0), stage)

Stories are made up in bAbI's words and go on without end. A story is asked about again and again,
all that it has told of, so that a short sequence has many answers. What a stage may leave out makes
the beginning easier: without "to the", a short convolution sees who went where.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from nestling.evaluate import babilong
from nestling.evaluate.samples import sentences
from studies.tasks.long import Draw, Row, Stage, excerpts
from studies.tasks.vocabulary import load

__all__ = ["Part", "stories"]

PEOPLE = ("Mary", "John", "Daniel", "Sandra")
PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
THINGS = ("apple", "football", "milk")
GIVERS = ("Bill", "Fred", "Jeff", "Mary")
SIDES = {"north": "south", "south": "north", "east": "west", "west": "east"}
TAKES = ("got", "took", "grabbed", "picked up")
LEAVES = ("left", "dropped", "discarded", "put down")
GIVES = ("gave", "handed", "passed")
MOVES = ("moved to", "went to", "journeyed to", "travelled to", "went back to")
SMALL = ("the", "to", "of", "is")
"""Words of facts that tell nothing."""
RELATED = re.compile(rf"\b(?:{'|'.join((*PEOPLE, *PLACES, *THINGS, *GIVERS, *MOVES))})\b")
"""What sentences of books have in common with facts."""
SHORTEST = babilong.SHORTEST
TAIL = 6
"""Tokens of a prompt after its question mark."""
STILL = 0.15
"""The share of sequences without noise in every stage."""


class Part(NamedTuple):
    """Some facts, and questions after them with their answers."""

    facts: Sequence[str]
    asked: Sequence[tuple[str, str]]


class World:
    """What facts say so far: `answers` to bAbI's questions."""

    def __init__(self) -> None:
        self.answers: dict[str, str] = {}
        self.at: dict[str, str] = {}  # people and things
        self.held: dict[str, str] = {}  # things, and who has them

    def moves(self, who: str, where: str) -> None:
        self.at[who] = self.answers[f"Where is {who}?"] = where
        for what in [what for what, holder in self.held.items() if holder == who]:
            self._brought(what, where)

    def takes(self, who: str, what: str) -> None:
        self.held[what] = who
        if who in self.at:
            self._brought(what, self.at[who])

    def leaves(self, who: str, what: str) -> None:
        self.held.pop(what, None)
        if who in self.at:
            self._brought(what, self.at[who])

    def gives(self, who: str, what: str, whom: str) -> None:
        self.takes(whom, what)
        self.answers |= {
            f"What did {who} give to {whom}?": what,
            f"Who gave the {what} to {whom}?": who,
            f"Who gave the {what}?": who,
            f"Who received the {what}?": whom,
            f"Who did {who} give the {what} to?": whom,
        }

    def lies(self, one: str, side: str, other: str) -> None:
        for a, to, b in ((one, side, other), (other, SIDES[side], one)):
            self.answers |= {f"What is {to} of the {b}?": a, f"What is the {a} {to} of?": b}

    def _brought(self, what: str, where: str) -> None:
        before = self.at.get(what, where)
        self.at[what] = self.answers[f"Where is the {what}?"] = where
        if before != where:
            self.answers[f"Where was the {what} before the {where}?"] = before


def _moved(world: World, rng: random.Random, people: Sequence[str]) -> str:
    who, where = rng.choice(people), rng.choice(PLACES)
    world.moves(who, where)
    return f"{who} {rng.choice(MOVES)} the {where}."


def _handled(world: World, rng: random.Random, people: Sequence[str]) -> str:
    """Somebody moves, takes a thing that is where they are, or leaves one they have."""
    who, what = rng.choice(people), rng.choice(THINGS)
    there = rng.choice((" there", ""))
    if world.held.get(what) == who and rng.random() < 0.5:
        world.leaves(who, what)
        return f"{who} {rng.choice(LEAVES)} the {what}{there}."
    here = what not in world.held and world.at.get(what, world.at.get(who)) == world.at.get(who)
    if here and who in world.at:
        world.takes(who, what)
        return f"{who} {rng.choice(TAKES)} the {what}{there}."
    return _moved(world, rng, people)


def _given(world: World, rng: random.Random, people: Sequence[str]) -> str:
    """As `_handled`, or somebody gives a thing they have to another."""
    if world.held and rng.random() < 0.4:
        what, who = rng.choice(sorted(world.held.items()))
        whom = rng.choice([other for other in people if other != who])
        world.gives(who, what, whom)
        return f"{who} {rng.choice(GIVES)} the {what} to {whom}."
    return _handled(world, rng, people)


def _laid(world: World, rng: random.Random, people: Sequence[str]) -> str:
    del people
    one, other = rng.sample(PLACES, 2)
    side = rng.choice(tuple(SIDES))
    world.lies(one, side, other)
    return f"The {one} is {side} of the {other}."


class _Kind(NamedTuple):
    """How a task's next fact comes about, who takes part, how its questions begin."""

    tell: Callable[[World, random.Random, Sequence[str]], str]
    people: Sequence[str]
    asks: tuple[str, ...]


KINDS = {
    "qa1": _Kind(_moved, PEOPLE, (r"Where is (?!the)",)),
    "qa2": _Kind(_handled, PEOPLE, (r"Where is the", r"Where is the", r"Where is (?!the)")),
    "qa3": _Kind(_handled, PEOPLE, (r"Where was", r"Where was", r"Where is the")),
    "qa4": _Kind(_laid, (), (r"What is",)),
    "qa5": _Kind(_given, GIVERS, (r"Who|What did",)),
}
"""Of questions of the first kind a task is made; the others help to learn it."""


def tell(rng: random.Random, task: str) -> Iterator[Part]:
    """A story without end: facts, and after every few of them questions."""
    kind, world = KINDS[task], World()
    while True:
        facts = [kind.tell(world, rng, kind.people) for _ in range(rng.choice((1, 1, 2, 2, 3, 4)))]
        asks = re.compile(rng.choice(kind.asks))
        known = sorted(item for item in world.answers.items() if asks.match(item[0]))
        asked = rng.sample(known, min(len(known), rng.randint(1, 3)))
        yield Part(facts, asked)


def shortened(fact: str, rng: random.Random) -> str:
    """A fact without its small words, and at times without the verb of a move."""
    words = fact.removesuffix(".").split(" ")
    if " to the " in fact and rng.random() < 0.5:
        words = [words[0], words[-1]]
    return " ".join(word for word in words if word.lower() not in SMALL) + "."


def pieces(fact: str, word: str, rng: random.Random) -> str:
    """A fact with one of its words exchanged for this one, or a part of it that tells nothing."""
    words = fact.removesuffix(".").removesuffix(" there").split(" ")
    telling = [at for at, each in enumerate(words) if each.lower() not in SMALL]
    kind = rng.random()
    if kind < 0.3:  # all but the first of the words that tell something
        return " ".join(words[telling[0] + 1 :])
    if kind < 0.5:  # all before the last of them
        return " ".join(words[: telling[-1]])
    at = rng.choice(telling)
    words[at] = word.capitalize() if words[at][0].isupper() else word
    return " ".join(words) + "."


def near(sentence: str, fact: str, rng: random.Random) -> str:
    """A sentence of noise with a piece of a fact in it, or beside it; never a whole fact."""
    words = sentence.split(" ")
    plain = [word for word in words if word.isalpha() and not RELATED.search(word)] or ["it"]
    piece = pieces(fact, rng.choice(plain), rng)
    at = rng.randrange(len(words) + 1)
    if any(RELATED.search(word) for word in words[max(0, at - 1) : at + 1]):
        return sentence  # with a name beside it the piece may be whole
    if rng.random() < 0.5 or not at:
        return piece
    return " ".join((*words[:at], piece, *words[at:]))


@cache
def _sentences(data: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Sentences of the books to train on, and those of them that are related to the stories."""
    books, vocabulary = excerpts(data), load()
    whole = (text for number in range(len(books.sources)) for text in sentences(books.text(number)))
    found = tuple(text for text in whole if len(vocabulary(" " + text).input_ids) > SHORTEST)
    return found, tuple(text for text in found if RELATED.search(text))


def _noise(
    rng: random.Random, stage: Stage, mean: float, data: Path, facts: Sequence[str]
) -> Iterator[list[int]]:
    """Sentences of books, of `mean` tokens together on average."""
    vocabulary, left = load(), int(rng.expovariate(1 / mean)) if mean else 0
    while left > 0:
        text = rng.choice(_sentences(data)[rng.random() < stage.related])
        if rng.random() < stage.near:
            text = near(text, rng.choice(facts), rng)
        ids = [token for word in text.split(" ") for token in vocabulary(" " + word).input_ids]
        if len(ids) > left and rng.random() < 0.5:  # as the last sentence of a sample is cut
            ids = ids[:left]
        yield ids
        left -= len(ids)


def stories(data: Path, tasks: Sequence[str] = babilong.TASKS) -> Draw:
    """Stories of these tasks, one after another, among sentences of books."""
    vocabulary = load()

    def ask(row: Row, part: Part, stage: Stage, rng: random.Random) -> None:
        prompt = rng.random() >= stage.bare
        if prompt:
            row.add(vocabulary("\n</context>").input_ids, noise=True)
        for question, answer in part.asked:
            text = f"\nQuestion: {question}\nAnswer:" if prompt else f" {question}"
            ids = vocabulary(text).input_ids
            if prompt and rng.random() < stage.early:  # nearer to the name that is asked for
                ids = ids[: -rng.randint(1, TAIL)]
            row.add(ids, noise=True)  # books ask, too: a question is not to be kept
            row.answer(vocabulary(" " + answer).input_ids)

    def draw(rng: random.Random, stage: Stage) -> Row:
        row = Row([], [], [])
        if rng.random() >= stage.bare:
            row.add(vocabulary("<context>\n").input_ids, noise=True)
        mean = math.exp(rng.uniform(0, math.log(stage.noise))) if stage.noise else 0.0
        if rng.random() < STILL:
            mean = 0.0
        while len(row.ids) < stage.length:
            for part in tell(rng, rng.choice(tuple(tasks))):
                for fact in part.facts:
                    for ids in _noise(rng, stage, mean, data, part.facts):
                        row.add(ids, noise=True)
                    said = shortened(fact, rng) if rng.random() < stage.short else fact
                    row.add(vocabulary(" " + said).input_ids)
                for ids in _noise(rng, stage, mean, data, part.facts):
                    row.add(ids, noise=True)
                ask(row, part, stage, rng)
                if len(row.ids) >= stage.length:
                    break
        return row.cut(stage.length)

    return draw
