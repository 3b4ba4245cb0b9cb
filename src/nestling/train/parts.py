"""The parts of a run that its recipe asks for: text, tokenizer, model, order of reading."""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nestling.adaptation.pretrained import load_start
from nestling.checks import one_of
from nestling.machine import bf16_speed
from nestling.train.batches import Batches, Sequential, Shuffled
from nestling.train.corpus import Corpus
from nestling.train.distributed import World
from nestling.train.optimizers import build
from nestling.train.packed import PackedCorpus, prepare
from nestling.train.progress import preparing
from nestling.train.recipe import Recipe
from nestling.train.tokenizer import TextEncoder, check_tokenizer, load_tokenizer


def load_data(recipe: Recipe, world: World) -> tuple[TextEncoder, PackedCorpus, PackedCorpus]:
    """The tokenizer and the packed training and validation text; rank 0 prepares, others wait."""
    data = recipe.data
    cache = Path(data.cache).expanduser()
    options = {"separator": data.separator, "field": data.field}
    train = [Corpus(source=source, **options) for source in data.train]  # type: ignore[arg-type]
    valid = [Corpus(source=source, **options) for source in data.valid]  # type: ignore[arg-type]
    if not world.main:
        world.barrier()
    encoder = load_tokenizer(data.tokenizer, train, cache)
    packed = []
    for what, corpora in (("training text", train), ("validation text", valid)):
        with preparing(what, speak=world.main) as progress:
            found = prepare(
                corpora,
                encoder,
                cache,
                workers=data.workers,
                progress=progress,
                verify=world.main,  # once for all processes
            )
            packed.append(found)
    if world.main:
        world.barrier()
    return encoder, packed[0], packed[1]


def check(recipe: Recipe) -> None:
    """Refuse a recipe that cannot run, before anything is made or written."""
    names = [level.name for level in configuration(recipe).memory_levels]
    grow = recipe.model.grow
    if grow and len(grow) != len(names):
        raise ValueError(
            f"model.grow must give the first step of each of the {len(names)} levels"
            f" {', '.join(names)}; got {grow}"
        )
    build(dataclasses.replace(recipe.optim, chunks=()), nn.Linear(2, 2))
    start = recipe.model.start
    if start is not None and not any(Path(start).glob("model*.safetensors*")):
        raise ValueError(f"model.start: {start!r} is no folder of a saved model")
    check_tokenizer(recipe.data.tokenizer)
    cpu = not torch.cuda.is_available()
    if recipe.run.precision == "bf16" and cpu and bf16_speed() is None:
        raise ValueError(
            "run.precision=bf16: bf16 products end this CPU's process (its AMX or AVX512 units are"
            " not usable here); take float32, or set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"
        )
    for source in (*recipe.data.train, *recipe.data.valid):
        Corpus(source=source).check()


def configuration(recipe: Recipe, **fields: Any) -> Any:
    """The model's configuration: the preset, the tokenizer's `fields`, and the recipe's own."""
    from nestling.models import presets

    model = recipe.model
    one_of("model.preset", model.preset, presets.SIZES)
    one_of("model.name", model.name, presets.MODELS)
    size = presets.SIZES[model.preset]
    usual = presets.configure(size, model.name).to_dict()
    for name, value in model.fields.items():
        if name not in usual:
            near = difflib.get_close_matches(name, usual, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"model.fields: the configuration has no {name!r}{hint}")
        numbers = (int, float) if type(usual[name]) is float else (int,)
        if type(usual[name]) in (int, float) and type(value) not in numbers:
            kind = "whole number" if numbers == (int,) else "number"
            raise ValueError(f"model.fields: {name} must be a {kind}; got {value!r}")
        if isinstance(usual[name], (list, tuple)) and not isinstance(value, (list, tuple)):
            raise ValueError(f"model.fields: {name} must be a list; got {value!r}")
    try:
        return presets.configure(size, model.name, **{**fields, **model.fields})
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"model.fields: {error}") from error


def make_model(recipe: Recipe, encoder: TextEncoder) -> Any:
    """A fresh model for the recipe, or its warm start; the vocabulary is the tokenizer's."""
    from nestling.models import NestlingForCausalLM

    special = encoder.tokenizer
    fields = {
        "vocab_size": encoder.vocab_size,
        "eos_token_id": special.eos_token_id,
        "bos_token_id": special.bos_token_id,
        "pad_token_id": special.pad_token_id,
    }
    asked = recipe.model.fields.get("vocab_size", encoder.vocab_size)
    if asked < encoder.vocab_size:
        raise ValueError(
            f"model.fields.vocab_size={asked} is smaller than the tokenizer's vocabulary of"
            f" {encoder.vocab_size}"
        )
    torch.manual_seed(recipe.run.seed)
    config = configuration(recipe, **fields)
    if recipe.model.start is None:
        return NestlingForCausalLM(config)
    return load_start(recipe.model.start, config)


def make_batches(recipe: Recipe, packed: PackedCorpus) -> Batches:
    """The recipe's order of reading."""
    settings = {"rows": recipe.run.rows, "length": recipe.data.length, "seed": recipe.run.seed}
    if recipe.data.order == "sequential":
        return Sequential(packed=packed, **settings)
    return Shuffled(packed=packed, cross=recipe.data.order == "shuffled", **settings)
