"""Shared by the synthetic tasks: small models of equal size, one recipe, resumable results.

Every arm gets the same strings in the same order, the same steps and the same optimizer. Results go
to a JSON file as they come; a run that is there is not repeated.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nestling.files import write_atomic
from nestling.models import NestlingForCausalLM, presets

IGNORE = -100


class LSTM(nn.Module):
    """Embedding, LSTM layers and a read-out with about as many parameters as asked for."""

    def __init__(self, vocabulary: int, layers: int, parameters: int) -> None:
        super().__init__()
        width = max(
            w for w in range(8, 2048, 4) if 8 * w * (w + 1) * layers <= parameters or w == 8
        )
        self.embed = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(self.embed(ids))[0])
        return out


class Arm(nn.Module):
    """A language model that only gives its logits."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model = NestlingForCausalLM(config)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits


def arm_of(name: str, size: presets.Size, options: dict[str, dict[str, Any]]) -> nn.Module:
    """The model named `name`; `options` are its mixer's, by the arm's name."""
    if name == "lstm":
        return LSTM(size.vocabulary, size.layers, size.parameters)
    mixer = presets.MODELS[name]["mixer"]
    config = presets.configure(
        size, name, tie_word_embeddings=False, mixer_options={mixer: options.get(name, {})}
    )
    return Arm(config)


def train(
    model: nn.Module,
    batches: Callable[[int], tuple[Tensor, Tensor]],
    *,
    steps: int,
    rate: float = 3e-3,
    say: Callable[[str], None] = print,
) -> list[float]:
    """AdamW with warm-up and cosine decay; returns the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01, betas=(0.9, 0.98))
    losses = []
    start = time.perf_counter()
    for step in range(steps):
        ramp = min(1.0, (step + 1) / 50)
        decay = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate * ramp * decay
        ids, targets = batches(step)
        logits = model(ids)
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 250 == 0:
            pace = (time.perf_counter() - start) / (step + 1)
            say(f"  step {step + 1}: loss {sum(losses[-50:]) / 50:.4f}, {pace * 1e3:.0f} ms a step")
    return losses


@torch.no_grad()
def predict(model: nn.Module, ids: Tensor, batch: int = 250) -> Tensor:
    """The most likely class at every position."""
    return torch.cat([model(part).argmax(-1) for part in ids.split(batch)])


class Results:
    """A JSON file of finished runs: `key -> numbers`, written after every run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def __contains__(self, key: str) -> bool:
        return key in self.runs

    def add(self, key: str, numbers: dict[str, Any]) -> None:
        # other processes may have added theirs
        if self.path.exists():
            self.runs = json.loads(self.path.read_text()) | self.runs
        self.runs[key] = numbers
        write_atomic(self.path, json.dumps(self.runs, indent=1, sort_keys=True).encode())


def mean_and_interval(values: list[float]) -> str:
    """Mean and 95% interval of the mean (Student's t), in percent."""
    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return f"{100 * mean:.1f}"
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1))
    t = {2: 12.7, 3: 4.30, 4: 3.18, 5: 2.78}.get(n, 2.0)
    return f"{100 * mean:.1f} ± {100 * t * spread / math.sqrt(n):.1f}"
