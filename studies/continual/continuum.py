"""The continuum memory as a continual learner: levels that change what is read, and a readout.

Every batch is used twice. The readout, the fastest memory, writes what the levels made of it
(`discriminant.py`): sums, so nothing written is lost. The levels, the hidden units of the MLP split
over k clocks, take the gradient of the readout's cross-entropy over all classes known so far, and
change by the retaining rule (Eq. 59) when their chunk is full (Eq. 71): a change costs what it
would do to all inputs so far, and slow levels are stiff. The readout is solved anew at a clock of
its own. No task boundary is used and no example is kept.

Shapes: N rows, D width, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from studies.continual.discriminant import Discriminant
from studies.continual.features import Encoded
from studies.continual.learner import Method, Training, stored_numbers
from studies.continual.top import Top

__all__ = ["ContinuumLearner"]


class ContinuumLearner(Method):
    """Levels under a readout memory; `optimizer` holds the levels' weights and clocks.

    `optimizer=None`: the levels are frozen, and the readout alone learns. `chunk`: steps between
    two solutions of the readout while the levels learn.
    """

    def __init__(
        self,
        top: Top,
        readout: Discriminant,
        optimizer: Any | None,
        training: Training,
        *,
        chunk: int = 16,
    ) -> None:
        if chunk < 1:
            raise ValueError(f"chunk must be at least 1; got {chunk}")
        self.network, self.readout, self.optimizer = top, readout, optimizer
        self.training, self.chunk = training, chunk
        self.passes = 0
        self.position = 0
        self._read = readout.solve()
        self._generator = torch.Generator().manual_seed(training.seed)

    def learn(self, data: Encoded, classes: Sequence[int]) -> None:
        for _ in range(self.training.epochs):
            order = torch.randperm(len(data.y), generator=self._generator)
            for index in order.split(self.training.rows):
                self._step(data.x[index], data.y[index])
        self._read = self.readout.solve()

    def _step(self, x: Tensor, y: Tensor) -> None:
        self.passes += len(y)
        if self.optimizer is None:
            with torch.no_grad():
                self.readout.write(self.network.read(x), y)
            return
        if self.position % self.chunk == 0:
            self._read = self.readout.solve(torch.float32)
        self.position += 1
        r = self.network.read(x)  # [N, D]
        known = self._read[1][y].isfinite()
        if known.any():
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self._answer(r)[known], y[known]).backward()
            self.optimizer.step()
        self.readout.write(r.detach(), y)

    def _answer(self, r: Tensor) -> Tensor:
        weight, bias = self._read
        return r @ weight.T + bias

    @torch.no_grad()
    def scores(self, data: Encoded) -> Tensor:
        return self._answer(self.network.read(data.x))

    def stored(self) -> int:
        if self.optimizer is None:
            return self.readout.numel()
        changed = sum(p.numel() for g in self.optimizer.param_groups for p in g["params"])
        return changed + stored_numbers(self.optimizer) + self.readout.numel()
