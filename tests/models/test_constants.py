"""The twin without gradients that reads while levels learn: it never goes stale, and is let go."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from nestling.models import MemoryCache, NestlingConfig, NestlingForCausalLM
from nestling.models.learning import without_gradients

LEVELS = [{"name": "fast", "chunk": 4, "rate": 0.5}, {"name": "slow", "chunk": 8, "rate": 0.3}]


def learner(seed=0):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "intermediate_size": 8}
    config = NestlingConfig(
        vocab_size=13, num_attention_heads=2, mixer="deltanet", levels=LEVELS, **sizes
    )
    return NestlingForCausalLM(config).double().eval()


@torch.no_grad()
def read(model, cache, ids):
    """The logits of tokens read two by two."""
    pieces = ids.split(2, 1)
    return torch.cat([model(p, past_key_values=cache, use_cache=True).logits for p in pieces], 1)


@pytest.mark.parametrize("way", ["in place", "parameter", "module", "cast", "loaded"])
def test_weights_that_change_between_calls_are_seen(way):
    ids = torch.randint(1, 13, (1, 21), generator=torch.Generator().manual_seed(1))
    model, other, fresh = learner(), learner(seed=5), learner()
    cache = MemoryCache(2)
    read(model, cache, ids[:, :10])
    channel, theirs = model.model.layers[1].channel, other.model.layers[1].channel
    if way == "in place":
        with torch.no_grad():
            channel.mlps[0].up.weight.mul_(2.0)
    elif way == "parameter":
        channel.mlps[0].up.weight = theirs.mlps[0].up.weight
    elif way == "module":
        channel.mlps[0].up = theirs.mlps[0].up
    elif way == "cast":
        model = model.float().double()
    else:
        model.load_state_dict(other.state_dict(), assign=True)
    fresh.load_state_dict(model.state_dict())
    twin = cache.copy()
    after = read(model, cache, ids[:, 10:14])
    assert torch.equal(after, read(fresh, twin, ids[:, 10:14]))


def test_a_model_that_nobody_holds_is_let_go():
    model = learner()
    twin, gone = weakref.ref(without_gradients(model)), weakref.ref(model)
    assert without_gradients(model) is twin()
    del model
    gc.collect()
    assert gone() is None
    assert twin() is None
