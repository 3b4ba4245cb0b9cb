"""The corpus that ships with the package: chronicles of invented valleys, by a seeded generator.

Every document is a new valley: its places, people, things and a few words of its own are invented,
then told about over many days. So a model can learn the language from other documents, but the
names and facts of this one only from what it has read of it: loss that falls with the position
inside a document is learning in context. The text is made, not collected.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

_ONSETS = "b br c d dr f g gr h j k l m n p pr r s st t th v w".split()
_VOWELS = "a e i o u ai ea ou".split()
_CODAS = ["", "", "l", "n", "r", "s", "th", "m", "ck", "nd"]
_TRADES = "baker carpenter fisher healer miller potter shepherd smith tailor teacher weaver".split()
_KINDS = "bell boat book clock coat drum kite knife lamp map mirror ring rope shell".split()
_COLOURS = "black blue brass golden green grey red silver white wooden".split()
_SITES = "bridge farm ford forest harbour hill lake market mill tower well".split()
_WEATHER = (
    "It rained all morning.",
    "The wind came from the north.",
    "The sun stayed until evening.",
    "Fog lay over the fields.",
    "The first snow fell.",
    "It was a warm, quiet day.",
)
_SEASONS = ("spring", "summer", "autumn", "winter")


def _name(rng: random.Random, syllables: int) -> str:
    parts = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(syllables)]
    return "".join(parts) + rng.choice(_CODAS)


@dataclass
class _Person:
    name: str
    trade: str
    home: str
    friend: str
    thing: str


class _Valley:
    """One invented world: what is true in it, and what has happened so far."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.name = _name(rng, 2).title()
        self.greeting = _name(rng, 2)
        kinds = rng.sample(_SITES, 4)
        self.places = [f"{_name(rng, 2).title()} {kind.title()}" for kind in kinds]
        names = sorted({_name(rng, 2).title() for _ in range(12)})
        rng.shuffle(names)
        trades, things = rng.sample(_TRADES, 5), rng.sample(_KINDS, 5)
        self.people = [
            _Person(
                name=names[i],
                trade=trades[i],
                home=rng.choice(self.places),
                friend=names[(i + 1) % 5],
                thing=f"{rng.choice(_COLOURS)} {things[i]}",
            )
            for i in range(5)
        ]
        self.keeper = {p.thing: p.name for p in self.people}

    def opening(self) -> str:
        who = " ".join(
            f"{p.name} the {p.trade} lived near {p.home} and kept a {p.thing}." for p in self.people
        )
        return (
            f"This is the chronicle of {self.name}. In {self.name} people say {self.greeting} when"
            f" they meet. The valley has {len(self.places)} places: {', '.join(self.places)}. {who}"
        )

    def event(self) -> str:
        p = self.rng.choice(self.people)
        return self.rng.choice(
            (self._visit, self._gift, self._meeting, self._lesson, self._question)
        )(p)

    def _visit(self, p: _Person) -> str:
        site = self.rng.choice(self.places)
        if site == p.home:
            return f"{p.name} stayed at home near {p.home}."
        return f"{p.name} the {p.trade} left {p.home} and walked to {site}."

    def _gift(self, p: _Person) -> str:
        thing, giver = self.rng.choice(list(self.keeper.items()))
        if giver == p.name:
            return f"{p.name} polished the {thing} and kept it."
        self.keeper[thing] = p.name
        return f"{giver} gave the {thing} to {p.name}. Now {p.name} has the {thing}."

    def _meeting(self, p: _Person) -> str:
        return f'"{self.greeting.title()}!" said {p.name} to {p.friend}, as friends do.'

    def _lesson(self, p: _Person) -> str:
        return f"A child asked who the {p.trade} was, and the answer was {p.name}."

    def _question(self, p: _Person) -> str:
        thing, keeper = self.rng.choice(list(self.keeper.items()))
        return self.rng.choice(
            (
                f"Who has the {thing}? {keeper} has the {thing}.",
                f"Where does {p.name} live? {p.name} lives near {p.home}.",
                f"Who is the friend of {p.name}? It is {p.friend}.",
            )
        )


def chronicle(seed: int, characters: int = 3000) -> str:
    """One document about one invented valley, at least this many characters long."""
    rng = random.Random(f"chronicle {seed}")
    valley = _Valley(rng)
    text, day = [valley.opening()], 1
    length = len(text[0])
    while length < characters:
        events = " ".join(valley.event() for _ in range(rng.randint(2, 5)))
        season = _SEASONS[(day // 7) % 4]
        line = f"Day {day}, {season}. {rng.choice(_WEATHER)} {events}"
        text.append(line)
        length += len(line) + 1
        day += 1
    return "\n".join(text) + "\n"


def chronicles(count: int, *, first: int = 0, characters: int = 3000) -> Iterator[str]:
    """Documents `first`, `first + 1`, ...; the same numbers give the same text on every machine."""
    return (chronicle(seed, characters) for seed in range(first, first + count))
