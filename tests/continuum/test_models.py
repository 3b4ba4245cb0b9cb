"""Real architectures: bit-exact without learning, isolated, and better at what they have read."""

from __future__ import annotations

import threading

import pytest
import torch

from nestling.continuum import Continuum, MemoryLevel, Part, Slot, own_slots
from nestling.rules import dgd, momentum

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gpt2", "hope"]


def continuum_of(model, layout, *levels, **options):
    hope = hasattr(model, "make_cache")
    slots = own_slots(model) if hope else layout["share"](model, len(levels))
    return Continuum(model, levels, slots, **options)


def two(rate, **options):
    return [MemoryLevel(name=f"l{c}", chunk=c, rate=rate, **options) for c in (4, 8)]


@pytest.mark.parametrize("family", FAMILIES)
def test_rate_zero_is_the_base_model_to_the_bit(make, layout, ids, family):
    model = make(family)
    out = continuum_of(model, layout, *two(0.0))(ids)
    with torch.no_grad():
        assert torch.equal(out.logits, model(input_ids=ids).logits)
    assert not out.updates
    assert all(fast is None for level in out.state.levels for fast in level.fast)


@pytest.mark.parametrize("family", ["llama", "gpt2", "hope"])
def test_reading_the_same_text_again_surprises_less(make, layout, family):
    model = make(family)
    flags = [p.requires_grad for p in model.parameters()]
    before = [p.detach().clone() for p in model.parameters()]
    continuum = continuum_of(model, layout, *two(3.0))
    ids = torch.randint(0, 32, (1, 12), generator=torch.Generator().manual_seed(4)).repeat(1, 12)
    losses = continuum(ids).losses[0]
    assert losses[-24:].mean() < 0.99 * losses[1:25].mean()
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_frozen_parameters_and_inference_mode_learn_alike(make, layout, ids):
    model = make("llama")
    continuum = continuum_of(model, layout, *two(0.5))
    want = continuum(ids).state.levels[0].fast
    with torch.inference_mode():
        inside = continuum(ids).state.levels[0].fast
    model.requires_grad_(False)
    with torch.no_grad():
        frozen = continuum(ids).state.levels[0].fast
    for one, two_, three in zip(want, inside, frozen, strict=True):
        assert torch.equal(one, two_)
        assert torch.equal(one, three)


@pytest.mark.parametrize("family", ["llama", "gpt2", "hope"])
@pytest.mark.parametrize("rank", [None, 16])
def test_sequences_of_a_batch_learn_for_themselves(make, layout, family, rank):
    model = make(family).double()
    continuum = continuum_of(model, layout, *two(0.5, rank=rank))
    a, b, c = torch.randint(0, 32, (3, 1, 22), generator=torch.Generator().manual_seed(3))
    alone = continuum(a)
    with_b, with_c = continuum(torch.cat([a, b])), continuum(torch.cat([a, c]))
    assert torch.equal(with_b.logits[0], with_c.logits[0])  # whoever sits beside it
    torch.testing.assert_close(with_b.logits[:1], alone.logits)
    slot = continuum.slots[0].name
    delta = continuum.delta(with_b.state, slot)
    torch.testing.assert_close(delta[:1], continuum.delta(alone.state, slot))
    torch.testing.assert_close(delta[1:], continuum.delta(continuum(b).state, slot))
    assert not torch.equal(delta[0], delta[1])


def test_threads_share_a_model_without_disturbing_each_other(make, layout):
    model = make("llama")
    texts = torch.randint(0, 32, (3, 1, 60), generator=torch.Generator().manual_seed(5))
    continua = [continuum_of(model, layout, *two(rate)) for rate in (0.1, 1.0, 3.0)]
    want = [c(text).logits for c, text in zip(continua, texts, strict=True)]
    with torch.no_grad():
        base = model(input_ids=texts[0]).logits
    got, plain = [None] * 3, []

    def learn(n):
        got[n] = continua[n](texts[n]).logits

    def read():
        with torch.no_grad():
            plain.extend(model(input_ids=texts[0]).logits for _ in range(10))

    threads = [threading.Thread(target=learn, args=(n,)) for n in range(3)]
    threads.append(threading.Thread(target=read))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    assert len(plain) == 10
    assert all(torch.equal(each, base) for each in plain)


def test_rules_that_need_pairs_get_the_chunks_inputs_and_targets(make, layout, ids):
    """DGD solves for the chunk's pairs together; at a small rate it is gradient descent."""
    model = make("llama").double()
    step = {}
    for name, options in {"gd": {}, "dgd": {"rule": dgd(erase=0.0)}}.items():
        levels = [MemoryLevel(name="one", chunk=5, rate=1e-6, **options)]
        levels.append(MemoryLevel(name="two", chunk=10, rate=1e-6, **options))
        out = continuum_of(model, layout, *levels)(ids)
        step[name] = [fast for level in out.state.levels for fast in level.fast]
    for one, other in zip(step["gd"], step["dgd"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-12)
    large = [MemoryLevel(name="one", chunk=5, rate=1e3, rule=dgd(erase=0.0))]
    out = continuum_of(model, layout, *large)(ids)
    assert out.losses[0, 1:].isfinite().all()  # a rate at which gradient descent explodes


def test_half_precision_models_keep_exact_fast_weights(make, layout, ids):
    model = make("llama").bfloat16()
    out = continuum_of(model, layout, *two(0.5))(ids)
    assert out.state.levels[0].fast[0].dtype == torch.float32
    assert out.logits.dtype == torch.bfloat16


def test_what_cannot_work_is_refused(make, layout, ids):
    model = make("llama")
    slots = layout["share"](model, 1)
    one = [MemoryLevel(name="a", chunk=4)]
    with pytest.raises(ValueError, match="rank=2 needs a rule that is linear"):
        Continuum(model, [MemoryLevel(name="a", chunk=4, rank=2, rule=momentum())], slots)
    with pytest.raises(ValueError, match="has no parameter 'model"):
        Continuum(model, one, [Slot("model.nothing.weight", (Part(0),))])
    with pytest.raises(ValueError, match="names level 3; there are 1 levels"):
        Continuum(model, one, [Slot(slots[0].name, (Part(3),))])
    with pytest.raises(ValueError, match="does not fit"):
        Continuum(model, one, [Slot(slots[0].name, (Part(0, 0, 4, 99),))])
    with pytest.raises(ValueError, match="owns a part twice"):
        Continuum(model, one, [Slot(slots[0].name, (Part(0), Part(0, 0, 0, 2)))])
    levels = [*one, MemoryLevel(name="b", chunk=6)]
    with pytest.raises(ValueError, match="must be a multiple of 4, and larger; got 6"):
        Continuum(model, levels, layout["share"](model, 2), transfer="reptile")
    with pytest.raises(ValueError, match="belongs to a Embedding"):
        Continuum(model, one, [Slot("model.embed_tokens.weight", (Part(0),))])
    continuum = Continuum(model, one, slots)
    with pytest.raises(ValueError, match="got ids of shape"):
        continuum(ids, continuum.init(2))
    with pytest.raises(ValueError, match="bool tensor of shape"):
        continuum(ids, learn=torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="meta must be one of"):
        continuum(ids, meta="third")
    for bad in ({"rate": -1.0}, {"retain": 1.5}, {"rank": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))} must"):
            MemoryLevel(name="a", chunk=4, **bad)


def test_a_weight_that_is_not_read_says_so(make, layout, ids):
    model = make("llama")
    continuum = Continuum(model, [MemoryLevel(name="a", chunk=4)], layout["share"](model, 1))
    model.model.layers[0].mlp.forward = lambda x: x
    with pytest.raises(ValueError, match="did not read this weight"):
        continuum(ids)
