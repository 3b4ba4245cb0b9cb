"""A language model that learns to translate at k levels, and translates greedily.

Shapes: N sentences, T tokens.
"""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nestling.blocks import Chain
from nestling.continual.base import Base
from nestling.continual.methods import CHUNKS
from nestling.continual.translation import Language, chrf
from nestling.levels import Level
from nestling.optim import NestedOptimizer

__all__ = ["Translator", "levels_of"]

_ARROW, _END = " = ", "\n"


def levels_of(model: nn.Module, k: int) -> list[list[nn.Parameter]]:
    """All weights in k groups: the MLPs of every chain by their place, the rest in the fastest."""
    groups: list[list[nn.Parameter]] = [[] for _ in range(k)]
    placed: set[int] = set()
    for module in model.modules():
        if isinstance(module, Chain):
            for number, mlp in enumerate(module.mlps):
                weights = list(mlp.parameters())
                groups[number * k // len(module.mlps)] += weights
                placed |= {id(weight) for weight in weights}
    if not placed:
        raise ValueError("levels need a model with a continuum memory, such as the base 'hope'")
    groups[0] += [p for p in model.parameters() if id(p) not in placed]
    return groups


class Translator:
    """A copy of a base model that learns pairs at k levels (Eq. 71), and translates greedily."""

    def __init__(self, base: Base, k: int, *, lr: float, rows: int = 8, length: int = 96) -> None:
        self.model, self.tokenizer = copy.deepcopy(base.model), base.tokenizer
        self.rows, self.length = rows, length
        parts = [
            (Level(name=f"level {i}", chunk=chunk), weights, lambda p: torch.optim.Adam(p, lr=lr))
            for i, (chunk, weights) in enumerate(
                zip(CHUNKS[k], levels_of(self.model, k), strict=True)
            )
        ]
        self.optimizer = NestedOptimizer(parts)

    def learn(self, pairs: Sequence[tuple[str, str]], epochs: int, seed: int) -> None:
        """Train on the English side of each line `sentence = English`."""
        draw = random.Random(seed)
        encoded = [self._line(*pair) for pair in pairs]
        self.model.train()
        for _ in range(epochs):
            draw.shuffle(encoded)
            for begin in range(0, len(encoded), self.rows):
                self._step(encoded[begin : begin + self.rows])
        self.model.eval()

    def _line(self, sentence: str, english: str) -> tuple[list[int], list[int]]:
        return self._ids(sentence + _ARROW), self._ids(english + _END)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids[: self.length]

    def _step(self, lines: list[tuple[list[int], list[int]]]) -> None:
        longest = max(len(a) + len(b) for a, b in lines)
        ids = torch.zeros(len(lines), longest, dtype=torch.long)
        labels = torch.full_like(ids, -100)
        for row, (source, target) in enumerate(lines):
            end = len(source) + len(target)
            ids[row, :end] = torch.tensor(source + target)
            labels[row, len(source) : end] = torch.tensor(target)
        self.optimizer.zero_grad()
        self.model(input_ids=ids, labels=labels, use_cache=False).loss.backward()
        self.optimizer.step()

    def score(self, language: Language, prompt: Sequence[tuple[str, str]] = ()) -> float:
        """chrF on the test pairs, after a prompt of pairs."""
        guesses = self.translate([sentence for sentence, _ in language.test], prompt)
        return chrf(guesses, [english for _, english in language.test])

    def translate(
        self, sentences: Sequence[str], prompt: Sequence[tuple[str, str]] = (), limit: int = 40
    ) -> list[str]:
        """Greedy English for each sentence; those of equal length are read together.

        After a prompt no answer may be empty: a base model that was not trained on pairs would
        often rather end the line at once.
        """
        start = [token for pair in prompt for part in self._line(*pair) for token in part][-512:]
        asked = [[*start, *self._ids(sentence + _ARROW)] for sentence in sentences]
        groups: dict[int, list[int]] = defaultdict(list)
        for number, ids in enumerate(asked):
            groups[len(ids)].append(number)
        out = [""] * len(asked)
        for members in groups.values():
            given = torch.tensor([asked[i] for i in members])
            made = self._greedy(given, limit, self._ends() if prompt else [])
            for number, ids in zip(members, made.tolist(), strict=True):
                out[number] = self.tokenizer.decode(ids).split(_END)[0].strip()
        return out

    def _ends(self) -> list[int]:
        """The tokens that end a line, or say nothing."""
        tokens = range(len(self.tokenizer))
        return [token for token in tokens if not self.tokenizer.decode([token]).strip()]

    @torch.no_grad()
    def _greedy(self, ids: Tensor, limit: int, not_first: list[int]) -> Tensor:
        """[N, T] -> [N, at most limit] new tokens, until every row has ended."""
        cache, made = None, list[Tensor]()
        ended = torch.zeros(len(ids), dtype=torch.bool)
        for _ in range(limit):
            done = self.model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache = done.past_key_values
            logits = done.logits[:, -1:]
            if not made:
                logits[..., not_first] = -torch.inf
            ids = logits.argmax(-1)  # [N, 1]
            made.append(ids)
            ended |= torch.tensor([_END in self.tokenizer.decode(row) for row in ids.tolist()])
            if ended.all():
                break
        return torch.cat(made, dim=1)
