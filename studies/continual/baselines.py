"""The baselines: elastic weights, replay, low-rank adapters, dynamic evaluation, frozen features.

Shapes: N rows, D width, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from studies.continual.discriminant import Discriminant
from studies.continual.features import Encoded
from studies.continual.learner import Extra, Method, batch_loss
from studies.continual.top import Top

__all__ = [
    "ClosedStart",
    "Dynamic",
    "Elastic",
    "LowRank",
    "NearestMean",
    "Replay",
    "SharedCovariance",
]


class Elastic(Extra):
    """Elastic weight consolidation: `strength/2 sum_i F_i (theta_i - theta*_i)^2`.

    F is the diagonal of the Fisher information, from the squared gradients of single examples at
    the end of each task, summed over tasks (online EWC); theta* is the last task's end.
    """

    def __init__(self, network: nn.Module, strength: float, *, loss: str, sample: int = 64) -> None:
        if not strength >= 0.0:
            raise ValueError(f"strength must be at least 0; got {strength}")
        self.network, self.strength, self.loss, self.sample = network, strength, loss, sample
        self.weights = [p for p in network.parameters() if p.requires_grad]
        self.fisher: list[Tensor] = []
        self.anchor: list[Tensor] = []

    def penalty(self) -> Tensor | None:
        if not self.fisher:
            return None
        terms = [
            (f * (p - a).square()).sum()
            for f, p, a in zip(self.fisher, self.weights, self.anchor, strict=True)
        ]
        return 0.5 * self.strength * torch.stack(terms).sum()

    def end(self, data: Encoded, seen: Sequence[int]) -> None:
        step = max(1, len(data.y) // self.sample)
        fisher = [torch.zeros_like(p) for p in self.weights]
        rows = range(0, len(data.y), step)
        allowed = list(data.y.unique()) if self.loss == "present" else list(seen)
        form = "squared" if self.loss == "squared" else "seen"
        for i in rows:
            loss = batch_loss(self.network(data.x[i : i + 1]), data.y[i : i + 1], form, allowed)
            for total, grad in zip(fisher, torch.autograd.grad(loss, self.weights), strict=True):
                total += grad.square() / len(rows)
        if self.fisher:
            fisher = [new + old for new, old in zip(fisher, self.fisher, strict=True)]
        self.fisher = fisher
        self.anchor = [p.detach().clone() for p in self.weights]

    def stored(self) -> int:
        return sum(t.numel() for t in (*self.fisher, *self.anchor))


class Replay(Extra):
    """Experience replay: a few examples of every class are kept and mixed into every batch.

    As many old examples as new ones join a batch, so a step costs twice a plain one.
    """

    def __init__(self, per_class: int, seed: int) -> None:
        if per_class < 1:
            raise ValueError(f"per_class must be at least 1; got {per_class}")
        self.per_class = per_class
        self.kept: Encoded | None = None
        self._generator = torch.Generator().manual_seed(seed)

    def mix(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if self.kept is None:
            return x, y
        pick = torch.randint(len(self.kept.y), (len(y),), generator=self._generator)
        return torch.cat([x, self.kept.x[pick]]), torch.cat([y, self.kept.y[pick]])

    def end(self, data: Encoded, seen: Sequence[int]) -> None:
        order = torch.randperm(len(data.y), generator=self._generator)
        y = data.y[order]
        number = torch.stack([(y[: i + 1] == y[i]).sum() for i in range(len(y))])  # 1 = first
        pick = order[number <= self.per_class]
        x, y = data.x[pick], data.y[pick]
        if self.kept is not None:
            x, y = torch.cat([self.kept.x, x]), torch.cat([self.kept.y, y])
        self.kept = Encoded(x=x, y=y)

    def stored(self) -> int:
        return 0 if self.kept is None else self.kept.x.numel() + self.kept.y.numel()


class ClosedStart(Extra):
    """Before learning, the head takes the closed-form readout of all the data, times `temper`."""

    def __init__(self, top: Top, readout: Discriminant, temper: float) -> None:
        self.top, self.readout, self.temper = top, readout, temper

    @torch.no_grad()
    def begin(self, data: Encoded) -> None:
        if self.top.readout != "head":
            return
        self.readout.write(self.top.read(data.x), data.y)
        weight, bias = self.readout.solve()
        seen = bias.isfinite()
        self.top.head.weight[seen] = self.temper * weight[seen]
        self.top.head.bias[seen] = self.temper * (bias[seen] - bias[seen].mean())


class LowRank(nn.Module):
    """LoRA: every adapted weight of the channel becomes `W + B A` with W frozen, rank r.

    B starts at zero, so the network starts as the base model. A head learns as it is.
    """

    def __init__(self, top: Top, rank: int, seed: int) -> None:
        super().__init__()
        if rank < 1:
            raise ValueError(f"rank must be at least 1; got {rank}")
        self.top = top
        names = {id(p): n for n, p in top.named_parameters()}
        head = {id(p) for p in top.head.parameters()}
        generator = torch.Generator().manual_seed(seed)
        self.names, self.down, self.up = [], nn.ParameterList(), nn.ParameterList()
        for weight in top.adapted():
            if id(weight) in head:
                continue
            weight.requires_grad_(False)
            out, into = weight.shape
            self.names.append(names[id(weight)])
            start = torch.randn(rank, into, generator=generator) / into**0.5
            self.down.append(nn.Parameter(start))
            self.up.append(nn.Parameter(torch.zeros(out, rank)))

    def forward(self, x: Tensor) -> Tensor:
        """[N, D] -> [N, C]."""
        weights = dict(self.top.named_parameters())
        changed = {
            name: weights[name] + up @ down
            for name, up, down in zip(self.names, self.up, self.down, strict=True)
        }
        out: Tensor = torch.func.functional_call(self.top, changed, (x,))
        return out


class Dynamic(Optimizer):
    """Dynamic evaluation: gradients over their running size, and decay to the starting weights.

    `theta <- theta - lr g / (sqrt(mean g^2) + eps) + decay (theta_0 - theta)`, with the mean of the
    squares over all steps so far.
    """

    def __init__(self, params: Iterable[Any], lr: float, *, decay: float = 1e-3) -> None:
        if not (lr >= 0.0 and 0.0 <= decay <= 1.0):
            raise ValueError(f"lr must be at least 0 and decay in [0, 1]; got {lr}, {decay}")
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["start"] = weight.clone()
                    state["squares"] = torch.zeros_like(weight)
                    state["count"] = torch.tensor(0.0)
                state["count"] += 1
                state["squares"] += (weight.grad.square() - state["squares"]) / state["count"]
                weight -= group["lr"] * weight.grad / (state["squares"].sqrt() + 1e-3)
                weight.lerp_(state["start"], group["decay"])
        return None


class NearestMean(Method):
    """Frozen features, and the nearest class mean (by cosine)."""

    def __init__(self, classes: int, width: int) -> None:
        self.sums = torch.zeros(classes, width)
        self.counts = torch.zeros(classes)

    def learn(self, data: Encoded, classes: Sequence[int]) -> None:
        self.sums.index_add_(0, data.y, data.x)
        self.counts.index_add_(0, data.y, torch.ones(len(data.y)))

    @property
    def means(self) -> Tensor:
        """[C, D]; zero for a class not seen."""
        return self.sums / self.counts.clamp(min=1).unsqueeze(1)

    def scores(self, data: Encoded) -> Tensor:
        centre = self.sums.sum(0) / self.counts.sum().clamp(min=1)
        means = nn.functional.normalize(self.means - centre, dim=1)
        out = nn.functional.normalize(data.x - centre, dim=1) @ means.T
        return out.masked_fill(self.counts == 0, -2.0)

    def stored(self) -> int:
        return self.sums.numel() + self.counts.numel()


class SharedCovariance(Method):
    """Frozen features and linear discriminant analysis: class means, one covariance, no forgetting.

    Sums only, so one pass in any order gives the same classifier. `shrink` mixes the covariance
    with a multiple of the identity. `read` maps features [N, D] to the rows [N, width] to use.
    """

    def __init__(
        self,
        classes: int,
        width: int,
        *,
        shrink: float = 1e-2,
        prior: float = 0.0,
        read: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.memory = Discriminant(classes, width, shrink=shrink, prior=prior)
        self.read = read
        self._solved: tuple[Tensor, Tensor] | None = None

    def _rows(self, data: Encoded) -> Tensor:
        if self.read is None:
            return data.x
        with torch.no_grad():
            return self.read(data.x)

    def learn(self, data: Encoded, classes: Sequence[int]) -> None:
        self.memory.write(self._rows(data), data.y)
        self._solved = None

    def scores(self, data: Encoded) -> Tensor:
        if self._solved is None:
            self._solved = self.memory.solve()
        weight, bias = self._solved
        return self._rows(data) @ weight.T + bias

    def stored(self) -> int:
        return self.memory.numel()
