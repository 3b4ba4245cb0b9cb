"""A language model that learns to translate at k levels, and translates greedily.

Shapes: N sentences, T tokens.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nestling.continuum import Chain, Parallel
from nestling.levels import Level
from nestling.optim import NestedOptimizer
from studies.languages.base import Base
from studies.languages.translation import Language, chrf

__all__ = ["Translator", "levels_of"]

_ARROW, _END = " = ", "\n"


def levels_of(model: Any, k: int) -> list[list[nn.Parameter]]:
    """All weights in k groups, fastest first.

    A word's embedding serves that word alone and learns fastest. The MLPs of every continuum memory
    follow by their place, and what all languages share (mixers, norms) is in the slowest level.
    """
    memories = [module for module in model.modules() if isinstance(module, Chain | Parallel)]
    if not memories:
        raise ValueError("levels need a model with a continuum memory, such as the base 'hope'")
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    level = {id(weight): 0 for end in ends if end is not None for weight in end.parameters()}
    for memory in memories:
        for number, mlp in enumerate(memory.mlps):
            place = min(1, k - 1) + number * (k - 1) // len(memory.mlps)
            level |= {id(weight): place for weight in mlp.parameters()}
    groups: list[list[nn.Parameter]] = [[] for _ in range(k)]
    for weight in model.parameters():
        groups[level.get(id(weight), k - 1)].append(weight)
    return groups


class Translator:
    """A copy of a base model that learns pairs at several levels (Eq. 71), and translates greedily.

    clock: steps between the updates of each level, fastest first; `inf` for one that never learns.
    by_rate: all levels learn at every step, those of chunk C with a rate C times smaller.
    """

    def __init__(
        self,
        base: Base,
        clock: Sequence[float] = (1,),
        *,
        lr: float,
        rows: int = 8,
        length: int = 96,
        by_rate: bool = False,
    ) -> None:
        self.model, self.tokenizer = copy.deepcopy(base.model), base.tokenizer
        self.rows, self.length = rows, length
        parts = []
        for i, (chunk, weights) in enumerate(
            zip(clock, levels_of(self.model, len(clock)), strict=True)
        ):
            level = Level(name=f"level {i}", chunk=1 if by_rate else chunk)
            rate = lr / chunk if by_rate else lr
            parts.append((level, weights, partial(torch.optim.Adam, lr=rate)))
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

    def _pair(self, sentence: str, english: str) -> list[int]:
        return [token for part in self._line(sentence, english) for token in part]

    def fitting(self, pairs: Sequence[tuple[str, str]], room: int) -> list[tuple[str, str]]:
        """The first pairs that fit into a prompt of `room` tokens, whole."""
        lengths = itertools.accumulate(len(self._pair(*pair)) for pair in pairs)
        return [pair for pair, end in zip(pairs, lengths, strict=True) if end <= room]

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
        start = [token for pair in prompt for token in self._pair(*pair)]
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
