"""Every way to learn a stream: continuum memories, and the usual ones at the same compute.

Each arm reads every token of the stream once, forward and backward. The memories update their MLPs
on an absolute clock (the fastest every 64 tokens). The others take a step every 64 tokens too, on
windows of 128 tokens of which the second half is new to them (so they pay twice the forward pass).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from texts import Base
from torch import Tensor, nn
from torch.nn import functional

import nestling
from nestling.stacking import Learner, Limits

CHUNK, WINDOW = 64, 128


class Arm(NamedTuple):
    """How to make a learner of a base model at a rate, and which rates are tried."""

    rates: tuple[float, ...]
    learn: Callable[[Base, Tensor, float], Callable[[Tensor], float]]


def memory(chunks: list[int], *, scale: float = 0.0, layers: Any = None, **options: Any) -> Any:
    """A continuum memory; level l's rate is `rate (chunk_l / chunk_1) ** scale`."""

    def learn(base: Base, stream: Tensor, rate: float) -> Callable[[Tensor], float]:
        learner = make_memory(base, chunks, rate, scale=scale, layers=layers, **options)
        learner.learn(stream)
        return learner.score

    return learn


def make_memory(
    base: Base, chunks: list[int], rate: float, *, scale: float = 0.0, **options: Any
) -> Learner:
    """A learner whose rates follow its chunks."""
    rates = [rate * (chunk / chunks[0]) ** scale for chunk in chunks]
    limits = Limits(drift=1e9)  # an arm may ruin itself: that is a result
    return nestling.adapt(
        base.model, chunks, rate=rates, tokenizer=base.tokenizer, limits=limits, **options
    )


def tuned(
    make: Callable[[nn.Module, float], torch.optim.Optimizer],
    *,
    replay: bool = False,
    penalty: float = 0.0,
    lora: int = 0,
    decay: float = 0.0,
) -> Any:
    """Fine-tuning of a copy: all weights, or LoRA; with replay, EWC or dynamic evaluation's decay.

    replay: every second window is old text, so half of the new text is never learned from.
    penalty: EWC, `penalty / 2 sum F (theta - theta_0)^2` with the Fisher information F of old text.
    decay: dynamic evaluation, which pulls back to the initial weights in proportion to RMS(g).
    """

    def learn(base: Base, stream: Tensor, rate: float) -> Callable[[Tensor], float]:
        model = copy.deepcopy(base.model)
        if lora:
            model = _with_lora(model, lora)
        else:
            model.requires_grad_(True)
        weights = [p for p in model.parameters() if p.requires_grad]
        start = [p.detach().clone() for p in weights]
        squares = _fisher(model, base.replay, weights) if penalty or decay else None
        optimizer = make(model, rate)
        for number, window in enumerate(_windows(stream)):
            if replay and number % 2:
                window = base.replay[number * CHUNK : number * CHUNK + WINDOW]
            optimizer.zero_grad()
            _loss(model, window, min(len(window) - 1, CHUNK)).backward()
            if penalty and squares is not None:
                for weight, first, square in zip(weights, start, squares):
                    weight.grad += penalty * square * (weight.detach() - first)
            if decay and squares is not None:
                _dynamic(weights, start, squares, rate, decay)
            else:
                optimizer.step()
        return lambda ids: _score(model, ids)

    return learn


def sgd(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate)


def adamw(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)


def _windows(stream: Tensor) -> Iterator[Tensor]:
    for end in range(CHUNK + 1, len(stream) + 1, CHUNK):
        yield stream[max(end - WINDOW, 0) : end]


def _loss(model: nn.Module, ids: Tensor, new: int) -> Tensor:
    """The mean loss of the last `new` targets of a window."""
    logits = model(ids[None]).logits[0, :-1]
    return functional.cross_entropy(logits[-new:].float(), ids[1:][-new:])


def _fisher(model: nn.Module, old: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """The mean square gradient of windows of old text."""
    squares = [torch.zeros_like(weight) for weight in weights]
    windows = [old[i : i + WINDOW] for i in range(0, 16 * WINDOW, WINDOW)]
    for window in windows:
        grads = torch.autograd.grad(_loss(model, window, WINDOW - 1), weights)
        for square, grad in zip(squares, grads):
            square += grad.square() / len(windows)
    return squares


@torch.no_grad()
def _dynamic(
    weights: list[Any], start: list[Tensor], squares: list[Tensor], rate: float, decay: float
) -> None:
    """Krause et al.: RMS-scaled steps, and a pull to the initial weights where RMS is large."""
    mean = sum(float(s.sqrt().sum()) for s in squares) / sum(s.numel() for s in squares)
    for weight, first, square in zip(weights, start, squares):
        root = square.sqrt()
        relative = (root / mean).clamp(max=1.0 / decay)
        weight -= rate * weight.grad / (root + mean)
        weight += decay * relative * (first - weight)


def _with_lora(model: nn.Module, rank: int) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    names = ["gate_proj", "up_proj", "down_proj"]
    return get_peft_model(
        model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names, lora_dropout=0.0)
    )


@torch.no_grad()
def _score(model: nn.Module, ids: Tensor) -> float:
    """As `Learner.score`, for a plain model."""
    context = min(model.config.max_position_embeddings, 1024)
    total, done = 0.0, 1
    while done < len(ids):
        start = max(0, done - context // 2)
        part = ids[start : start + context]
        logits = model(part[None]).logits[0, :-1].float()
        losses = functional.cross_entropy(logits, part[1:], reduction="none")
        total += float(losses[done - start - 1 :].double().sum())
        done = start + len(part)
    return total / (len(ids) - 1)


RATES = (0.0015, 0.004, 0.01, 0.02, 0.04, 0.08)
THREE, FOUR = [64, 256, 1024], [64, 128, 512, 2048]
KEPT = {3: [0.9, 0.95, 1.0], 4: [0.9, 0.92, 0.96, 1.0]}  # chosen on a book that is not a seed
LEVELS = (0.0011, 0.003, 0.007, 0.014, 0.03, 0.06)
SGD = (0.001, 0.003, 0.008, 0.016, 0.032)
PENALTIES = (1e2, 1e3, 1e4)  # of EWC; the best on that book is taken
ARMS: dict[str, Arm] = {
    "k=1": Arm(RATES, memory([64])),
    "k=1, retain 0.95": Arm((0.01, 0.02, 0.04, 0.08, 0.16), memory([64], retain=0.95)),
    "3 levels": Arm(LEVELS, memory(THREE, scale=1.0, retain=KEPT[3])),
    "4 levels": Arm(LEVELS, memory(FOUR, scale=1.0, retain=KEPT[4])),
    "SGD": Arm(SGD, tuned(sgd)),
    "AdamW": Arm((3e-5, 1e-4, 2e-4, 4e-4, 8e-4), tuned(adamw)),
    "LoRA": Arm((3e-4, 1e-3, 2e-3, 4e-3, 8e-3), tuned(adamw, lora=8)),
    "dynamic evaluation": Arm((1e-5, 3e-5, 1e-4, 3e-4, 1e-3), tuned(sgd, decay=0.02)),
    "replay": Arm((0.003, 0.008, 0.016, 0.032, 0.064), tuned(sgd, replay=True)),
}


def ewc(penalty: float) -> Arm:
    """Elastic weight consolidation."""
    return Arm((0.001, 0.002, 0.004, 0.006), tuned(sgd, penalty=penalty))


LAST = {"layers": "last 10"}
SMOLLM2: dict[str, Arm] = {
    "k=1": Arm((0.015,), memory([64], **LAST)),
    "3 levels": Arm((0.01,), memory([64, 256, 1024], scale=1.0, retain=KEPT[3], **LAST)),
}
LOOP: dict[str, tuple[list[int], float, dict[str, Any]]] = {
    "k=1": ([64], 0.02, {}),
    "3 levels": (THREE, 0.014, {"scale": 1.0, "retain": KEPT[3]}),
    "3 levels, move": (THREE, 0.014, {"scale": 1.0, "retain": KEPT[3], "transfer": "move"}),
}
