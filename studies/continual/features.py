"""What is computed once: the frozen lower part of a base model, pooled over each text.

A base model is cut below its last channel memory (the last MLP). Everything before the cut is
frozen for every method alike, so its output is computed once per text, pooled to one vector and
kept in the cache. What is above the cut (the last MLP, the final norm, the readout) is in `top.py`.

Shapes: N texts, T tokens, D width, V vocabulary, C classes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nestling.files import BrokenFileError, load_tree, save_tree
from studies.continual.base import Base
from studies.continual.streams import Dataset

__all__ = [
    "Encoded",
    "Features",
    "encode",
    "features_of",
    "label_embeddings",
    "last_channel",
]

Progress = Callable[[int, int], None] | None
"""Told how many texts and how many tokens have been read."""


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """One split as tensors: a vector per text and its class; the texts for those who read them."""

    x: Tensor  # [N, D]
    y: Tensor  # [N]
    texts: tuple[str, ...] = ()

    def of(self, classes: Sequence[int]) -> Encoded:
        """The examples of some classes."""
        return self.at(torch.isin(self.y, torch.tensor(list(classes))).nonzero().flatten())

    def at(self, index: Tensor) -> Encoded:
        """The examples with these numbers."""
        texts = tuple(self.texts[i] for i in index.tolist()) if self.texts else ()
        return Encoded(x=self.x[index], y=self.y[index], texts=texts)


@dataclass(frozen=True, kw_only=True)
class Features:
    """A data set below the cut, and the label texts in the model's own output space."""

    train: Encoded
    valid: Encoded
    test: Encoded
    labels: Tensor  # [C, D], see `label_embeddings`
    text: Tensor | None = None  # [M, D], the base's general text below the cut


def last_channel(model: nn.Module) -> nn.Module:
    """The module whose input is the cut: the last layer's channel memory, norm first."""
    layers: Any = model.model.layers
    layer = layers[-1]
    if hasattr(layer, "channel"):
        found: nn.Module = layer.channel
        return found
    if hasattr(layer, "post_attention_layernorm") and hasattr(layer, "mlp"):
        norm: nn.Module = layer.post_attention_layernorm
        return norm
    raise ValueError(f"{type(model).__name__}: its last layer has neither a channel nor an MLP")


@contextlib.contextmanager
def _inputs(module: nn.Module) -> Iterator[list[Tensor]]:
    """What flows into a module while the context lasts."""
    seen: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    try:
        yield seen
    finally:
        handle.remove()


@torch.no_grad()
def encode(
    base: Base,
    texts: Sequence[str],
    *,
    length: int = 48,
    pool: str = "mean",
    rows: int = 64,
    progress: Progress = None,
) -> Tensor:
    """[N, D]: the input of the last channel memory, pooled over each text's first tokens.

    `pool` is "mean" over the tokens or "last". Texts of equal length share a batch, so nothing is
    padded and recurrent memories see each text alone.
    """
    if pool not in ("mean", "last"):
        raise ValueError(f"pool must be 'mean' or 'last'; got {pool!r}")
    ids = base.tokenizer(list(texts), add_special_tokens=False, verbose=False).input_ids
    groups: dict[int, list[int]] = defaultdict(list)
    for number, tokens in enumerate(ids):
        groups[min(len(tokens), length)].append(number)
    out: Tensor | None = None
    done = tokens_done = 0
    with _inputs(last_channel(base.model)) as seen:
        for size, numbers in sorted(groups.items()):
            for begin in range(0, len(numbers), rows):
                part = numbers[begin : begin + rows]
                given = torch.tensor([ids[i][:size] for i in part])  # [rows, T]
                seen.clear()
                base.model.model(input_ids=given, use_cache=False)
                x = seen[0]  # [rows, T, D]
                pooled = x.mean(1) if pool == "mean" else x[:, -1]
                if out is None:
                    out = torch.zeros(len(ids), x.shape[-1])
                out[part] = pooled.float()
                done, tokens_done = done + len(part), tokens_done + given.numel()
                if progress is not None:
                    progress(done, tokens_done)
    if out is None:
        raise ValueError("no texts to encode")
    return out


@torch.no_grad()
def label_embeddings(base: Base, classes: Sequence[str]) -> Tensor:
    """[C, D]: the mean output embedding of the tokens of each label text.

    A vector's product with row c is the mean logit the model gives to the tokens of label c: label
    text scored by the language model itself, with no parameter per class.
    """
    weight = base.model.get_output_embeddings().weight.float()  # [V, D]
    rows = []
    for label in classes:
        ids = base.tokenizer(" " + label, add_special_tokens=False, verbose=False).input_ids
        rows.append(weight[torch.tensor(ids)].mean(0))
    stacked = torch.stack(rows)
    return stacked - weight.mean(0)  # the softmax over labels does not see the common part


def features_of(
    base: Base,
    dataset: Dataset,
    cache: Path,
    *,
    length: int = 48,
    pool: str = "mean",
    progress: Progress = None,
) -> Features:
    """The data set's features and the base's general text, from the cache or computed now."""
    splits = {"train": dataset.train, "valid": dataset.valid, "test": dataset.test}

    def read(texts: Sequence[str]) -> Tensor:
        return encode(base, texts, length=length, pool=pool, progress=progress)

    def kept(what: str, facts: list[Any], make: Callable[[], dict[str, Tensor]]) -> Any:
        known = [base.name, _weight_sum(base.model), length, pool, *facts]
        key = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]
        folder, name = cache / "features", f"{base.name}-{what}-{key}"
        with contextlib.suppress(BrokenFileError):
            return load_tree(folder, name)[0]
        tensors = make()
        save_tree(folder, name, tensors, {"base": base.name, "stream": what})
        return tensors

    def all_splits() -> dict[str, Tensor]:
        tensors = {f"{split}.x": read(given.texts) for split, given in splits.items()}
        tensors |= {f"{split}.y": torch.tensor(given.labels) for split, given in splits.items()}
        return tensors | {"labels": label_embeddings(base, dataset.classes)}

    facts = [dataset.classes, *([split.texts, split.labels] for split in splits.values())]
    found = kept(dataset.name, facts, all_splits)
    text = kept("text", [base.text], lambda: {"x": read(base.text)})["x"] if base.text else None
    made = {
        split: Encoded(x=found[f"{split}.x"], y=found[f"{split}.y"], texts=given.texts)
        for split, given in splits.items()
    }
    return Features(labels=found["labels"], text=text, **made)


def _weight_sum(model: nn.Module) -> float:
    """Tells two base models of one name apart."""
    return round(float(sum(p.detach().double().abs().sum() for p in model.parameters())), 3)
