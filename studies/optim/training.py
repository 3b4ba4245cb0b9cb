"""One training run: a task, an optimizer, a rate, a seed -> losses and times."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nestling.optim import M3, AdaMuon, Muon, param_groups
from studies.optim.networks import count, cross_entropy
from studies.optim.tasks import Task

BETAS = (0.9, 0.95)
DECAY = 0.1
Maker = Callable[[nn.Module, float], torch.optim.Optimizer]


def adamw(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """torch's own, the baseline everyone uses."""
    return torch.optim.AdamW(model.parameters(), lr=rate, betas=BETAS, weight_decay=DECAY)


def orthogonal(kind: type, **options: Any) -> Maker:
    """M3, Muon or AdaMuon: hidden matrices orthogonalised, the rest by AdamW at the same rate."""

    def make(model: nn.Module, rate: float) -> torch.optim.Optimizer:
        groups = param_groups(model)
        return kind(groups, lr=rate, adam_betas=BETAS, weight_decay=DECAY, **options)

    return make


ARMS: dict[str, Maker] = {
    "AdamW": adamw,
    "Muon": orthogonal(Muon),
    "AdaMuon": orthogonal(AdaMuon),
    "M3": orthogonal(M3),
    "M3 literal": orthogonal(M3, literal=True),
}


def schedule(step: int, steps: int) -> float:
    """Warm up over 5%, then down to a tenth along a cosine."""
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


def train(task: Task, make: Maker, rate: float, seed: int) -> dict[str, Any]:
    """Train once; the same seed gives every optimizer the same weights and the same batches."""
    torch.manual_seed(seed)
    model = task.model()
    optimizer = make(model, rate)
    generator = torch.Generator().manual_seed(1000 + seed)
    plan = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, task.steps))
    losses, stepping = [], 0.0
    begin = time.process_time()  # processor time of one thread: other work does not count
    for _ in range(task.steps):
        inputs, targets = task.batch(generator)
        loss = cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = time.process_time()
        optimizer.step()
        stepping += time.process_time() - before
        plan.step()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
    seconds = time.process_time() - begin
    tail = losses[-max(1, task.steps // 20) :]
    curve = [sum(part) / len(part) for part in _pieces(losses, 40)]
    return {
        "train": sum(tail) / len(tail) if math.isfinite(losses[-1]) else math.inf,
        **evaluate(model, task),
        "seconds": seconds,
        "step_seconds": stepping / len(losses),
        "parameters": count(model),
        "curve": curve,
    }


@torch.no_grad()
def evaluate(model: nn.Module, task: Task) -> dict[str, float]:
    """Loss and accuracy on the held-out batches."""
    model.eval()
    losses, right, total = [], 0, 0
    for inputs, targets in task.test():
        logits = model(inputs)
        losses.append(cross_entropy(logits, targets).item())
        right += int((logits.argmax(-1) == targets).sum())
        total += targets.numel()
    loss = sum(losses) / len(losses)
    return {"test": loss if math.isfinite(loss) else math.inf, "accuracy": right / total}


def _pieces(values: list[float], number: int) -> list[list[float]]:
    size = max(1, len(values) // number)
    return [values[i : i + size] for i in range(0, len(values), size)]
