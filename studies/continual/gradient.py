"""Learners by gradients on frozen features: what closed-form memories are compared with.

All of them train the same network, a residual MLP and a linear head over the places of the base,
with AdamW, batch by batch; they differ in the penalty or the buffer they add, or in the optimizer.

Shapes: N rows, P places, D width of a place, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu

from studies.continual.memories import unit

__all__ = ["Dynamic", "Elastic", "Gradient", "Network", "PerTask", "Replay"]


class Network(nn.Module):
    """Places of the base, side by side, a residual MLP that starts at zero, and a linear head."""

    def __init__(self, width: int, classes: int, hidden: int = 512) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)
        self.head = nn.Linear(width, classes)
        for weight in (self.down.weight, self.head.weight, self.head.bias):
            nn.init.zeros_(weight)

    def forward(self, x: Tensor) -> Tensor:
        """[N, width] -> [N, C]."""
        out: Tensor = self.head(x + self.down(gelu(self.up(x))))
        return out


class Gradient:
    """Trains a network on each task for some epochs; the softmax is over the classes of the batch.

    joint: all tasks at once, the upper bound. rate: AdamW's, falling to zero over each task.
    """

    def __init__(
        self,
        network: nn.Module,
        places: Sequence[int],
        *,
        rate: float,
        epochs: int,
        seed: int,
        joint: bool = False,
        rows: int = 32,
    ) -> None:
        if epochs < 1 or rows < 1:
            raise ValueError(f"epochs and rows must be at least 1; got {epochs}, {rows}")
        self.network, self.places, self.joint = network, tuple(places), joint
        self.rate, self.epochs, self.rows = rate, epochs, rows
        self.optimizer: Any = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=0.01)
        self._draw = torch.Generator().manual_seed(seed)

    def input(self, x: Tensor) -> Tensor:
        """[N, P, D] -> [N, width]: the chosen places, scaled to a variance of about one."""
        rows = unit(x, self.places)
        return rows.flatten(1) * math.sqrt(rows.shape[-1])

    def learn(self, x: Tensor, y: Tensor) -> None:
        """One task."""
        x = self.input(x)
        steps = self.epochs * math.ceil(len(y) / self.rows)
        done = 0
        for _ in range(self.epochs):
            for index in torch.randperm(len(y), generator=self._draw).split(self.rows):
                for group in self.optimizer.param_groups:
                    group["lr"] = self.rate * (1 - done / steps)
                self.optimizer.zero_grad()
                loss = present(self.network, *self.mixed(x[index], y[index])) + self.penalty()
                loss.backward()
                self.optimizer.step()
                done += 1
        self.ended(x, y)

    def mixed(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The batch to learn from, given the new examples."""
        return x, y

    def penalty(self) -> Tensor | float:
        """A term of the loss."""
        return 0.0

    def ended(self, x: Tensor, y: Tensor) -> None:
        """After a task."""

    @torch.no_grad()
    def scores(self, x: Tensor) -> Tensor:
        """[N, P, D] -> [N, C]."""
        out: Tensor = self.network(self.input(x))
        return out

    def stored(self) -> int:
        """Numbers kept beyond the base: weights, and what lasts from task to task."""
        return sum(p.numel() for p in self.network.parameters())


def present(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The cross-entropy among the classes of the batch."""
    logits = network(x)
    mask = torch.full((logits.shape[1],), -math.inf).index_fill_(0, y.unique(), 0.0)
    return cross_entropy(logits + mask, y)


class Elastic(Gradient):
    """Elastic weight consolidation: `strength/2 sum_i F_i (theta_i - theta*_i)^2`.

    F is the diagonal of the Fisher information from the squared gradients of single examples at the
    end of each task, summed over tasks (online EWC); theta* is the last task's end.
    """

    def __init__(self, *given: Any, strength: float, **more: Any) -> None:
        super().__init__(*given, **more)
        self.strength = strength
        self.weights = list(self.network.parameters())
        self.fisher = [torch.zeros_like(p) for p in self.weights]
        self.anchor = [p.detach().clone() for p in self.weights]

    def penalty(self) -> Tensor | float:
        """The elastic term."""
        parts = zip(self.fisher, self.weights, self.anchor, strict=True)
        terms = [(f * (p - a).square()).sum() for f, p, a in parts]
        return 0.5 * self.strength * torch.stack(terms).sum()

    def ended(self, x: Tensor, y: Tensor) -> None:
        """Add the task's Fisher information."""
        rows = range(0, len(y), max(1, len(y) // 64))
        classes = y.unique()
        for i in rows:
            logits = self.network(x[i : i + 1])[:, classes]
            loss = cross_entropy(logits, (classes == y[i]).nonzero()[0])
            for total, grad in zip(
                self.fisher, torch.autograd.grad(loss, self.weights), strict=True
            ):
                total += grad.square() / len(rows)
        self.anchor = [p.detach().clone() for p in self.weights]

    def stored(self) -> int:
        """Weights, Fisher information and anchor."""
        return 3 * super().stored()


class Replay(Gradient):
    """Some examples of every class are kept; as many old ones as new ones join each batch."""

    def __init__(self, *given: Any, per_class: int, **more: Any) -> None:
        super().__init__(*given, **more)
        if per_class < 1:
            raise ValueError(f"per_class must be at least 1; got {per_class}")
        self.per_class = per_class
        self.kept: list[tuple[Tensor, Tensor]] = []

    def mixed(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """New examples and old ones."""
        if not self.kept:
            return x, y
        old_x, old_y = (torch.cat(parts) for parts in zip(*self.kept, strict=True))
        pick = torch.randint(len(old_y), (len(y),), generator=self._draw)
        return torch.cat([x, old_x[pick]]), torch.cat([y, old_y[pick]])

    def ended(self, x: Tensor, y: Tensor) -> None:
        """Keep the first examples of each class in a random order."""
        order = torch.randperm(len(y), generator=self._draw)
        for label in y.unique():
            pick = order[y[order] == label][: self.per_class]
            self.kept.append((x[pick], y[pick]))

    def stored(self) -> int:
        """Weights and examples."""
        return super().stored() + sum(x.numel() + len(y) for x, y in self.kept)


class PerTask:
    """Low-rank adapters: every task trains its own, `x + B A x` and a head, over the frozen base.

    A class is scored by the head of the task it came with; nothing that was learned changes.
    """

    joint = False

    def __init__(self, width: int, classes: int, rank: int, **more: Any) -> None:
        if rank < 1:
            raise ValueError(f"rank must be at least 1; got {rank}")
        self.shape, self.rank, self.more = (width, classes), rank, more
        self.tasks: list[tuple[Tensor, Gradient]] = []

    def learn(self, x: Tensor, y: Tensor) -> None:
        """A new adapter and head for the classes of this task."""
        network = _Adapter(*self.shape, self.rank)
        made = Gradient(network, **self.more)
        made.learn(x, y)
        self.tasks.append((y.unique(), made))

    def scores(self, x: Tensor) -> Tensor:
        """[N, P, D] -> [N, C]."""
        out = torch.full((len(x), self.shape[1]), -math.inf)
        for classes, made in self.tasks:
            out[:, classes] = made.scores(x)[:, classes]
        return out

    def stored(self) -> int:
        """Adapters, and the rows of their heads that serve."""
        width, _ = self.shape
        return sum(2 * self.rank * width + len(classes) * (width + 1) for classes, _ in self.tasks)


class _Adapter(nn.Module):
    def __init__(self, width: int, classes: int, rank: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)
        self.head = nn.Linear(width, classes)
        for weight in (self.up.weight, self.head.weight, self.head.bias):
            nn.init.zeros_(weight)

    def forward(self, x: Tensor) -> Tensor:
        """[N, width] -> [N, C]."""
        out: Tensor = self.head(x + self.up(self.down(x)))
        return out


class Dynamic(torch.optim.Optimizer):
    """Dynamic evaluation: gradients over their running size, and decay to the starting weights.

    `theta <- theta - lr g / (sqrt(mean g^2) + eps) + decay (theta_0 - theta)`, with the mean of the
    squares over all steps so far.
    """

    def __init__(self, params: Iterable[Any], lr: float, *, decay: float) -> None:
        if not (lr >= 0.0 and 0.0 <= decay <= 1.0):
            raise ValueError(f"lr must be at least 0 and decay in [0, 1]; got {lr}, {decay}")
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update."""
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state |= {"start": weight.clone(), "squares": torch.zeros_like(weight), "n": 0}
                state["n"] += 1
                state["squares"] += (weight.grad.square() - state["squares"]) / state["n"]
                weight -= group["lr"] * weight.grad / (state["squares"].sqrt() + 1e-3)
                weight.lerp_(state["start"], group["decay"])
        return None
