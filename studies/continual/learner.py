"""One interface for every continual learner, and the gradient learner most of them are.

A method sees the training data of one task after another and gives scores to all classes; the
protocol, not the method, decides which classes count. What makes gradient methods differ are their
optimizer and their `Extra` (a penalty, a buffer): parts handed over, not overridden loops.

Shapes: N rows, D width, C classes.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from studies.continual.features import Encoded

__all__ = ["LOSSES", "Extra", "Gradient", "Method", "Training", "batch_loss", "stored_numbers"]

LOSSES = ("seen", "present", "squared")


class Method(abc.ABC):
    """A continual learner."""

    joint: bool = False
    """True: learn everything at once (the upper bound), not task by task."""

    @abc.abstractmethod
    def learn(self, data: Encoded, classes: Sequence[int]) -> None:
        """Learn one task: its examples and its classes."""

    @abc.abstractmethod
    def scores(self, data: Encoded) -> Tensor:
        """[N, C]: one score per class; higher is better. The labels in `data` are not read."""

    @abc.abstractmethod
    def stored(self) -> int:
        """Numbers kept beyond the base model: changed weights, state, buffers."""

    passes: int = 0
    """Forward and backward passes of the adapted part so far, counted in examples."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """How gradient methods train: the same for all of them.

    loss: "seen": softmax over the classes seen so far; "present": softmax over the classes of the
        batch only; "squared": squared error to one-hot targets over all classes.
    anneal: the rate falls to zero over each task.
    """

    loss: Literal["seen", "present", "squared"] = "present"
    epochs: int = 1
    rows: int = 32
    seed: int = 0
    anneal: bool = False

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ValueError(f"loss must be one of {', '.join(LOSSES)}; got {self.loss!r}")
        if self.epochs < 1 or self.rows < 1:
            raise ValueError(f"epochs and rows must be at least 1; got {self.epochs}, {self.rows}")


def batch_loss(logits: Tensor, y: Tensor, loss: str, seen: Sequence[int]) -> Tensor:
    """The mean loss of a batch [N, C] in one of the three forms of `Training.loss`."""
    if loss == "squared":
        target = nn.functional.one_hot(y, logits.shape[1])
        return 0.5 * (logits - target).square().sum(1).mean()
    allowed = y.unique() if loss == "present" else torch.tensor(list(seen))
    mask = torch.full((logits.shape[1],), -math.inf)
    mask[allowed] = 0.0
    return nn.functional.cross_entropy(logits + mask, y)


class Extra:
    """What a gradient method adds to plain training; this one adds nothing."""

    def begin(self, data: Encoded) -> None:
        """Before a task."""

    def mix(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The batch to learn from, given the new examples."""
        return x, y

    def penalty(self) -> Tensor | None:
        """A term of the loss."""
        return None

    def end(self, data: Encoded, seen: Sequence[int]) -> None:
        """After a task."""

    def stored(self) -> int:
        """Numbers it keeps from task to task."""
        return 0


class Gradient(Method):
    """Learns a network task by task with an optimizer."""

    def __init__(
        self,
        network: nn.Module,
        optimizer: Any,
        training: Training,
        *,
        extra: Extra | None = None,
        joint: bool = False,
    ) -> None:
        self.network, self.optimizer, self.training = network, optimizer, training
        self.extra = extra or Extra()
        self.joint = joint
        self.passes = 0
        self._seen: list[int] = []
        self._generator = torch.Generator().manual_seed(training.seed)

    def learn(self, data: Encoded, classes: Sequence[int]) -> None:
        self._seen += [c for c in classes if c not in self._seen]
        self.extra.begin(data)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for epoch in range(self.training.epochs):
            if self.training.anneal:
                for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * (1.0 - epoch / self.training.epochs)
            order = torch.randperm(len(data.y), generator=self._generator)
            for index in order.split(self.training.rows):
                self._step(*self.extra.mix(data.x[index], data.y[index]))
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.extra.end(data, self._seen)

    def _step(self, x: Tensor, y: Tensor) -> None:
        self.passes += len(y)
        self.optimizer.zero_grad()
        loss = batch_loss(self.network(x), y, self.training.loss, self._seen)
        penalty = self.extra.penalty()
        (loss if penalty is None else loss + penalty).backward()
        self.optimizer.step()

    @torch.no_grad()
    def scores(self, data: Encoded) -> Tensor:
        out: Tensor = self.network(data.x)
        return out

    def stored(self) -> int:
        changed = sum(p.numel() for p in self.network.parameters() if p.requires_grad)
        return changed + stored_numbers(self.optimizer) + self.extra.stored()


def stored_numbers(optimizer: Any) -> int:
    """The numbers in an optimizer's state."""
    states = optimizer.state_dict()["state"].values()
    return sum(
        value.numel()
        for state in states
        for value in state.values()
        if isinstance(value, Tensor) and value.ndim
    )
