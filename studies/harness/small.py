"""Shared by the synthetic tasks: small models of equal size, one recipe, resumable results.

Every arm gets the same strings in the same order, the same steps and the same optimizer. Each
finished run is one JSON file; a run that is there, or in the page's copy, is not repeated.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from nestling.files import write_atomic
from nestling.models import NestlingForCausalLM, presets
from nestling.tree import tree_leaves
from studies.harness.lockstep import Lockstep
from studies.harness.verdict import interval

IGNORE = -100
T = TypeVar("T")
Batch = tuple[Tensor, Tensor, Tensor]  # tokens, targets, weights: [B, T] each


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


def arm_of(name: str, size: presets.Size, options: dict[str, Any], **fields: Any) -> nn.Module:
    """The model named `name` at a size; `options` are its mixer's, `fields` the configuration's."""
    if name == "lstm":
        return LSTM(size.vocabulary, size.layers, size.parameters)
    mixer = presets.MODELS[name]["mixer"]
    fields = {"tie_word_embeddings": False, "mixer_options": {mixer: options}, **fields}
    return Arm(presets.configure(size, name, **fields))


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def state_size(model: Arm) -> int:
    """Numbers a model carries from one token to the next, per sequence, at a chunk's start.

    All mixers, with their convolutions' tails, as the library's own states hold them. Within a
    chunk a self-modifying memory also keeps the weights where the chunk began.
    """
    total = 0
    for layer in model.model.model.init_states(1):
        for name, leaf in tree_leaves(layer.mixer):
            if not {"start", "position"} & set(name.split(".")):
                total += leaf.numel()
    return total


def train(
    model: nn.Module, batches: Callable[[int], Batch], *, steps: int, rate: float
) -> list[float]:
    """Train one model; returns the losses."""
    return train_all([model], [batches], steps=steps, rates=[rate])[0]


def train_all(
    models: list[nn.Module],
    batches: list[Callable[[int], Batch]],
    *,
    steps: int,
    rates: list[float],
) -> list[list[float]]:
    """AdamW with warm-up and cosine decay on the weighted cross-entropy; the losses of each model.

    Several models (of Hope, alike but for their weights) go in lockstep.
    """
    forward = Lockstep(models) if len(models) > 1 else lambda ids: [models[0](ids[0])]
    groups = [
        {"params": list(m.parameters()), "most": r} for m, r in zip(models, rates, strict=True)
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01, betas=(0.9, 0.98))
    losses: list[list[float]] = [[] for _ in models]
    for step in range(steps):
        ramp = min(1.0, (step + 1) / 50)
        decay = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = group["most"] * ramp * decay
        given = [draw(step) for draw in batches]
        logits = forward([ids for ids, _, _ in given])
        each = [weighted(y, *rest) for y, (_, *rest) in zip(logits, given, strict=True)]
        optimizer.zero_grad(set_to_none=True)
        torch.stack(each).sum().backward()
        for group in optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 1.0)
        optimizer.step()
        for record, loss in zip(losses, each, strict=True):
            record.append(loss.item())
    return losses


def weighted(logits: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
    """The mean cross-entropy, every position counted `weight` times."""
    each = nn.functional.cross_entropy(
        logits.transpose(1, 2), targets, ignore_index=IGNORE, reduction="none"
    )
    return (each * weight).sum() / weight.sum()


@torch.no_grad()
def predict(model: nn.Module, ids: Tensor, batch: int = 250) -> Tensor:
    """The most likely class at every position."""
    return torch.cat([model(part).argmax(-1) for part in ids.split(batch)])


class Store:
    """A folder with one JSON file per finished run, and the page's own copy of all of them."""

    def __init__(self, folder: Path, copy: Path) -> None:
        self.folder, self.copy = folder, copy
        folder.mkdir(parents=True, exist_ok=True)

    def _path(self, key: str) -> Path:
        plain = "".join(c if c.isalnum() or c in ".-" else "_" for c in key)
        return self.folder / f"{plain}.json"

    def runs(self) -> dict[str, dict[str, Any]]:
        """All runs by key: the copy's, and those of the folder, which are newer."""
        found = json.loads(self.copy.read_text()) if self.copy.exists() else {}
        for path in sorted(self.folder.glob("*.json")):
            run = json.loads(path.read_text())
            found[run.pop("key")] = run
        return found

    def gather(self) -> dict[str, dict[str, Any]]:
        """Write the copy anew; returns all runs."""
        runs = self.runs()
        lines = (f" {json.dumps(k)}: {json.dumps(v, sort_keys=True)}" for k, v in runs.items())
        write_atomic(self.copy, ("{\n" + ",\n".join(lines) + "\n}\n").encode())
        return runs

    def __contains__(self, key: str) -> bool:
        return key in self.runs()

    def get(self, key: str) -> dict[str, Any]:
        """The numbers of a finished run."""
        return self.runs()[key]

    def add(self, key: str, numbers: dict[str, Any]) -> None:
        write_atomic(self._path(key), json.dumps({"key": key, **numbers}).encode())


def watched(items: Sequence[T], title: Callable[[T], str]) -> Iterator[T]:
    """The items, with a bar in a terminal and a line each elsewhere."""
    if sys.stderr.isatty():
        from rich.progress import Progress

        with Progress(transient=True) as bar:
            task = bar.add_task("", total=len(items))
            for item in items:
                bar.update(task, description=title(item)[:60])
                yield item
                bar.advance(task)
        return
    for i, item in enumerate(items):
        print(f"[{i + 1}/{len(items)}] {title(item)}", file=sys.stderr, flush=True)
        yield item


def percent(values: list[float]) -> str:
    """`mean ± half`, in percent; without the half where all values are the same, or under three."""
    mean, half = (100 * x for x in interval(values))
    if len(values) > 2 and half > 0:
        return f"{mean:.1f} ± {half:.1f}"
    return f"{mean:.0f}" if mean == 100 else f"{mean:.1f}"
