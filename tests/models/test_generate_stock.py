"""The ways `generate` is called, as transformers' own generation tests call it."""

from __future__ import annotations

import inspect

import pytest
import torch
from small_models import VOCABULARY, model_of, tokens
from transformers import GenerationMixin
from transformers.generation import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput

from nestling.models import MemoryCache

NAMES = ("hope", "hope_attention", "transformer", "titans", "deltanet")
pytestmark = pytest.mark.filterwarnings("ignore:.*generation flags are not valid.*:UserWarning")
FACTS = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "min_new_tokens": 3,
    "max_new_tokens": 3,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_search_gives_all_its_outputs(name, use_cache):
    model, ids = model_of(name), tokens(2, 5)
    out = model.generate(ids, do_sample=False, use_cache=use_cache, **FACTS)
    assert isinstance(out, GenerateDecoderOnlyOutput)
    assert out.sequences.shape == (2, 8)
    assert torch.equal(out.sequences[:, :5], ids)
    assert [score.shape for score in out.scores] == [(2, VOCABULARY)] * 3
    first, *later = (states[-1].shape[1] for states in out.hidden_states)
    assert (first, later) == (5, [1, 1] if use_cache else [6, 7])
    if use_cache:
        assert isinstance(out.past_key_values, MemoryCache)
        assert out.past_key_values.get_seq_length() == 7
        assert out.past_key_values.position.tolist() == [7, 7]
    for step in range(3):
        fresh = model(out.sequences[:, : 5 + step]).logits[:, -1]
        torch.testing.assert_close(out.logits[step].double(), fresh, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_samples_repeat_with_the_seed(name):
    model, ids = model_of(name), tokens(2, 5)
    options = {"do_sample": True, "num_return_sequences": 2, "temperature": 20.0, **FACTS}
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(model.generate(ids, **options).sequences)
    assert drawn[0].shape == (4, 8)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sample", [False, True])
def test_beams_follow_their_own_memories(name, sample):
    """Each step's scores are those of reading the beams anew."""
    model, ids = model_of(name), tokens(2, 5)
    found = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        options = {"num_beams": 3, "num_return_sequences": 2, "do_sample": sample}
        found.append(model.generate(ids, use_cache=use_cache, **options, **FACTS))
    assert isinstance(found[0], GenerateBeamDecoderOnlyOutput)
    assert torch.equal(found[0].sequences, found[1].sequences)
    torch.testing.assert_close(found[0].sequences_scores, found[1].sequences_scores)


@pytest.mark.parametrize("name", NAMES)
def test_embeddings_go_in_as_tokens_do(name):
    model, ids = model_of(name), tokens(2, 5)
    options = {"do_sample": False, "min_new_tokens": 3, "max_new_tokens": 3}
    whole = model.generate(ids, **options)
    embedded = model.get_input_embeddings()(ids)
    alone = model.generate(inputs_embeds=embedded, **options)
    assert torch.equal(alone, whole[:, 5:])
    both = model.generate(ids, inputs_embeds=embedded, **options)
    assert torch.equal(both, whole)


@pytest.mark.parametrize("name", NAMES)
def test_generation_stops_and_goes_on(name):
    model, ids = model_of(name), tokens(2, 5)
    options = {"do_sample": False, "return_dict_in_generate": True}
    whole = model.generate(ids, min_new_tokens=6, max_new_tokens=6, **options).sequences
    first = model.generate(ids, min_new_tokens=3, max_new_tokens=3, **options)
    more = model.generate(
        first.sequences,
        past_key_values=first.past_key_values,
        min_new_tokens=3,
        max_new_tokens=3,
        **options,
    )
    assert torch.equal(more.sequences, whole)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_is_read_in_pieces(name, padded):
    """`prefill_chunk_size` needs a cache before the first token; levels learn across pieces."""
    levels = {"levels": [{"name": "fast", "chunk": 4, "rate": 0.1}], "learning": "plain"}
    model = model_of(name, **(levels if name.startswith("hope") else {}))
    ids, mask = tokens(2, 11), torch.ones(2, 11, dtype=torch.long)
    mask[0, :3] = 0 if padded else 1
    options = {"attention_mask": mask, "do_sample": False, **FACTS}
    whole = model.generate(ids, **options)
    pieces = model.generate(ids, prefill_chunk_size=4, **options)
    assert torch.equal(pieces.sequences, whole.sequences)
    torch.testing.assert_close(pieces.scores, whole.scores)


@pytest.mark.parametrize(
    ("name", "learns"), [*((n, False) for n in NAMES), *((n, True) for n in NAMES[:2])]
)
def test_generation_from_embeddings_goes_on_with_embeddings(name, learns):
    """Where levels learn, the tokens written in between were learned from, or would have been."""
    levels = [{"name": "fast", "chunk": 64, "rate": 0.1}, {"name": "slow", "chunk": 128}]
    model, ids = model_of(name, **({"levels": levels} if learns else {})), tokens(2, 5)
    options = {"do_sample": False, "return_dict_in_generate": True, "eos_token_id": -1}
    embedded = model.get_input_embeddings()(ids)
    whole = model.generate(inputs_embeds=embedded, max_new_tokens=4, **options)
    first = model.generate(inputs_embeds=embedded, max_new_tokens=3, **options)
    written = model.get_input_embeddings()(first.sequences)
    more = model.generate(
        inputs_embeds=torch.cat([embedded, written], 1),
        past_key_values=first.past_key_values,
        max_new_tokens=1,
        **options,
    )
    assert torch.equal(torch.cat([first.sequences, more.sequences], 1), whole.sequences)
    assert more.past_key_values.position.tolist() == whole.past_key_values.position.tolist()


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("beams", [1, 2])
def test_embeddings_with_padding_behind_are_read_as_tokens_are(beams, learns):
    levels = [{"name": "fast", "chunk": 64, "rate": 0.1}]
    model, ids = model_of("hope", **({"levels": levels} if learns else {})), tokens(2, 5)
    mask = torch.ones_like(ids)
    mask[0, 3:] = 0
    options = {"num_beams": beams, "do_sample": False, "max_new_tokens": 3, "min_new_tokens": 3}
    found = model.generate(ids, attention_mask=mask, **options)
    embedded = model.get_input_embeddings()(ids)
    again = model.generate(inputs_embeds=embedded, attention_mask=mask, **options)
    assert torch.equal(again, found[:, 5:])


@pytest.mark.parametrize("kind", ["static", "quantized", "offloaded", "offloaded_static"])
def test_caches_made_for_keys_and_values_are_not_used(kind):
    """The memory's own state takes their place (transformers says so), and the text is the same."""
    model, ids = model_of("hope", torch.float32), tokens(1, 5)
    options = {"do_sample": False, "max_new_tokens": 2, "return_dict_in_generate": True}
    out = model.generate(ids, cache_implementation=kind, **options)
    assert torch.equal(out.sequences, model.generate(ids, **options).sequences)
    assert isinstance(out.past_key_values, MemoryCache)


def test_decoding_that_takes_tokens_back_is_refused():
    model, ids = model_of("hope", torch.float32), tokens(1, 5)
    with pytest.raises(ValueError, match="stateful"):
        model.generate(ids, prompt_lookup_num_tokens=2, max_new_tokens=3)
    with pytest.raises(ValueError, match="stateful"):
        model.generate(ids, assistant_model=model, max_new_tokens=3)


@pytest.mark.parametrize("name", NAMES)
def test_only_the_logits_that_are_needed_are_made(name):
    model, ids = model_of(name), tokens(2, 5)
    whole = model(ids).logits
    torch.testing.assert_close(model(ids, logits_to_keep=1).logits, whole[:, -1:])
    some = torch.tensor([0, 3])
    torch.testing.assert_close(model(ids, logits_to_keep=some).logits, whole[:, some])


@pytest.mark.parametrize("name", ["hope", "hope_attention"])
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_the_last_logits_are_the_last_column_whatever_the_padding(name, learns, side):
    rate = {"rate": 0.1} if learns else {}
    levels = [{"name": "fast", "chunk": 4, **rate}, {"name": "slow", "chunk": 8, **rate}]
    model, ids = model_of(name, levels=levels), tokens(2, 9)
    mask = torch.ones_like(ids)
    if side != "right":
        mask[0, :2] = 0
    if side != "left":
        mask[1, -2:] = 0
    whole = model(ids, attention_mask=mask).logits
    for keep in (1, 3):
        kept = model(ids, attention_mask=mask, logits_to_keep=keep).logits
        torch.testing.assert_close(kept, whole[:, -keep:])


def test_the_model_is_a_generating_one_and_its_forward_a_stock_one():
    model = model_of("hope")
    assert isinstance(model, GenerationMixin)
    assert model.can_generate()
    names = list(inspect.signature(model.forward).parameters)
    stock = ["input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds"]
    assert names[:5] == stock
    assert {"labels", "use_cache", "logits_to_keep"} <= set(names)
    plain = model(tokens(1, 4), return_dict=False)
    assert isinstance(plain, tuple)
    torch.testing.assert_close(plain[0], model(tokens(1, 4)).logits)
