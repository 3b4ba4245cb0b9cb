"""The usual ways to learn a text: fine-tuning of a copy, whole or with LoRA, and its remedies.

Every token of the stream is read once, forward and backward, in windows that follow one another;
each window is a step. That is the compute of a continuum memory that steps as often.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nestling.losses import windowed_losses
from studies.adapt.texts import Base

Score = Callable[[Tensor], float]
Make = Callable[[list[Tensor], float], torch.optim.Optimizer]
OLD = 16  # windows of old text that EWC and dynamic evaluation measure before they begin


def tuned(make: Make, **options: Any) -> Callable[[Base, Tensor, float], Score]:
    """An arm of the frontier: a copy that learns one stream (`Tuned`), and its loss on any ids."""

    def learn(base: Base, stream: Tensor, rate: float) -> Score:
        copied = Tuned(base, make, rate, **options)
        copied.learn(stream)
        return lambda ids: score(copied.model, ids)

    return learn


class Tuned:
    """Fine-tuning of a copy: all weights, or LoRA; with replay, EWC or dynamic evaluation's decay.

    replay: every so-many-th window is old text instead of new.
    penalty: EWC, `penalty / 2 sum F (theta - theta_0)^2` with the Fisher information F of old text.
    pull: the same penalty as a proximal step after the optimizer's: stable where a gradient step
        diverges, and not rescaled by Adam.
    decay: dynamic evaluation, which pulls back to the initial weights in proportion to RMS(g).
    last: only the last so many decoder layers learn (LoRA: only their MLPs).
    squares: the Fisher information, where it was measured before.
    """

    def __init__(
        self,
        base: Base,
        make: Make,
        rate: float,
        *,
        window: int = 64,
        replay: int = 0,
        penalty: float = 0.0,
        pull: float = 0.0,
        lora: int = 0,
        decay: float | None = None,
        last: int | None = None,
        squares: list[Tensor] | None = None,
    ) -> None:
        self.model = (
            _with_lora(copy.deepcopy(base.model), lora, last) if lora else _open(base, last)
        )
        self.rate, self.window, self.replay = rate, window, replay
        self.penalty, self.pull, self.decay = penalty, pull, decay
        self.old = base.replay
        self.weights: list[Any] = [p for p in self.model.parameters() if p.requires_grad]
        self.start = [p.detach().clone() for p in self.weights]
        self.squares = squares or []
        if not self.squares and (penalty or pull or decay is not None):
            self.squares = _fisher(self.model, self.old, self.weights, window)
        self.optimizer = make(self.weights, rate)
        self.steps = 0

    def learn(self, stream: Tensor) -> None:
        """Read a stream once; what follows goes on from there."""
        for part in _windows(stream, self.window):
            self.steps += 1
            if self.replay and self.steps % self.replay == 0:
                place = self.steps * self.window % (len(self.old) - self.window)
                part = self.old[place : place + self.window + 1]
            self.optimizer.zero_grad()
            _loss(self.model, part).backward()
            if self.penalty:
                for weight, first, square in zip(self.weights, self.start, self.squares):
                    weight.grad += self.penalty * square * (weight.detach() - first)
            if self.decay is not None:
                _dynamic(self.weights, self.start, self.squares, self.rate, self.decay)
                continue
            self.optimizer.step()
            if self.pull:
                _pull(self.weights, self.start, self.squares, self.rate * self.pull)


def sgd(weights: list[Tensor], rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=rate)


def adamw(weights: list[Tensor], rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, lr=rate)


def _open(base: Base, last: int | None) -> nn.Module:
    """A copy whose weights learn: all, or those of the last decoder layers."""
    model = copy.deepcopy(base.model)
    first = 0 if last is None else model.config.num_hidden_layers - last
    for name, parameter in model.named_parameters():
        layer = re.search(r"\.layers\.(\d+)\.", name)
        parameter.requires_grad_(last is None or (layer is not None and int(layer[1]) >= first))
    return model


def _windows(stream: Tensor, window: int) -> Iterator[Tensor]:
    """Windows of `window` pairs, each pair once."""
    for start in range(0, len(stream) - 1, window):
        yield stream[start : start + window + 1]


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids[None, :-1]).logits[0]
    return functional.cross_entropy(logits.float(), ids[1:])


def _fisher(model: nn.Module, old: Tensor, weights: list[Tensor], window: int) -> list[Tensor]:
    """The mean square gradient of windows of old text."""
    squares = [torch.zeros_like(weight) for weight in weights]
    parts = [part for part in _windows(old, window) if len(part) > window][:OLD]
    for part in parts:
        for square, grad in zip(squares, torch.autograd.grad(_loss(model, part), weights)):
            square += grad.square() / len(parts)
    return squares


@torch.no_grad()
def _pull(weights: list[Any], start: list[Tensor], squares: list[Tensor], scale: float) -> None:
    """The proximal step of EWC: `argmin_w |w - theta|^2 + scale F (w - theta_0)^2`."""
    for weight, first, square in zip(weights, start, squares):
        weight.lerp_(first, scale * square / (1 + scale * square))


@torch.no_grad()
def _dynamic(
    weights: list[Any], start: list[Tensor], squares: list[Tensor], rate: float, decay: float
) -> None:
    """Krause et al.: RMS-scaled steps, and a pull to the initial weights where RMS is large."""
    mean = sum(float(s.sqrt().sum()) for s in squares) / sum(s.numel() for s in squares)
    for weight, first, square in zip(weights, start, squares):
        root = square.sqrt()
        relative = (root / mean).clamp(max=1.0 / decay if decay else None)
        weight -= rate * weight.grad / (root + mean)
        weight += decay * relative * (first - weight)


def _with_lora(model: nn.Module, rank: int, last: int | None) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    count = model.config.num_hidden_layers
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=["gate_proj", "up_proj", "down_proj"],
        layers_to_transform=None if last is None else list(range(count - last, count)),
        lora_dropout=0.0,
    )
    return get_peft_model(model, config)


@torch.no_grad()
def score(model: nn.Module, ids: Tensor) -> float:
    """As `Learner.score`, for a plain model."""
    context = min(model.config.max_position_embeddings, 1024)
    losses = windowed_losses(lambda part: model(part).logits, ids, context)
    return float(losses.double().mean())
