"""The base model of the real languages: a small Hope, pretrained here on demand.

The recipe is fixed, so everyone gets the same model: 1M parameters that have read 0.8M tokens of
WikiText-2 and TinyStories. It lies in the cache folder and is made once.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestling.train.recipe import Data, Model, Optim, Recipe, Run
from studies.harness.models import kept_model, seal, sealed

__all__ = ["Base", "load_base", "recipe"]

_CORPORA = ("wikitext2/train.txt.gz", "tinystories/stories_a_3117.txt.gz")
_VALID = ("wikitext2/valid.txt.gz",)
_FORM = {
    "num_hidden_layers": 2,
    "hidden_size": 192,
    "mixer_options": {"self_modifying": {"projections": {"residual": True}}},
}
"""The Hope of the stored runs, an earlier form: a chain of levels and five memories."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """A language model to teach, with its tokenizer and a name that keys stored results."""

    name: str
    model: Any
    tokenizer: Any


def recipe(data: Path, cache: Path) -> Recipe:
    """How the base is pretrained: 1M parameters, 0.8M tokens."""
    data = data.resolve()  # a half-trained model goes on, however the folder is spelled
    for part in (*_CORPORA, *_VALID):
        if not (data / part).is_file():
            raise FileNotFoundError(f"{data / part}: needed to pretrain the base model")
    return Recipe(
        model=Model(preset="tiny", name="hope_printed", fields=_FORM),
        data=Data(
            train=tuple(str(data / part) for part in _CORPORA),
            valid=tuple(str(data / part) for part in _VALID),
            tokenizer="bpe:2048",
            length=128,
            cache=str(cache / "corpora"),
        ),
        optim=Optim(lr=2e-3, warmup=50),
        run=Run(steps=400, rows=16, seed=0, eval_every=200, save_every=50, keep=1),
    )


def load_base(plan: Recipe, folder: Path) -> Base:
    """The base model that lies in a folder, trained now if it holds none that fits the code."""
    from transformers import AutoTokenizer

    from nestling.train.trainer import train

    if not sealed(folder / "model"):  # never made, or killed while it was exported
        if train(plan, folder).signal is not None:
            raise KeyboardInterrupt
        seal(folder / "model", {"base": "hope"})
    model = kept_model(folder / "model")
    if model is None:  # weights of another version of the model
        shutil.rmtree(folder)
        return load_base(plan, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", trust_remote_code=False)
    return Base(name="hope", model=model, tokenizer=tokenizer)
