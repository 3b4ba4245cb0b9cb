"""The two training tasks, MNIST and tiny Shakespeare with small networks; CIFAR-10's pictures."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from studies.optim.networks import LanguageModel, ViT

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Task:
    """The task to train on, for how long, and what to measure at the end."""

    name: str
    steps: int
    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    test: Callable[[], list[Batch]]


def _idx(path: Path) -> np.ndarray:
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: this study needs the data beside the checkout")
    raw = gzip.decompress(path.read_bytes())
    dims = raw[3]
    shape = np.frombuffer(raw, ">i4", count=dims, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * dims).reshape(shape)


@cache
def _mnist(folder: Path, part: str) -> Batch:
    images = torch.from_numpy(_idx(folder / f"{part}-images-idx3-ubyte.gz").copy()).float()
    labels = torch.from_numpy(_idx(folder / f"{part}-labels-idx1-ubyte.gz").copy()).long()
    return (images / 255 - 0.1307) / 0.3081, labels


@cache
def cifar(data: Path, part: str, count: int | None = None) -> Batch:
    """CIFAR-10's staged subset: [N, 3, 32, 32] with mean 0 and deviation 1, and classes [N]."""
    from PIL import Image

    folder = data / "cifar10_subset"
    labels = torch.tensor(json.loads((folder / f"{part}_labels.json").read_text()))[:count]
    with Image.open(folder / f"{part}.png") as image:
        pixels = np.asarray(image).reshape(-1, 32, 32, 3)[:count]
    return (torch.from_numpy(pixels.copy()).float().movedim(-1, 1) / 255 - 0.47) / 0.25, labels


def vit(data: Path, steps: int = 300, rows: int = 32) -> Task:
    """MNIST, random batches of the training images."""

    def batch(generator: torch.Generator) -> Batch:
        images, labels = _mnist(data / "mnist", "train")
        chosen = torch.randint(len(images), (rows,), generator=generator)
        return images[chosen], labels[chosen]

    def test() -> list[Batch]:
        images, labels = _mnist(data / "mnist", "t10k")
        return list(zip(images.split(1000), labels.split(1000), strict=True))[:2]

    return Task(name="vit", steps=steps, model=ViT, batch=batch, test=test)


@cache
def _shakespeare(data: Path) -> tuple[Tensor, int]:
    text = (data / "tinyshakespeare" / "input.txt").read_bytes()
    symbols = sorted(set(text))
    table = torch.zeros(256, dtype=torch.long)
    table[symbols] = torch.arange(len(symbols))
    return table[torch.frombuffer(bytearray(text), dtype=torch.uint8).long()], len(symbols)


def lm(data: Path, steps: int = 200, rows: int = 8, length: int = 64) -> Task:
    """Tiny Shakespeare by characters: first 90% to train, 64 windows of the rest to test."""
    span = torch.arange(length + 1)

    def windows(starts: Tensor, text: Tensor) -> Batch:
        rows_ = text[starts[:, None] + span]
        return rows_[:, :-1], rows_[:, 1:]

    def batch(generator: torch.Generator) -> Batch:
        text, _ = _shakespeare(data)
        train = text[: int(0.9 * len(text))]
        return windows(torch.randint(len(train) - length - 1, (rows,), generator=generator), train)

    def test() -> list[Batch]:
        text, _ = _shakespeare(data)
        held = text[int(0.9 * len(text)) :]
        starts = torch.linspace(0, len(held) - length - 2, 256).long()
        return [windows(part, held) for part in starts.split(64)]

    def model() -> nn.Module:
        return LanguageModel(_shakespeare(data)[1], length)

    return Task(name="lm", steps=steps, model=model, batch=batch, test=test)
