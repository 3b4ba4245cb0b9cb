"""Made-up texts: diaries, minutes, manuals, letters and the like, full of facts nobody can know.

Names of people and places are put together from syllables, numbers are drawn; a seed and a form
give the same text every time. Passages of books are whole sentences with many names and numbers.
"""

from __future__ import annotations

import gzip
import random
import re
from pathlib import Path

from nestling.evaluate.facts import make_questions

__all__ = ["BOOKS", "FORMS", "made_up", "passage"]

BOOKS = (
    "moby_dick_or_the_whale",
    "emma",
    "the_count_of_monte_cristo",
    "dracula",
    "war_and_peace",
)
"""The books of the passages, by seed."""

FORMS = (
    # a diary
    "{day}. I moved into the house of {p0} in {place0} today. The rent is {n3} crowns a month, "
    "and my room has the number {n2}. Across the landing lives {p1}, a retired baker from "
    "{place1}. He keeps {n1} geese in the yard and calls the largest of them {g0}.\n\n{day2}. "
    "My first day at the museum. The director is {p2}, who came from {place2} in {year}. She "
    "showed me a vase that was found near {place3} by the diver {p3}. There are {m3} pieces in "
    "the cellar, and I am to count them with my colleague {g1}. We had lunch at the inn of "
    "{g2}, where soup costs {m2} pence.\n\n{day3}. In the evening {g1} took me to a concert in "
    "{place4}. The singer was called {p4} and had learned her art from {g3}. The ferry home "
    "left at {time} and the fare was {k1} crowns.",
    # minutes of a meeting
    "Minutes of the rowing club of {place0}, held on a {day}. The chair was taken by {p0}, and "
    "{p1} wrote the minutes. The treasurer, {p2}, reported a balance of {n4} pounds. The roof "
    "will be mended by {p3} from {place1} for {m4} pounds. Our new boat is to be named {g0}; it "
    "was built in {place2} and arrives in {month}. The women's crew is trained by {g1}, every "
    "{day2} at {time}. The regatta takes place on the lake near {place3} on the {n2}th of "
    "{month2}. Last year it was won by the club from {place4}, with {k1} seconds to spare. "
    "Members pay {n3} pounds a year from now on. The key of box {m2} was lost by {g2} and "
    "should be returned to {g3}. The dinner is held at the house of {p4}, who was a champion in "
    "{year}.",
    # a manual
    "The water pump of type {g0} was built in {place0} between {year} and {year2}. It lifts "
    "{n2} litres a minute to a height of {m2} metres. The motor comes from {place1} and draws "
    "{n4} watts. The nut of the wheel is to be tightened to {n3} newton metres. Before it is "
    "opened, the valve marked {g1} must be closed and the lever turned to position {n1}. The "
    "seal is part number {m4} and is sold only by {p0} in {place2}. Use the grease called {g2}; "
    "others spoil the seal within {k1} weeks. If the lamp blinks, send the control unit to {p1} "
    "in {place3}. Pumps numbered below {n5} have a housing of brass and may be repaired by {p2} "
    "only. The pump on the farm of {p3} was serviced in {month} by {p4}, who measured a "
    "pressure of {m3} units. The next service is due in {month2}; the telephone number there is "
    "{m5}, and the dog is called {g3}.",
    # a letter
    "Dear {g0}, the journey to {place0} took {n2} hours, because the engine failed near "
    "{place1}. I shared the cabin with the botanist {p0} and with a boy whose name was {g1}. "
    "The captain of our ship was called {p1} and came from {place2}. My address is now {m2} "
    "Mill Street, above the shop of the saddler {p2}. The room costs {n1} shillings a week. "
    "From the window I see the tower of {place3}, which has {n3} steps. My pupils are the twins "
    "{g2} and {g3}, both {k1} years old. Their father, Colonel {p3}, was wounded at {place4} in "
    "{year}. On {day} we drive to the waterfall with the coachman {p4}, who is {k2} years old "
    "and sings. My account at the bank has the number {n5}. I shall be home on the {q2}th of "
    "{month}, by the train that leaves at {time}.",
    # a report
    "Report on the bridge at {place0}. The bridge was drawn by the engineer {p0} from {place1} "
    "and opened in {year}. It is {n3} metres long, rests on {n1} pillars and carries at most "
    "{n2} tons. The stone was cut in the quarry of {place2} by the firm of {p1}. In {month} the "
    "guard {p2} found a crack of {k2} millimetres in the pillar that is called {g0}. The expert "
    "{p3} was summoned from {place3} and counted {m3} broken rivets. Her assistant {g1} took "
    "{q2} photographs. The repair was offered by {p4} for {n5} crowns and will begin on a "
    "{day}. Meanwhile carts cross by the ferry of {g2}, which leaves at {time} and holds {m2} "
    "people. The toll is {k1} pence. The mayor of {place4}, who is called {g3}, has given {m4} "
    "crowns.",
    # a tale, on which settings are chosen
    "The clockmaker of {place0} was called {p0}, and he had {n1} apprentices. The youngest was "
    "called {g0} and had walked from {place1} with a hen by the name of {g1}. The master gave "
    "her a watch that had belonged to Captain {p1}. On its lid stood the year {year} and the "
    "name {g2}. The baker, {p2}, told her of a ship that sank near {place2} with {n2} people on "
    "board. Only the drummer {g3} was saved, and he settled in {place3}. The coach to that town "
    "cost {k1} pennies. There, behind the tannery, lived {p3}, who was {m2} years old. She gave "
    "the girl a map that was drawn in {year2}. The mayor, {p4}, paid {n4} crowns for the watch "
    "and hung it in the hall of {place4}. It strikes at {time}, on every {day}, and the tower "
    "has {n3} steps.",
)
"""Texts with gaps: `p` people, `g` given names, `place`, and numbers by their digits."""

_BEGIN = "Bal Cor Dre Fal Gam Hes Jor Kel Lun Mar Nor Os Pel Quin Ras Sel Tam Ul Ver Wyn".split()
_MIDDLE = "a e i o u an el in or ar".split()
_END = "dric dra fen gar lis mond nna ric sta tin vic wen zel bert dine".split()
_TOWN = "bury combe ford haven holm mere stead ton wick worth".split()
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_MONTHS = "January February March April June July August September October November".split()


def made_up(seed: int, form: int) -> str:
    """The text of a form with the names and numbers of a seed."""
    if not 0 <= form < len(FORMS):
        raise ValueError(f"form must be from 0 to {len(FORMS) - 1}; got {form}")
    chance = random.Random(f"made up {seed} {form}")
    used: set[str] = set()
    filled: dict[str, str] = {}

    def word(ends: list[str]) -> str:
        while True:
            parts = (chance.choice(_BEGIN), chance.choice(_MIDDLE), chance.choice(ends))
            if (made := "".join(parts)) not in used:
                used.add(made)
                return made

    def fill(name: str) -> str:
        if name.startswith("place"):
            return word(_TOWN)
        if name[0] == "p":
            return f"{word(_END)} {word(_TOWN)}"
        if name[0] == "g":
            return word(_END)
        if name.startswith("year"):
            return str(chance.randint(1510, 1890))
        if name == "time":
            return f"{chance.randint(1, 11)}:{chance.randint(1, 5)}5"
        if name.startswith(("day", "month")):
            known = _DAYS if name[0] == "d" else _MONTHS
            return chance.choice([each for each in known if each not in filled.values()])
        digits = int(name[1])
        return str(chance.randint(max(10 ** (digits - 1), 3), 10**digits - 1))

    for name in re.findall(r"\{(\w+)\}", FORMS[form]):
        if name not in filled:
            filled[name] = fill(name)
    return FORMS[form].format(**filled)


def passage(data: Path, seed: int, letters: int = 1100, places: int = 100) -> str:
    """Whole sentences of a book: of many places in it, those that make the most questions."""
    path = data / "gutenberg_books" / f"{BOOKS[seed % len(BOOKS)]}.txt.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        text = re.sub(r"[ \t]*\n[ \t]*", "\n", file.read())
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", text)  # lines become paragraphs
    found = []
    for place in range(places):
        rest = text[len(text) // 10 + place * len(text) * 8 // 10 // places :]
        begin = rest.index(". ") + 2
        end = rest.rfind(". ", begin, begin + letters) + 1
        found.append(" ".join(rest[begin:end].split()))
    return max(found, key=lambda each: len(make_questions(each)))
