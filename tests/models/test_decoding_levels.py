"""Writing token by token while levels learn: what is kept between calls never goes stale."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from nestling.continuum import fast
from nestling.models import MemoryCache, NestlingConfig, NestlingForCausalLM
from nestling.models.learning import without_gradients

LEVELS = [{"name": "fast", "chunk": 4, "rate": 0.5}, {"name": "slow", "chunk": 8, "rate": 0.3}]


def learner(seed=0, **fields):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "intermediate_size": 8}
    config = NestlingConfig(
        vocab_size=13, num_attention_heads=2, mixer="deltanet", levels=LEVELS, **sizes, **fields
    )
    return NestlingForCausalLM(config).double().eval()


def text(length=21, seed=1):
    return torch.randint(1, 13, (1, length), generator=torch.Generator().manual_seed(seed))


def after(model, ids):
    """A cache that has read `ids`."""
    cache = MemoryCache(model.config.num_hidden_layers)
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    return cache


@torch.no_grad()
def write(model, cache, ids):
    """The logits of tokens read one by one."""
    read = [model(one, past_key_values=cache, use_cache=True).logits for one in ids.split(1, 1)]
    return torch.cat(read, 1)


@pytest.mark.parametrize("topology", ["chain", "parallel"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_tokens_one_by_one_are_the_text_at_once(topology, activation, monkeypatch):
    model, ids = learner(topology=topology, activation=activation), text(30)
    cache = after(model, ids[:, :9])
    made = []
    merge = fast.merge
    monkeypatch.setattr(fast, "merge", lambda *given: made.append(1) or merge(*given))
    with torch.no_grad():
        whole = model(ids).logits[:, 9:]
    made.clear()
    found = write(model, cache, ids[:, 9:])
    assert torch.allclose(found, whole, atol=1e-12)
    slots, segments = (2 if activation == "gelu" else 3) * 2 * 2, 5  # from 9 to 30, ends at 12..28
    assert len(made) <= 2 * slots * (segments + 1), "a sum is made once a chunk, not once a token"


def test_weights_that_change_between_tokens_are_seen(monkeypatch):
    model, ids = learner(), text()
    cache = after(model, ids[:, :9])
    write(model, cache, ids[:, 9:10])
    twin = cache.copy()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    found = write(model, cache, ids[:, 10:11])
    monkeypatch.setattr(fast.Reading, "_keeps", lambda *_: False)
    assert torch.allclose(found, write(model, twin, ids[:, 10:11]), atol=1e-12)


@pytest.mark.parametrize("way", ["parameter", "module", "cast", "loaded"])
def test_weights_that_are_replaced_are_seen(way):
    model, other, ids = learner(), learner(seed=5), text()
    cache = after(model, ids[:, :9])
    write(model, cache.copy(), ids[:, 9:11])
    channel, theirs = model.model.layers[1].channel, other.model.layers[1].channel
    if way == "parameter":
        channel.mlps[0].up.weight = theirs.mlps[0].up.weight
    elif way == "module":
        channel.mlps[0].up = theirs.mlps[0].up
    elif way == "cast":
        model = model.float().double()
    else:
        model.load_state_dict(other.state_dict(), assign=True)
    fresh = learner()
    fresh.load_state_dict(model.state_dict())
    expected = write(fresh, cache.copy(), ids[:, 9:11])
    assert torch.equal(write(model, cache.copy(), ids[:, 9:11]), expected)


def test_nothing_is_kept_of_a_cache_or_a_model_that_is_gone():
    model, ids = learner(), text()
    cache = after(model, ids[:, :9])
    write(model, cache, ids[:, 9:11])
    learned = cache.learned.states[0].levels[0].fast[0]
    kept = weakref.ref(fast._SUMS[learned][1])
    assert kept() is not None
    del cache, learned
    gc.collect()
    assert kept() is None
    twin, gone = weakref.ref(without_gradients(model)), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert twin() is None


def test_several_sequences_read_beside_what_one_sums_up(monkeypatch):
    model, ids = learner(), text().repeat(3, 1)
    alone = write(model, after(model, ids[:1, :9]), ids[:1, 9:15])
    monkeypatch.setattr(fast, "_sum", lambda *_: pytest.fail("three sequences would be three sums"))
    found = write(model, after(model, ids[:, :9]), ids[:, 9:15])
    assert torch.allclose(found, alone.expand(3, -1, -1), atol=1e-12)
