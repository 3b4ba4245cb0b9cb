"""QASPER: questions about scientific papers, from a file in L-Eval's form; score: token F1."""

from __future__ import annotations

import gzip
import json
import re
import string
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from nestling.evaluate.samples import Sample

__all__ = ["f1", "samples", "score"]


def samples(path: str | Path) -> Iterator[Sample]:
    """Every question of the file: JSON lines (.jsonl, .jsonl.gz) of a paper with its questions.

    A line has `input` (the paper), `instructions` (questions) and `outputs` (their answers).
    """
    opener = gzip.open if str(path).endswith(".gz") else open
    with opener(path, "rt") as file:
        for line in file:
            paper = json.loads(line)
            for question, answer in zip(paper["instructions"], paper["outputs"], strict=True):
                yield _sample(paper["input"], question, answer)


def _sample(paper: str, question: str, answer: str) -> Sample:
    def pieces() -> Iterator[str]:
        for number, paragraph in enumerate(paper.split("\n")):
            yield paragraph if number == 0 else "\n" + paragraph

    return Sample(
        task="qasper",
        length=0,
        pieces=pieces,
        question=f"\n\nQuestion: {question}",
        prefix="\nAnswer:",
        answers=(answer,),
        answer_tokens=64,
    )


def score(given: Sample, output: str) -> float:
    """The best token F1 of the output's first line with an answer."""
    line = output.strip().split("\n")[0]
    return max(f1(line, answer) for answer in given.answers)


def f1(output: str, answer: str) -> float:
    """The F1 of the words two texts share, without case, punctuation and articles (as SQuAD)."""
    said, wanted = _words(output), _words(answer)
    if not said or not wanted:
        return float(said == wanted)
    shared = (Counter(said) & Counter(wanted)).total()
    return 2 * shared / (len(said) + len(wanted))


def _words(text: str) -> list[str]:
    plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()
