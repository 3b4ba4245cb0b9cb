"""Models of the studies: built by name at a size, counted, asked, and kept for other studies."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nestling.files import sync_folder, write_atomic
from nestling.models import NestlingForCausalLM, presets
from nestling.tree import tree_leaves

__all__ = [
    "IGNORE",
    "LSTM",
    "Arm",
    "arm_of",
    "keep_model",
    "kept_facts",
    "kept_model",
    "loss_of",
    "parameters",
    "predict",
    "seal",
    "sealed",
    "state_size",
    "weighted",
]

IGNORE = -100
_SEAL = "kept.json"


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
        """[B, T] -> [B, T, V]."""
        out: Tensor = self.head(self.lstm(self.embed(ids))[0])
        return out


class Arm(nn.Module):
    """A language model that only gives its logits, for tasks whose answers are no next tokens.

    So its levels, which learn to predict the text, stand still.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model = NestlingForCausalLM(config)

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T] -> [B, T, V]."""
        logits: Tensor = self.model(input_ids=ids, use_cache=False, learn=False).logits
        return logits


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """The mean loss of windows [B, T + 1] by a language model; levels that learn do so."""
    loss: Tensor = model(ids[:, :-1], shift_labels=ids[:, 1:].contiguous(), use_cache=False).loss
    return loss


def arm_of(name: str, size: presets.Size, options: dict[str, Any], **fields: Any) -> nn.Module:
    """The model named `name` at a size; `options` are its mixer's, `fields` the configuration's."""
    if name == "lstm":
        return LSTM(size.vocabulary, size.layers, size.parameters)
    mixer = presets.MODELS[name]["mixer"]
    fields = {"tie_word_embeddings": False, "mixer_options": {mixer: options}, **fields}
    return Arm(presets.configure(size, name, **fields))


def parameters(model: nn.Module) -> int:
    """Trainable numbers in a model."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def state_size(model: Any) -> int:
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


def keep_model(model: Any, folder: Path, facts: dict[str, Any]) -> None:
    """Save a Hugging Face model so that it is there whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".{folder.name}.*"):  # of a killed process
        shutil.rmtree(left, ignore_errors=True)
    building = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    model.save_pretrained(building)
    seal(building, facts)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(building, folder)
    sync_folder(folder.parent)


def seal(folder: Path, facts: dict[str, Any]) -> None:
    """Say that a folder is whole: the sizes of its files, written last."""
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.name != _SEAL}
    write_atomic(folder / _SEAL, json.dumps({"facts": facts, "files": sizes}).encode())


def sealed(folder: Path) -> bool:
    """Whether a folder holds all the files it had when it was sealed."""
    try:
        files = json.loads((folder / _SEAL).read_text())["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def kept_facts(folder: Path) -> dict[str, Any]:
    """The facts stored beside a kept model."""
    facts: dict[str, Any] = json.loads((folder / _SEAL).read_text())["facts"]
    return facts


def kept_model(folder: Path) -> NestlingForCausalLM | None:
    """The model that was kept in a folder, or None if there is no whole one."""
    if not sealed(folder):
        return None
    try:
        return NestlingForCausalLM.from_pretrained(folder).eval()
    except (OSError, ValueError, RuntimeError):  # weights of another version of the model
        return None
