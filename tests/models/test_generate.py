"""Generation with the memory state as the cache, and text in and out."""

from __future__ import annotations

import pytest
import torch
from small_models import MODELS, model_of, tokens

from nestling.models import MemoryCache, byte_tokenizer

SETTINGS = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}


def by_hand(model, ids, steps):
    """Greedy decoding that reads everything anew for every token."""
    for _ in range(steps):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_greedy_decoding_equals_reading_everything_anew(name):
    model = model_of(name)
    ids = tokens(2, 7)
    made = model.generate(ids, attention_mask=torch.ones_like(ids), **SETTINGS)
    assert torch.equal(made, by_hand(model, ids, 6))


@pytest.mark.parametrize("name", MODELS)
def test_left_padding_does_not_change_what_is_generated(name):
    model = model_of(name)
    rows = [tokens(1, length, seed=length) for length in (3, 9, 6)]
    ids, mask = torch.zeros(3, 9, dtype=torch.long), torch.zeros(3, 9, dtype=torch.long)
    for row, real in enumerate(rows):
        ids[row, 9 - real.shape[1] :], mask[row, 9 - real.shape[1] :] = real[0], 1
    together = model.generate(ids, attention_mask=mask, **SETTINGS)
    for row, real in enumerate(rows):
        alone = model.generate(real, attention_mask=torch.ones_like(real), **SETTINGS)
        assert torch.equal(together[row, 9:], alone[0, real.shape[1] :])


@pytest.mark.parametrize("name", ["hope", "transformer", "titans", "ada_transformer"])
def test_beam_search_equals_beam_search_without_cache(name):
    model = model_of(name)
    ids = tokens(2, 5)
    ids[0, :2] = 0
    settings = {**SETTINGS, "num_beams": 3, "attention_mask": (ids > 0).long()}
    with_cache = model.generate(ids, **settings)
    assert torch.equal(with_cache, model.generate(ids, use_cache=False, **settings))


def test_generation_goes_on_from_a_given_state():
    model = model_of("hope")
    ids = tokens(1, 9)
    cache = MemoryCache(2)
    model(ids[:, :5], past_key_values=cache, use_cache=True)
    made = model.generate(ids, past_key_values=cache, **SETTINGS)
    assert torch.equal(made, model.generate(ids, **SETTINGS))


def test_sampling_several_continuations():
    model = model_of("hope")
    settings = {**SETTINGS, "do_sample": True, "num_return_sequences": 3}
    assert model.generate(tokens(2, 4), **settings).shape == (6, 10)


def test_the_cache_of_another_kind_or_size_is_refused():
    model = model_of("hope")
    with pytest.raises(TypeError, match="must be a MemoryCache"):
        model(tokens(1, 3), past_key_values=((),))
    cache = model(tokens(2, 3), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="2 sequences; the model has 2 layers, the input 1"):
        model(tokens(1, 1), past_key_values=cache)
    with pytest.raises(NotImplementedError, match="cannot forget"):
        cache.crop(1)


def test_the_cache_can_be_emptied_repeated_and_picked():
    model = model_of("hope")
    cache = model(tokens(2, 3), use_cache=True).past_key_values
    before = cache.copy()
    cache.batch_repeat_interleave(2)
    assert (cache.batch_size, before.batch_size) == (4, 2)
    assert torch.equal(before.position, torch.tensor([3, 3]))
    cache.batch_select_indices(torch.tensor([0, 3]))
    assert (cache.batch_size, cache.get_seq_length()) == (2, 3)
    cache.reset()
    assert (cache.batch_size, cache.get_seq_length(), cache.states) == (-1, 0, None)


def test_bytes_in_and_out(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = byte_tokenizer()
    text = "Nestling \n\tñandú 鳥 🐦 <eos"
    assert tokenizer(text).input_ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.decode(list(range(128)) * 2) == bytes(range(128)).decode() * 2
    batch = tokenizer(["ab", "abc"], padding=True)
    assert batch.input_ids == [[256, 97, 98], [97, 98, 99]]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (257, 258)
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)(text).input_ids == list(text.encode())
