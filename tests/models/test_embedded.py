"""Embeddings in the place of tokens, in models whose levels learn: tokens are found again."""

from __future__ import annotations

import pytest
import torch
from test_learning import learner, leaves, tokens

from nestling.models import MemoryCache
from nestling.models.embedded import tokens_of

QUIET = pytest.mark.filterwarnings("ignore:levels learn from tokens:UserWarning")


def embedded(model, ids):
    return model.get_input_embeddings()(ids).detach()


def soft(batch, length, seed=5):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, 8, generator=random, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_token_is_found_and_nothing_else(dtype):
    torch.manual_seed(0)
    table = torch.randn(5000, 6).to(dtype)  # in more than one part
    table[7, 3:] = table[4999, 3:]
    ids = torch.randint(5000, (3, 40))
    ids[0, :3] = torch.tensor([7, 4999, 0])
    found, known = tokens_of(table[ids], table)
    assert known.all()
    assert torch.equal(found, ids)
    near = table[ids].clone()
    near[1, 2, 5] = torch.nextafter(near[1, 2, 5].float(), torch.tensor(9.0)).to(dtype) + 1
    near[2, 0] = 0
    found, known = tokens_of(near, table)
    assert (~known).nonzero().tolist() == [[1, 2], [2, 0]]
    assert found[1, 2] == found[2, 0] == 0
    assert torch.equal(found[known], ids[known])


def test_rows_that_several_tokens_have_are_no_token():
    """New rows of a table that was made larger are alike, say; nobody knows which one is meant."""
    table = torch.randn(9, 4)
    table[2] = table[8] = table[5]
    found, known = tokens_of(table.unsqueeze(0), table)
    assert (~known[0]).nonzero().flatten().tolist() == [2, 5, 8]
    assert found[0, [2, 5, 8]].tolist() == [0, 0, 0]


def test_embeddings_of_another_type_or_width_are_no_tokens():
    table = torch.zeros(1, 4)
    assert tokens_of(torch.zeros(1, 2, 4), table)[1].all()
    assert not tokens_of(torch.zeros(1, 2, 4).double(), table)[1].any()
    assert not tokens_of(torch.zeros(1, 2, 5), table)[1].any()


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("use_cache", [False, True])
def test_embeddings_of_tokens_teach_as_tokens_do(use_cache, padded):
    model, ids = learner(), tokens(2)
    ids[0, :5] = 0 if padded else ids[0, :5]
    given = {"attention_mask": (ids != 0).long(), "use_cache": use_cache}
    want = model(ids, **given)
    out = model(inputs_embeds=embedded(model, ids), **given)
    assert torch.equal(out.logits, want.logits)
    assert [update[:2] for update in out.updates] == [update[:2] for update in want.updates]
    if use_cache:
        pairs = zip(leaves(out.past_key_values), leaves(want.past_key_values), strict=True)
        assert all(torch.equal(mine, its) for mine, its in pairs)


def test_gradients_reach_the_embeddings_while_they_teach():
    model, ids = learner(), tokens(2, 11)
    x = embedded(model, ids).requires_grad_()
    out = model(inputs_embeds=x)
    assert torch.equal(out.logits, model(ids).logits)
    out.logits.square().sum().backward()
    assert (x.grad.abs().sum(-1) > 0).all()


@pytest.mark.parametrize("learning", ["first_order", "second_order"])
def test_training_from_embeddings_is_training_from_tokens(learning):
    model, ids = learner(learning=learning, truncate=False).train(), tokens(2, 14)
    found = []
    for embeds in (False, True):
        model.zero_grad()
        given = {"inputs_embeds": model.get_input_embeddings()(ids)} if embeds else {}
        out = model(**(given or {"input_ids": ids}), labels=ids)
        out.loss.backward()
        found.append((out.loss.detach(), *(p.grad.clone() for p in model.parameters())))
    for mine, its in zip(*found, strict=True):
        torch.testing.assert_close(mine, its)


def test_embeddings_that_are_constants_give_the_table_no_gradient_of_their_own():
    """As in a model without levels: only what comes after them is trained."""
    model, ids = learner(learning="first_order", tie_word_embeddings=False).train(), tokens(2, 14)
    model(inputs_embeds=embedded(model, ids), labels=ids).loss.backward()
    assert model.get_input_embeddings().weight.grad is None
    assert model.lm_head.weight.grad.any()


@QUIET
@torch.no_grad()
def test_a_soft_prompt_is_read_and_the_text_behind_it_teaches():
    """It teaches nothing, as if it had been read with learn=False; then the tokens go on."""
    model, ids, prompt = learner(), tokens(2), soft(2, 6)
    whole = model(inputs_embeds=torch.cat([prompt, embedded(model, ids)], 1), use_cache=True)
    cache = MemoryCache(2)
    first = model(inputs_embeds=prompt, past_key_values=cache, learn=False)
    rest = model(ids, past_key_values=cache)
    torch.testing.assert_close(whole.logits, torch.cat([first.logits, rest.logits], 1))
    assert [u[:2] for u in whole.updates] == [u[:2] for u in rest.updates]
    for mine, its in zip(leaves(whole.past_key_values), leaves(cache), strict=True):
        torch.testing.assert_close(mine, its)


@QUIET
@torch.no_grad()
@pytest.mark.parametrize("cuts", [(3,), (9,), (12, 15), (5, 6, 7, 20)])
def test_any_split_of_text_with_soft_parts_is_the_same(cuts):
    """Soft parts in front, in the middle, at different places in the sequences, and padding."""
    model, ids = learner(), tokens(3, 24)
    x = embedded(model, ids)
    x[0, 9:12] = soft(1, 3)
    x[1, :4] = soft(1, 4)
    mask = torch.ones_like(ids)
    mask[2, :2] = 0
    whole = model(inputs_embeds=x, attention_mask=mask, use_cache=True)
    cache, pieces = MemoryCache(2), []
    for start, stop in zip((0, *cuts), (*cuts, 24), strict=True):
        given = {"attention_mask": mask[:, :stop], "past_key_values": cache}
        pieces.append(model(inputs_embeds=x[:, start:stop], **given).logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole.logits)
    assert cache.position.tolist() == whole.past_key_values.position.tolist() == [24, 24, 22]
    for row in range(3):
        real = mask[row].bool()
        alone = model(inputs_embeds=x[row : row + 1, real], use_cache=False)
        torch.testing.assert_close(whole.logits[row, real], alone.logits[0])


@QUIET
@torch.no_grad()
def test_mixed_rows_without_a_cache_and_with_padding_behind():
    model, ids = learner(), tokens(2, 16)
    x = embedded(model, ids)
    x[0, 2:5] = soft(1, 3)
    mask = torch.ones_like(ids)
    mask[1, 11:] = 0
    both = model(inputs_embeds=x, attention_mask=mask, use_cache=False).logits
    first = model(inputs_embeds=x[:1], use_cache=False).logits
    second = model(ids[1:, :11], use_cache=False).logits
    torch.testing.assert_close(both[:1], first)
    torch.testing.assert_close(both[1:, :11], second)
    assert not both[1, 11:].any()


@torch.no_grad()
def test_packed_rows_of_embeddings_are_packed_rows_of_tokens():
    model, ids = learner(), tokens(1, 20)
    places = torch.cat([torch.arange(9), torch.arange(11)]).unsqueeze(0)
    want = model(ids, position_ids=places, use_cache=False).logits
    x = embedded(model, ids)
    assert torch.equal(model(inputs_embeds=x, position_ids=places, use_cache=False).logits, want)
    x[:, 12:14] = soft(1, 2)
    out = model(inputs_embeds=x, position_ids=places, use_cache=False, learn=True).logits
    torch.testing.assert_close(out[:, :9], want[:, :9])
    alone = model(inputs_embeds=x[:, 9:], use_cache=False, learn=True).logits
    torch.testing.assert_close(out[:, 9:], alone)


@torch.no_grad()
@pytest.mark.parametrize("beams", [1, 2])
def test_generation_from_embeddings_is_generation_from_tokens(beams):
    model, ids = learner(), tokens(2, 19)
    ids[0, :4] = 0
    given = {"attention_mask": (ids != 0).long(), "num_beams": beams, "do_sample": False}
    given |= {"max_new_tokens": 9, "min_new_tokens": 9}
    given |= {"output_scores": True, "return_dict_in_generate": True}
    want = model.generate(ids, **given)
    found = model.generate(inputs_embeds=embedded(model, ids), **given)
    assert torch.equal(found.sequences, want.sequences[:, 19:])
    torch.testing.assert_close(found.scores, want.scores)
    frozen = model.generate(ids, learn=False, **given)
    assert not torch.allclose(frozen.scores[0], want.scores[0])


@torch.no_grad()
def test_what_teaches_nothing_is_said():
    model, ids = learner(), tokens()
    x, prompt = embedded(model, ids), soft(1, 4)
    model(inputs_embeds=x)  # quiet: tokens
    model(inputs_embeds=torch.cat([prompt[:, :3], x], 1))  # quiet: three would have taught nothing
    with pytest.warns(UserWarning, match="no rows of the embedding table") as told:
        model(inputs_embeds=prompt)
    assert told[0].filename == __file__
    cache = MemoryCache(2)
    model(ids[:, :3], past_key_values=cache)
    with pytest.warns(UserWarning, match="give learn=False to read without this warning"):
        model(inputs_embeds=prompt[:, :1], past_key_values=cache)  # the fourth would have
    model(inputs_embeds=prompt, learn=False)
    model(inputs_embeds=torch.cat([prompt, x], 1), learn=True)  # asked for: tokens do teach
    with pytest.raises(ValueError, match="none of inputs_embeds is a row of the embedding table"):
        model(inputs_embeds=prompt, learn=True)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(ids, inputs_embeds=x, past_key_values=cache)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()
