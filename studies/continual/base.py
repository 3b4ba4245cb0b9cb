"""Base models: small ones pretrained here on demand, or a pretrained one the user has.

The recipes are fixed, so everyone gets the same small models: a Hope and a Transformer of equal
size, read for the same number of tokens of WikiText-2 and TinyStories. A checkpoint lies in the
cache folder and is made once.
"""

from __future__ import annotations

import gzip
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestling.train.recipe import Data, Model, Optim, Recipe, Run
from studies.harness.models import seal, sealed

__all__ = ["BASES", "Base", "load_base", "recipe"]

BASES = ("transformer", "hope")
_CORPORA = ("wikitext2/train.txt.gz", "tinystories/stories_a_3117.txt.gz")
_VALID = ("wikitext2/valid.txt.gz",)


@dataclass(frozen=True, kw_only=True)
class Base:
    """A language model to adapt, with its tokenizer and a name that keys stored results.

    `text`: lines of general text, which say what the model's features are like on average.
    """

    name: str
    model: Any
    tokenizer: Any
    text: tuple[str, ...] = ()


def recipe(name: str, data: Path, cache: Path, *, quick: bool = False) -> Recipe:
    """How a small base model is pretrained: 1M parameters, 0.8M tokens.

    The quick one reads 30K bytes of the built-in corpus: enough to run, not to compare.
    """
    if name not in BASES:
        raise ValueError(f"a recipe exists for {', '.join(BASES)}; got {name!r}")
    if quick:
        return Recipe(
            model=Model(preset="tiny", mixer=name, fields={"num_hidden_layers": 2}),
            data=Data(
                train=("builtin:20",),
                valid=("builtin:300-302",),
                length=64,
                cache=str(cache / "corpora"),
            ),
            run=Run(steps=30, rows=16, eval_every=30, save_every=30, keep=1),
        )
    data = data.resolve()  # a half-trained model goes on, however the folder is spelled
    for part in (*_CORPORA, *_VALID):
        if not (data / part).is_file():
            raise FileNotFoundError(f"{data / part}: needed to pretrain the base model {name!r}")
    return Recipe(
        model=Model(preset="tiny", mixer=name, fields={"num_hidden_layers": 2, "hidden_size": 192}),
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


def load_base(name: str, data: Path, cache: Path, *, quick: bool = False) -> Base:
    """The base model of this name, trained now if the cache has none that fits the code.

    Any other name is a pretrained model: a .gguf file, a llama2.c .bin file or a folder.
    """
    if name not in BASES:
        from nestling.adaptation import load_pretrained

        model, tokenizer = load_pretrained(name)
        label = Path(name).name.split(".")[0]
        return Base(name=label, model=model.eval(), tokenizer=tokenizer, text=_lines(data))
    label = f"{name}-quick" if quick else name
    folder = cache / "bases" / label
    if not sealed(folder / "model"):  # never made, or killed while it was exported
        from nestling.train.trainer import train

        outcome = train(recipe(name, data, cache, quick=quick), folder)
        if outcome.signal is not None:
            raise KeyboardInterrupt
        seal(folder / "model", {"base": label})
    try:
        return Base(name=label, text=_lines(data), **_saved(folder / "model"))
    except RuntimeError:  # weights of another version of the model
        shutil.rmtree(folder)
        return load_base(name, data, cache, quick=quick)


def _saved(folder: Path) -> dict[str, Any]:
    from transformers import AutoTokenizer

    from nestling.models import NestlingForCausalLM

    model = NestlingForCausalLM.from_pretrained(folder).eval()
    return {"model": model, "tokenizer": AutoTokenizer.from_pretrained(folder)}


def _lines(data: Path, count: int = 256) -> tuple[str, ...]:
    """Lines of WikiText-2's validation text."""
    path = data / _VALID[0]
    if not path.is_file():
        return ()
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = [line.strip() for line in file if len(line) > 80]
    return tuple(lines[:count])
