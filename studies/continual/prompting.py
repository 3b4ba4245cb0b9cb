"""Methods that read lines `text => label`: in-context learning, InCA, and `nestling.adapt`.

The language model scores label texts after the last `=>`. The first two change no weight; the third
learns the lines as one stream through the public interface, without a readout, a task boundary or a
class that is known to it.

Shapes: N texts, T tokens, C classes, V vocabulary.
"""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nestling.adaptation import adapt
from studies.continual.base import Base
from studies.continual.features import Encoded
from studies.continual.learner import Method

__all__ = ["Adapted", "InContext", "Proposals", "label_scores", "line"]

_ARROW = " =>"


def _ids(base: Base, text: str, limit: int | None = None) -> list[int]:
    ids: list[int] = base.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return ids if limit is None else ids[:limit]


def line(base: Base, text: str, label: str, length: int) -> list[int]:
    """The tokens of `text => label`, the text cut to `length` tokens."""
    return [*_ids(base, text, length), *_ids(base, f"{_ARROW} {label}\n")]


@torch.no_grad()
def label_scores(base: Base, prompts: Sequence[list[int]], labels: Sequence[str]) -> Tensor:
    """[N]: the mean log-probability of the tokens of `labels[i]` after `prompts[i]`."""
    ends = [_ids(base, f" {label}") for label in labels]
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, (prompt, end) in enumerate(zip(prompts, ends, strict=True)):
        groups[len(prompt), len(end)].append(i)
    out = torch.zeros(len(prompts))
    for (begin, size), members in groups.items():
        for part in torch.tensor(members).split(32):
            rows = torch.tensor([prompts[i] + ends[i] for i in part.tolist()])  # [n, T]
            logits = base.model(input_ids=rows, logits_to_keep=size + 1).logits[:, :-1]
            found = logits.float().log_softmax(-1).gather(2, rows[:, begin:, None])  # [n, size, 1]
            out[part] = found.mean((1, 2))
    return out


class InContext(Method):
    """In-context learning: the last `shots` examples of the stream stand before every question.

    A label's score is the mean log-probability of its tokens at the place of the answer's first
    token: one pass scores all classes.
    """

    def __init__(
        self, base: Base, classes: Sequence[str], *, shots: int = 24, length: int = 24
    ) -> None:
        if shots < 1:
            raise ValueError(f"shots must be at least 1; got {shots}")
        self.base, self.classes, self.length = base, tuple(classes), length
        self.context: deque[tuple[str, int]] = deque(maxlen=shots)
        labels = [_ids(base, f" {label}") for label in classes]
        self._bags = torch.zeros(len(labels), len(base.tokenizer))  # [C, V]
        for row, ids in zip(self._bags, labels, strict=True):
            for token in ids:
                row[token] += 1.0 / len(ids)

    def learn(self, data: Encoded, classes: Sequence[int]) -> None:
        per_class: dict[int, list[str]] = defaultdict(list)
        for text, label in zip(data.texts, data.y.tolist(), strict=True):
            per_class[label].append(text)
        for turn in range(self.context.maxlen or 1):  # class by class, round after round
            for label, texts in per_class.items():
                if turn < len(texts):
                    self.context.append((texts[turn], label))

    @torch.no_grad()
    def scores(self, data: Encoded) -> Tensor:
        lines = [line(self.base, text, self.classes[c], self.length) for text, c in self.context]
        start = [token for line in lines for token in line] or _ids(self.base, "\n")
        cache = self.base.model(input_ids=torch.tensor([start]), use_cache=True).past_key_values
        asked = [
            [*_ids(self.base, text, self.length), *_ids(self.base, _ARROW)] for text in data.texts
        ]
        groups: dict[int, list[int]] = defaultdict(list)
        for i, ids in enumerate(asked):
            groups[len(ids)].append(i)
        out = torch.zeros(len(asked), len(self.classes))
        for members in groups.values():
            for part in torch.tensor(members).split(32):
                rows = torch.tensor([asked[i] for i in part.tolist()])
                out[part] = self._ask(rows, cache)
        return out

    def _ask(self, rows: Tensor, cache: Any) -> Tensor:
        own = copy.deepcopy(cache)
        own.batch_repeat_interleave(len(rows))
        logits = self.base.model(
            input_ids=rows, past_key_values=own, use_cache=True, logits_to_keep=1
        ).logits[:, -1]
        scores: Tensor = logits.float().log_softmax(-1)[:, : self._bags.shape[1]] @ self._bags.T
        return scores

    def stored(self) -> int:
        return sum(len(_ids(self.base, text, self.length)) for text, _ in self.context)


class Proposals(Method):
    """InCA: a learner outside proposes a few classes, the language model chooses among them.

    The proposer keeps statistics of frozen features. The prompt holds one example of each proposed
    class (InCA's class summary; the example nearest to its mean) and the question.
    """

    def __init__(
        self,
        base: Base,
        classes: Sequence[str],
        proposer: Method,
        *,
        top: int = 3,
        length: int = 24,
    ) -> None:
        if top < 1:
            raise ValueError(f"top must be at least 1; got {top}")
        self.base, self.classes, self.proposer = base, tuple(classes), proposer
        self.top, self.length = top, length
        self.summary: dict[int, str] = {}
        self._known: dict[tuple[str, tuple[int, ...]], list[float]] = {}

    def learn(self, data: Encoded, classes: Sequence[int]) -> None:
        self.proposer.learn(data, classes)
        for label in data.y.unique().tolist():
            own = (data.y == label).nonzero().flatten()
            centre = data.x[own].mean(0)
            nearest = own[(data.x[own] - centre).square().sum(1).argmin()]
            self.summary[label] = data.texts[int(nearest)]

    def scores(self, data: Encoded) -> Tensor:
        proposed = self.proposer.scores(data)  # [N, C]
        if not self.summary:
            return proposed
        best = proposed.topk(min(self.top, len(self.summary)), dim=1).indices.sort(dim=1).values
        self._score(data.texts, best)
        out = proposed.clone() - 1e6  # those not proposed stay below, in the proposer's order
        for i, (text, row) in enumerate(zip(data.texts, best.tolist(), strict=True)):
            out[i, row] = torch.tensor(self._known[text, tuple(row)])
        return out

    def _score(self, texts: Sequence[str], best: Tensor) -> None:
        """Let the language model judge what it has not judged yet."""
        rows = [tuple(row) for row in best.tolist()]
        asked = dict.fromkeys(zip(texts, rows, strict=True))
        new = [pair for pair in asked if pair not in self._known]
        prompts, labels = [], []
        for text, row in new:
            lines = [line(self.base, self.summary[c], self.classes[c], self.length) for c in row]
            question = [*_ids(self.base, text, self.length), *_ids(self.base, _ARROW)]
            prompt = [token for line in lines for token in line] + question
            prompts += [prompt] * len(row)
            labels += [self.classes[c] for c in row]
        if new:
            judged = iter(label_scores(self.base, prompts, labels).tolist())
            for text, row in new:
                self._known[text, row] = [next(judged) for _ in row]

    def stored(self) -> int:
        kept = sum(len(_ids(self.base, text, self.length)) for text in self.summary.values())
        return kept + self.proposer.stored()


class Adapted(Method):
    """A model adapted by `nestling.adapt(model, chunks, rate=..., rule=...)` (Eq. 71)."""

    def __init__(
        self,
        base: Base,
        classes: Sequence[str],
        chunks: Sequence[int],
        *,
        rate: float,
        rule: Any = "gd",
        epochs: int = 1,
        seed: int = 0,
        length: int = 24,
    ) -> None:
        self.base, self.classes, self.epochs, self.length = base, tuple(classes), epochs, length
        self.learner = adapt(base.model, chunks, rate=rate, rule=rule, tokenizer=base.tokenizer)
        self._asked = InContext(base, classes, shots=1, length=length)  # with no line before it
        self._generator = torch.Generator().manual_seed(seed)
        self.passes = 0

    def learn(self, data: Encoded, classes: Sequence[int]) -> None:
        for _ in range(self.epochs):
            order = torch.randperm(len(data.y), generator=self._generator).tolist()
            self.passes += len(order)
            lines = (self._line(data.texts[i], int(data.y[i])) for i in order)
            self.learner.learn(torch.tensor([token for one in lines for token in one]))
        self.learner.new_text()

    def _line(self, text: str, label: int) -> list[int]:
        return line(self.base, text, self.classes[label], self.length)

    def scores(self, data: Encoded) -> Tensor:
        with self.learner.reading():
            return self._asked.scores(data)

    def stored(self) -> int:
        return sum(self.learner.size()[level.name] for level in self.learner.levels) // 4
