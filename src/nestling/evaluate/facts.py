"""Facts a text states, as questions: does a model know them after it has learned the text?

A question is the beginning of one of the text's own sentences, up to a name, a place, a date or a
number. The answer competes with distractors of the same kind, most of them from the same text: it
counts as recalled when the model finds it likelier, per byte, than every distractor. With three
distractors a model that knows nothing is right a quarter of the time.

    questions = make_questions(text)
    before = recall(questions, likelihoods(model, tokenizer))
    ...                                             # learn the text
    after = recall(questions, likelihoods(learner, tokenizer))
    print(before.share, "->", after.share)
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nestling.checks import require

Scorer = Callable[[str, Sequence[str]], list[float]]
"""`scorer(prompt, options)`: the log-likelihood of every option as what follows the prompt."""

_SENTENCE = re.compile(r"(?<=[.!?])[\"')\]]*\s+|\n\s*\n|\n(?=\s*[-*•])")
_NUMBER = re.compile(r"(?<![\w.])\d+(?:[.,:]\d+)*(?!\w)")
_WORD = r"[A-Z][a-zà-öø-ÿ]+(?:-[A-Z]?[a-zà-öø-ÿ]+)*"
_NAME = re.compile(rf"(?<!\w){_WORD}(?:\s{_WORD})*")
_DATES = frozenset(
    "Monday Tuesday Wednesday Thursday Friday Saturday Sunday January February March April May"
    " June July August September October November December".split()
)
_PLACE = re.compile(r"\b(?:in|at|from|near|towards|into)\s(?:the\s)?$")
_PLAIN = frozenset("I I'm I've Mr Mrs Ms Dr".split())
_OPENERS = 3  # words a prompt has at least


class Question(NamedTuple):
    """The beginning of a sentence, what follows it in the text, and what might have instead."""

    prompt: str
    answer: str
    distractors: tuple[str, ...]
    kind: str  # "name", "place", "date" or "number"


class Recall(NamedTuple):
    """How many questions were answered right, and how clearly."""

    right: int
    asked: int
    margin: float  # mean log-likelihood per byte of the answer minus the best distractor's
    by_kind: dict[str, tuple[int, int]]  # kind: (right, asked)

    @property
    def share(self) -> float:
        """The share of questions answered right."""
        return self.right / self.asked if self.asked else 0.0


def make_questions(
    text: str, *, distractors: int = 3, most: int | None = None, seed: int = 0
) -> list[Question]:
    """Questions about the names, places, dates and numbers of a text, in its order.

    distractors: wrong options per question. most: at most so many questions, spread over the text.
    The same text, numbers and seed give the same questions.
    """
    require(distractors >= 1, "distractors", distractors, "at least 1")
    require(most is None or most >= 1, "most", most, "None or at least 1")
    facts = [
        fact for sentence in _SENTENCE.split(text) for fact in _facts(" ".join(sentence.split()))
    ]
    if most is not None and len(facts) > most:
        facts = [facts[len(facts) * place // most] for place in range(most)]
    every: dict[str, list[str]] = {}
    for fact in facts:
        known = every.setdefault(_pool(fact.kind), [])
        if fact.answer not in known:
            known.append(fact.answer)
    made = []
    for number, fact in enumerate(facts):
        chance = random.Random(f"{seed} {number} {fact.prompt} {fact.answer}")
        others = _others(fact, every[_pool(fact.kind)], distractors, chance)
        if len(others) == distractors:
            made.append(fact._replace(distractors=tuple(others)))
    return made


def recall(questions: Sequence[Question], scorer: Scorer) -> Recall:
    """Ask every question; the answer must be likelier per byte than each of its distractors."""
    right, gaps = 0, 0.0
    kinds: dict[str, tuple[int, int]] = {}
    for question in questions:
        options = [question.answer, *question.distractors]
        scores = scorer(question.prompt, options)
        each = [score / len(o.encode()) for score, o in zip(scores, options, strict=True)]
        gap = each[0] - max(each[1:])
        right, gaps = right + (gap > 0), gaps + gap
        won, asked = kinds.get(question.kind, (0, 0))
        kinds[question.kind] = won + (gap > 0), asked + 1
    margin = gaps / len(questions) if questions else 0.0
    return Recall(right, len(questions), margin, kinds)


def likelihoods(model: Any, tokenizer: Any) -> Scorer:
    """A scorer by any causal language model, or by a learner: `model(ids).logits`."""

    @torch.no_grad()
    def score(prompt: str, options: Sequence[str]) -> list[float]:
        start = _encode(tokenizer, prompt)
        rows = [_encode(tokenizer, f"{prompt} {option}") for option in options]
        longest = max(map(len, rows))
        filled = [
            row + [row[-1]] * (longest - len(row)) for row in rows
        ]  # what follows is not read
        tokens = torch.tensor(filled, device=model.device)
        logits = model(tokens).logits
        found = []
        for row, ids, answer in zip(rows, tokens, logits, strict=True):
            first = max(_shared(start, row) - 1, 0)
            chances = answer[first : len(row) - 1].double().log_softmax(-1)
            told: Tensor = chances.gather(1, ids[first + 1 : len(row), None])
            found.append(float(told.sum()))
        return found

    return score


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, verbose=False).input_ids
    return ids


def _shared(start: list[int], ids: list[int]) -> int:
    """How many tokens a prompt and its continuation begin with in common."""
    same = 0
    while same < min(len(start), len(ids) - 1) and start[same] == ids[same]:
        same += 1
    return same


def _facts(sentence: str) -> list[Question]:
    """The facts one sentence states; a fact told before in the sentence does not count."""
    found = []
    spans = [(m, "number") for m in _NUMBER.finditer(sentence)]
    spans += [(m, "name") for m in _NAME.finditer(sentence)]
    for match, kind in sorted(spans, key=lambda each: each[0].start()):
        before, answer = sentence[: match.start()], match[0]
        if len(before.split()) < _OPENERS or not before.endswith(" "):
            continue
        if answer in before or answer in _PLAIN:
            continue
        if kind == "name" and answer.split()[0] in _DATES:
            kind = "date"
        elif kind == "name" and _PLACE.search(before):
            kind = "place"
        found.append(Question(before.rstrip(), answer, (), kind))
    return found


def _pool(kind: str) -> str:
    """Names and places compete with one another: the words before them do not tell them apart."""
    return "name" if kind == "place" else kind


def _others(fact: Question, known: list[str], count: int, chance: random.Random) -> list[str]:
    """Wrong answers: others of the text that look alike, then made-up dates and numbers."""
    words = set(fact.answer.split())
    fits = [other for other in known if not words & set(other.split()) and other not in fact.prompt]
    if fact.kind == "number":
        fits = [other for other in fits if _shape(other) == _shape(fact.answer)]
    others = chance.sample(fits, min(count, len(fits)))
    if fact.kind == "date":
        rest = sorted(day for day in _DATES if day not in (*others, *words))
        others += chance.sample(rest, count - len(others))
    tries = 0
    while fact.kind == "number" and len(others) < count and tries < 100:
        made = re.sub(r"\d", lambda _: str(chance.randint(1, 9)), fact.answer)
        others += [made] if made not in (*others, fact.answer) else []
        tries += 1
    return others


def _shape(number: str) -> str:
    return re.sub(r"\d", "0", number)
