"""Suites of long-context tasks by name, and what a model makes of them.

`suite(name, ...)` gives samples; `answer` lets a model read them, in constant memory where it can,
and write; `evaluate` does both and averages the scores per task and length.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nestling.checks import one_of, require
from nestling.evaluate import babilong, longhealth, qasper, ruler
from nestling.evaluate.samples import BYTES, Books, Sample, Score, Tokens, Words

__all__ = ["SUITES", "Sources", "TaskScore", "answer", "evaluate", "samples"]


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where the texts of the suites come from; each is needed by some tasks only."""

    words: Words | None = None
    books: Books | None = None
    babi: Path | None = None
    qasper: Path | None = None

    @classmethod
    def load(cls, folder: str | Path) -> Sources:
        """The sources in a folder: `ruler_words/`, `gutenberg_books/`, `babi/`, `qasper_leval/`."""
        root = Path(folder)
        if not root.is_dir():
            raise ValueError(f"{folder}: no such folder of data")
        words, books, babi, papers = (
            root / name for name in ("ruler_words", "gutenberg_books", "babi", "qasper_leval")
        )
        return cls(
            words=Words.load(words) if words.is_dir() else None,
            books=Books.load(books) if books.is_dir() else None,
            babi=babi if babi.is_dir() else None,
            qasper=next(iter(sorted(papers.glob("*.jsonl*"))), None) if papers.is_dir() else None,
        )

    def need(self, field: str) -> Any:
        found = getattr(self, field)
        if found is None:
            raise ValueError(
                f"this task needs {field}, which the data do not hold; folders are ruler_words"
                " (words), gutenberg_books (books), babi and qasper_leval (qasper)"
            )
        return found


class _Suite(NamedTuple):
    tasks: tuple[str, ...]
    make: Callable[[str, int, int, Sources, Tokens], Iterator[Sample]]
    score: Score


def _ruler(task: str, length: int, seed: int, data: Sources, tokens: Tokens) -> Iterator[Sample]:
    words, books = data.need("words"), data.need("books")
    for number in count(seed):
        yield ruler.sample(task, length, number, words=words, books=books, tokens=tokens)


def _babilong(task: str, length: int, seed: int, data: Sources, tokens: Tokens) -> Iterator[Sample]:
    folder, books = data.need("babi"), data.need("books")
    every = babilong.stories(folder, task)
    chosen = babilong.chosen(folder, task)
    given = every if chosen is None else tuple(every[index] for index in chosen)
    fitting = babilong.fitting(given, length)
    if not fitting:
        raise ValueError(f"{task}: no story fits in {length} tokens")
    order = random.Random(f"{task} {seed}").sample(range(len(fitting)), len(fitting))
    for number, index in zip(count(seed), cycle(order), strict=False):
        story = fitting[index]
        yield babilong.sample(task, length, number, story=story, books=books, tokens=tokens)


def _longhealth(
    task: str, length: int, seed: int, data: Sources, tokens: Tokens
) -> Iterator[Sample]:
    del task, data
    return (longhealth.sample(length, number, tokens=tokens) for number in count(seed))


SUITES: dict[str, _Suite] = {
    "ruler": _Suite(ruler.TASKS, _ruler, ruler.score),
    "babilong": _Suite(babilong.TASKS, _babilong, babilong.score),
    "qasper": _Suite(  # the papers are as long as they are
        ("qasper",),
        lambda task, length, seed, data, tokens: qasper.samples(data.need("qasper")),
        qasper.score,
    ),
    "longhealth": _Suite(("longhealth",), _longhealth, longhealth.score),
}
"""The suites by name."""


def samples(
    suite: str,
    task: str,
    length: int,
    *,
    data: Sources,
    count: int,
    seed: int = 42,
    tokens: Tokens = BYTES,
) -> Iterator[Sample]:
    """`count` samples of a suite's task at a length, the same for the same seed."""
    one_of("suite", suite, SUITES)
    one_of(f"task of {suite}", task, SUITES[suite].tasks)
    require(count >= 1, "count", count, "at least 1")
    # seeds of different runs must not meet: sample i of seed s is not sample i - 1 of seed s + 1
    start = random.Random(seed).getrandbits(48)
    return islice(SUITES[suite].make(task, length, start, data, tokens), count)


# Reading


@torch.no_grad()
def answer(
    model: Any,
    given: Sequence[Sample],
    tokenizer: Any,
    *,
    piece: int = 1024,
    tokens: int | None = None,
) -> list[str]:
    """A model's greedy continuation of each sample; samples are read side by side.

    A nestling model reads `piece` tokens of each at a time and keeps its memories' state, so the
    samples may have any length. Any other model gets one whole sample at a time.
    tokens: of the answer at most; by default what the task allows.
    """
    most = max(each.answer_tokens for each in given) if tokens is None else tokens
    if not hasattr(model, "stream"):
        return [_generate(model, each, tokenizer, most) for each in given]
    rows = [_ids(each, tokenizer) for each in given]
    cache = model.make_cache()
    last = _read(model, rows, cache, piece)
    written: list[list[int]] = [[] for _ in given]
    end = tokenizer.eos_token_id
    for _ in range(most):
        following = last.argmax(-1)  # [B]
        for row, token in zip(written, following.tolist(), strict=True):
            row.append(token)
        if all(end in row for row in written):
            break
        step = model(input_ids=following[:, None], past_key_values=cache, use_cache=True)
        last = step.logits[:, -1]
    return [_decode(row, tokenizer) for row in written]


def _ids(given: Sample, tokenizer: Any) -> Iterator[int]:
    """A sample's tokens, a piece of text at a time."""
    return chain.from_iterable(map(Tokens(tokenizer).ids, given.stream()))


def _read(model: Any, rows: list[Iterator[int]], cache: Any, piece: int) -> Tensor:
    """Read all rows to their ends; the logits after each row's last token: [B, V].

    Rows that have ended are masked while others go on: a masked token leaves no trace.
    """
    require(piece >= 1, "piece", piece, "at least 1 token")
    last: Tensor | None = None
    while True:
        taken = [list(islice(row, piece)) for row in rows]
        longest = max(map(len, taken))
        if not longest:
            if last is None:
                raise ValueError("there is nothing to read")
            return last
        ids = torch.zeros(len(rows), longest, dtype=torch.long, device=model.device)
        mask = torch.zeros_like(ids)
        for number, some in enumerate(taken):
            ids[number, : len(some)] = torch.tensor(some, dtype=torch.long)
            mask[number, : len(some)] = 1
        at = (mask.sum(1) - 1).clamp(min=0)  # the last token of each row
        places, which = at.unique(return_inverse=True)
        read = model(  # (the whole model: its levels may learn from what they read)
            input_ids=ids,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1 if places.tolist() == [longest - 1] else places,
        )
        logits = read.logits[torch.arange(len(rows), device=ids.device), which]
        goes_on = mask.any(1, keepdim=True)
        last = logits if last is None else torch.where(goes_on, logits, last)


def _generate(model: Any, given: Sample, tokenizer: Any, most: int) -> str:
    ids = torch.tensor([Tokens(tokenizer).ids(given.text())], device=model.device)
    made = model.generate(ids, max_new_tokens=most, do_sample=False)
    return _decode(made[0, ids.shape[1] :].tolist(), tokenizer)


def _decode(ids: list[int], tokenizer: Any) -> str:
    end = tokenizer.eos_token_id
    return str(tokenizer.decode(ids[: ids.index(end)] if end in ids else ids))


class TaskScore(NamedTuple):
    """The mean score of a task at a length, in percent, with the number of samples."""

    task: str
    length: int
    score: float
    samples: int


def evaluate(
    model: Any,
    tokenizer: Any,
    suite: str,
    lengths: Iterable[int],
    *,
    data: Sources,
    tasks: Sequence[str] | None = None,
    count: int = 100,
    seed: int = 42,
    batch: int = 4,
) -> Iterator[TaskScore]:
    """The scores of a model on a suite, task by task and length by length, as they are found."""
    for task in SUITES[suite].tasks if tasks is None else tasks:
        for length in lengths:
            made = samples(
                suite, task, length, data=data, count=count, seed=seed, tokens=Tokens(tokenizer)
            )
            scores: list[float] = []
            while some := list(islice(made, batch)):
                outputs = answer(model, some, tokenizer)
                scores += map(SUITES[suite].score, some, outputs)
            yield TaskScore(task, length, 100 * sum(scores) / len(scores), len(scores))
