"""Patient records and multiple-choice questions about them, in the form of LongHealth.

The benchmark's records (Adams et al. 2024) are not ours to ship: `load` reads its file. `sample`
makes up patients whose letters say when which finding was made, at any length: the letters of other
patients stand between those of the one who is asked about. All five options are of one kind and
stand in some letter, one of the wrong ones in a letter of the same patient but another day, and
which of A to E is right is drawn at random.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from nestling.evaluate.samples import BYTES, Sample, Tokens, scatter

__all__ = ["LETTERS", "load", "sample", "score"]

LETTERS = ("A", "B", "C", "D", "E")

_FIRST = "Anna Bruno Clara David Elsa Felix Greta Hugo Ida Jonas Karla Linus Mira Nils Olga".split()
_LAST = "Ahrens Berger Conrad Dorn Ebert Falk Gross Hahn Jung Keller Lang Moser Noll Ott".split()
_FINDINGS = {
    "medication": "Ramipril Metoprolol Atorvastatin Metformin Pantoprazole Apixaban Torasemide"
    " Levothyroxine Amlodipine Allopurinol".split(),
    "diagnosis": "pneumonia|atrial fibrillation|gallstones|a hip fracture|iron deficiency|asthma|"
    "kidney stones|a stroke|shingles|diverticulitis".split("|"),
    "operation": "appendectomy|hip replacement|cataract surgery|hernia repair|a coronary bypass|"
    "thyroidectomy|knee arthroscopy|a pacemaker implantation|a biopsy|tonsillectomy".split("|"),
    "allergy": "penicillin|latex|iodine|peanuts|ibuprofen|bee venom|nickel|pollen|codeine|"
    "sulfonamides".split("|"),
}
_SAID = {
    "medication": "The medication {what} was started.",
    "diagnosis": "The diagnosis of {what} was made.",
    "operation": "The operation performed was {what}.",
    "allergy": "An allergy to {what} was found.",
}
_ASKED = {
    "medication": "Which medication was started for {name} on {date}?",
    "diagnosis": "Which diagnosis was made in {name} on {date}?",
    "operation": "Which operation was performed on {name} on {date}?",
    "allergy": "Which allergy was found in {name} on {date}?",
}
_FILLER = (
    "The patient was admitted in good general condition.",
    "Vital signs were stable throughout the stay.",
    "Laboratory values were within the reference range.",
    "The further course was without complications.",
    "Mobilisation with physiotherapy went well.",
    "We recommend a follow-up with the family doctor.",
    "The findings were explained to the patient in detail.",
    "Discharge took place in stable condition.",
)


class _Letter(NamedTuple):
    """The content of one letter."""

    name: str
    born: str
    date: str
    kind: str
    what: str

    def text(self, rng: random.Random) -> str:
        filler = rng.sample(_FILLER, 4)
        said = _SAID[self.kind].format(what=self.what)
        lines = [*filler[:2], said, *filler[2:]]
        return (
            f"Dear colleague, we report on {self.name}, born {self.born}, seen on {self.date}. "
            + " ".join(lines)
            + " With kind regards."
        )


def sample(length: int, seed: int, *, tokens: Tokens = BYTES) -> Sample:
    """A made-up patient's letters among those of others, and one question, in `length` tokens."""
    rng = random.Random(f"longhealth {seed}")
    names = [f"{first} {last}" for first in _FIRST for last in _LAST]
    rng.shuffle(names)
    patient, others = names[0], names[1:]
    dates = [
        f"{d:02}.{m:02}.20{y:02}" for y in range(10, 25) for m in range(1, 13) for d in (4, 19)
    ]
    kind = rng.choice(list(_FINDINGS))
    right, *wrong = rng.sample(_FINDINGS[kind], 5)
    rest = rng.sample([other for other in _FINDINGS if other != kind], 2)
    found = [(kind, right), (kind, wrong[0]), *((k, rng.choice(_FINDINGS[k])) for k in rest)]
    born = _birthday(rng)
    own = [
        _Letter(patient, born, date, *finding)
        for date, finding in zip(rng.sample(dates, 4), found, strict=True)
    ]
    decoys = [
        _Letter(name, _birthday(rng), rng.choice(dates), kind, what)
        for name, what in zip(rng.sample(others, 3), wrong[1:], strict=True)
    ]
    asked = own[0]
    options = [right, *wrong]
    rng.shuffle(options)
    question = (
        "\n\nQuestion: "
        + _ASKED[kind].format(name=patient, date=asked.date)
        + "".join(f"\n{letter}: {option}" for letter, option in zip(LETTERS, options, strict=True))
    )
    texts = [letter.text(rng) for letter in rng.sample([*own, *decoys], 7)]
    seed_of_others = rng.random()

    def letters() -> Iterator[str]:
        again = random.Random(seed_of_others)
        while True:
            other = again.choice(list(_FINDINGS))
            finding = again.choice(_FINDINGS[other])
            who = again.choice(others), _birthday(again), again.choice(dates)
            yield _Letter(*who, other, finding).text(again)

    room = length - 16 - tokens.count(question + _PREFIX) - tokens.count(_HEAD)
    room -= sum(tokens.count("\n\n" + text) for text in texts)
    if room < 0:
        raise ValueError(f"longhealth: a patient's letters do not fit in {length} tokens")
    count = 0
    for text in letters():
        room -= tokens.count("\n\n" + text)
        if room < 0:
            break
        count += 1
    places = sorted(rng.randrange(count + 1) for _ in texts)

    def pieces() -> Iterator[str]:
        yield _HEAD
        every = scatter(islice(letters(), count), zip(places, texts, strict=True))
        yield from ("\n\n" + text for text in every)

    return _choice(length, pieces, question, LETTERS[options.index(right)])


def _birthday(rng: random.Random) -> str:
    return f"{rng.randint(1, 28):02}.{rng.randint(1, 12):02}.{rng.randint(1930, 1995)}"


_HEAD = "Letters of a hospital follow."
_PREFIX = "\nAnswer:"


def load(path: str | Path) -> Iterator[Sample]:
    """Every question of the benchmark's own file (`benchmark_v5.json`), each with its patient.

    A patient has `texts` (documents by name) and `questions`; a question has `question`,
    `answer_a` to `answer_e` and `correct`, the text of the right one.
    """
    patients = json.loads(Path(path).read_text())
    for name, patient in patients.items():
        for entry in patient["questions"]:
            options = [str(entry[f"answer_{letter.lower()}"]) for letter in LETTERS]
            right = str(entry["correct"])
            if right not in options:
                raise ValueError(f"{path}: {name}: correct={right!r} is none of the five answers")
            question = f"\n\nQuestion: {entry['question']}" + "".join(
                f"\n{letter}: {text}" for letter, text in zip(LETTERS, options, strict=True)
            )
            texts = list(patient["texts"].values())
            yield _choice(0, partial(_documents, texts), question, LETTERS[options.index(right)])


def _documents(texts: list[str]) -> Iterator[str]:
    """Documents with a blank line between them."""
    for number, text in enumerate(texts):
        yield "\n\n" + text if number else text


def _choice(length: int, pieces: Callable[[], Iterator[str]], question: str, letter: str) -> Sample:
    return Sample(
        task="longhealth",
        length=length,
        pieces=pieces,
        question=question,
        prefix=_PREFIX,
        answers=(letter,),
        labels=LETTERS,
        answer_tokens=8,
    )


def score(given: Sample, output: str) -> float:
    """1 if the first letter A to E that stands alone in the output is the right one."""
    found = re.search(r"\b([A-E])\b", output)
    return float(found is not None and found[1] == given.answers[0])
