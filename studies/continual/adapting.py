"""`nestling.adapt` as a continual learner: the public interface, label texts and all.

The learner reads lines `text => label` as one stream and learns every token of it; a question is
answered by the label whose tokens the language model finds most likely. No readout, no task
boundary, no class is known to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nestling.adaptation import adapt
from studies.continual.base import Base
from studies.continual.features import Encoded
from studies.continual.learner import Method
from studies.continual.prompting import InContext, line

__all__ = ["Adapted"]


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
