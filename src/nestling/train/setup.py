"""From a recipe to its parts: tokenizer and packed text, model, batches, validation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from nestling.losses import IGNORE
from nestling.train.batches import Batches, Sequential, Shuffled
from nestling.train.corpus import Corpus
from nestling.train.packed import PackedCorpus, prepare
from nestling.train.progress import preparing
from nestling.train.recipe import Recipe
from nestling.train.step import loss_sum
from nestling.train.tokens import TextEncoder, load_tokenizer
from nestling.train.world import World

__all__ = ["evaluate", "load_data", "make_batches", "make_model"]


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
            packed.append(prepare(corpora, encoder, cache, workers=data.workers, progress=progress))
    if world.main:
        world.barrier()
    return encoder, packed[0], packed[1]


def make_model(recipe: Recipe, encoder: TextEncoder) -> Any:
    """A fresh model for the recipe; the vocabulary is the tokenizer's."""
    from nestling.models import NestlingForCausalLM, presets

    make = getattr(presets, recipe.model.preset, None)
    if recipe.model.preset not in presets.__all__ or make is None:
        raise ValueError(f"model.preset: no preset {recipe.model.preset!r}")
    special = encoder.tokenizer
    fields = {
        "vocab_size": encoder.vocab_size,
        "eos_token_id": special.eos_token_id,
        "bos_token_id": special.bos_token_id,
        "pad_token_id": special.pad_token_id,
        **recipe.model.fields,
    }
    if fields["vocab_size"] < encoder.vocab_size:
        raise ValueError(
            f"model.fields.vocab_size={fields['vocab_size']} is smaller than the tokenizer's"
            f" vocabulary of {encoder.vocab_size}"
        )
    torch.manual_seed(recipe.run.seed)
    return NestlingForCausalLM(make(recipe.model.mixer, **fields))


def make_batches(recipe: Recipe, packed: PackedCorpus) -> Batches:
    """The recipe's order of reading."""
    settings = {"rows": recipe.run.rows, "length": recipe.data.length, "seed": recipe.run.seed}
    if recipe.data.order == "sequential":
        return Sequential(packed=packed, **settings)
    return Shuffled(packed=packed, cross=recipe.data.order == "shuffled", **settings)


@torch.no_grad()
def evaluate(model: nn.Module, packed: PackedCorpus, recipe: Recipe, world: World) -> float:
    """The mean next-token loss on the first windows of a packed corpus."""
    rows = max(world.size, min(recipe.run.rows, recipe.run.eval_windows))
    batches = Shuffled(packed=packed, rows=rows, length=recipe.data.length, seed=0)
    steps = max(1, min(recipe.run.eval_windows, batches.windows) // rows)
    summed, count = 0.0, 0.0
    model.eval()
    for step in range(steps):
        batch = batches(step, world.rank, world.size)
        loss, _ = loss_sum(model, type(batch)(*(x.to(world.device) for x in batch)))
        summed += float(loss)
        count += float((batch.targets != IGNORE).sum())
    model.train()
    summed, count = world.sum(summed, count)
    return summed / count
