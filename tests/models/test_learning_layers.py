"""Levels that learn in the last layers only: what lies below is read once for a whole call."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from nestling import describe
from nestling.continuum import Continuum, naive, own_slots
from nestling.models import MemoryCache, NestlingConfig, NestlingForCausalLM, presets
from nestling.models import learning as module
from nestling.models.card import model_card
from nestling.tree import tree_leaves
from tests.models.test_learning import LEVELS, gradients, learner, leaves, tokens

MIXERS = ("self_modifying", "steered", "attention", "deltanet")


def last_learns(mixer="deltanet", layers=1, **fields):
    fields = {"num_hidden_layers": 3, "topology": "parallel", **fields}
    return learner(mixer=mixer, learning_layers=layers, **fields)


def loss_and_gradients(model, ids, **options):
    model.zero_grad(set_to_none=True)
    out = model(ids, labels=ids, **options)
    out.loss.backward()
    return out, gradients(model)


def close(mine, its, names=None):
    for name in mine if names is None else names:
        assert (mine[name] is None) == (its[name] is None), name
        if mine[name] is not None:
            torch.testing.assert_close(mine[name], its[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("mixer", MIXERS)
def test_the_last_layers_learn_as_outside_and_as_in_the_naive_loops(mixer, layers):
    model, ids = last_learns(mixer, layers), tokens(2)
    with torch.no_grad():
        out = model(ids, use_cache=True)
    slots = own_slots(model, 3 - layers)
    assert len(slots) == layers * 2 * 2  # two levels of two matrices
    assert all(int(slot.name.split(".")[2]) >= 3 - layers for slot in slots)
    levels = model.config.memory_levels
    want = Continuum(model, levels, slots)(ids)
    assert torch.equal(out.logits, want.logits)
    for mine, its in zip(leaves(out.past_key_values), tree_leaves((want.state,)), strict=True):
        assert torch.equal(mine, its[1])
    alone = naive(model, levels, slots, ids[:1])
    torch.testing.assert_close(out.logits[:1], alone.logits.detach())


@pytest.mark.parametrize("mixer", MIXERS)
def test_one_last_layer_has_the_exact_gradient_in_one_pass(mixer):
    """Nothing above carries a state, so cutting it at segments cuts nothing."""
    ids = tokens(2)
    cut, exact = (last_learns(mixer, truncate=truncate).train() for truncate in (True, False))
    mine, quick = loss_and_gradients(cut, ids)
    its, slow = loss_and_gradients(exact, ids)
    torch.testing.assert_close(mine.loss.double(), its.loss.double(), rtol=1e-6, atol=1e-6)
    close(quick, slow)


@pytest.mark.parametrize("mixer", MIXERS)
def test_above_the_cut_gradients_are_those_of_segments(mixer, monkeypatch):
    """Two of three layers learn: reading below in one piece changes nothing above."""
    ids = tokens(2)
    halves, quick = loss_and_gradients(last_learns(mixer, 2).train(), ids)
    monkeypatch.setattr(module, "_reads_below_once", lambda model, request: False)
    whole, slow = loss_and_gradients(last_learns(mixer, 2).train(), ids)
    torch.testing.assert_close(halves.loss, whole.loss)
    above = ("model.layers.2.", "model.layers.1.channel.", "model.norm.")
    names = [name for name in quick if name.startswith(above)]
    assert len(names) > 10
    close(quick, slow, names)
    below = [n for n in quick if n.startswith("model.layers.0.") and quick[n] is not None]
    assert any(not torch.allclose(quick[n], slow[n]) for n in below)  # no longer cut there


def test_rate_0_trains_as_a_model_that_stands_still():
    ids = tokens(2)
    still = tuple({**level, "rate": 1e-30, "retain": 1.0} for level in LEVELS)
    learning, mine = loss_and_gradients(last_learns(levels=still).train(), ids)
    frozen = tuple({"name": level["name"], "chunk": level["chunk"]} for level in LEVELS)
    plain, its = loss_and_gradients(last_learns(levels=frozen).train(), ids)
    torch.testing.assert_close(learning.loss.double(), plain.loss.double(), rtol=1e-6, atol=1e-6)
    close(mine, its)


@pytest.mark.parametrize("kept", [False, True])
def test_below_is_read_once_for_many_segments(kept, monkeypatch):
    """A cache asks for the states where the last, unfinished segment begins: one piece more."""
    model, ids = last_learns().train(), tokens(2)
    read = []
    below = model.model.below
    monkeypatch.setattr(
        model.model, "below", lambda ids, *rest: read.append(ids.shape[1]) or below(ids, *rest)
    )
    cache = MemoryCache(3) if kept else None
    model(ids, labels=ids, use_cache=kept, past_key_values=cache).loss.backward()
    assert read == ([20, 3] if kept else [23])  # chunks of 4: five segments and three tokens


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("cuts", [(23,), (5, 6, 12, 23), (1, 2, 3, 9, 23), (8, 16, 23)])
def test_calls_that_go_on_read_and_learn_as_one(mixer, cuts):
    model, ids = last_learns(mixer), tokens(2)
    with torch.no_grad():
        want = model(ids, use_cache=True)
    cache, found = MemoryCache(3), []
    model.train()
    for start, end in pairwise((0, *cuts)):
        part = ids[:, start:end]
        out = model(part, labels=part, past_key_values=cache, use_cache=True)
        found.append(out.logits)
    torch.testing.assert_close(torch.cat(found, 1), want.logits)
    for mine, its in zip(leaves(cache), leaves(want.past_key_values), strict=True):
        torch.testing.assert_close(mine, its)
    model.eval()  # and go on from there
    more = tokens(2, 9, seed=3)
    with torch.no_grad():
        mine = model(more, past_key_values=cache, use_cache=True).logits
        its = model(more, past_key_values=want.past_key_values, use_cache=True).logits
    torch.testing.assert_close(mine, its)


def test_a_channel_with_a_state_of_its_own_goes_on_where_the_cut_is():
    model = last_learns(layers=2, channel=["cms", "in_context", "cms"])
    ids = tokens(2)
    with torch.no_grad():
        want = model(ids, use_cache=True).logits
    cache, found = MemoryCache(3), []
    model.train()
    for part in ids.split(5, 1):
        out = model(part, labels=part, past_key_values=cache, use_cache=True)
        found.append(out.logits)
    torch.testing.assert_close(torch.cat(found, 1), want)


def test_padding_on_the_left_changes_no_gradient():
    model, ids = last_learns().train(), tokens(2, 17)
    _, want = loss_and_gradients(model, ids)
    padded = torch.cat([torch.zeros(2, 4, dtype=torch.long), ids], 1)
    labels = torch.where(padded == 0, -100, padded)
    model.zero_grad(set_to_none=True)
    model(padded, attention_mask=(padded != 0).long(), labels=labels).loss.backward()
    close(gradients(model), want)


@pytest.mark.parametrize("piece", [5, 1024])
@pytest.mark.parametrize("mixer", MIXERS)
def test_recomputing_below_changes_no_gradient(mixer, piece, monkeypatch):
    monkeypatch.setattr("nestling.models.modeling.PIECE", piece)
    model, ids = last_learns(mixer).train(), tokens(2)
    _, want = loss_and_gradients(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    calls = []
    mixer_of = model.model.layers[0].mixer
    forward = mixer_of.forward
    monkeypatch.setattr(mixer_of, "forward", lambda *a: calls.append(1) or forward(*a))
    _, mine = loss_and_gradients(model, ids)
    close(mine, want)
    pieces = 5 if piece == 5 and mixer != "attention" else 1
    assert len(calls) == 2 * pieces  # each of them computed again
    assert model.model.layers[2].gradient_checkpointing  # as it was


def test_learned_rates_and_natural_steps_learn_there_too():
    ids = tokens(2)
    model = last_learns(learn_rates=True).train()
    _, found = loss_and_gradients(model, ids)
    assert found["rates.log_rate"].abs().min() > 0
    model = last_learns(natural=True).train()
    before = [layer.channel.moments.inputs.clone() for layer in model.model.layers]
    model(ids, labels=ids).loss.backward()
    moved = [
        not torch.equal(old, layer.channel.moments.inputs)
        for old, layer in zip(before, model.model.layers, strict=True)
    ]
    assert moved == [False, False, True]


def test_only_these_layers_have_fast_weights():
    model = last_learns()
    with torch.no_grad():
        out = model(tokens(1, 40), use_cache=True)
    (state,) = out.past_key_values.learned.states
    assert [len(level.fast) for level in state.levels] == [2, 2]  # one layer's two matrices each
    whole = last_learns(layers=None)
    with torch.no_grad():
        out = whole(tokens(1, 40), use_cache=True)
    (state,) = out.past_key_values.learned.states
    assert [len(level.fast) for level in state.levels] == [6, 6]


def test_more_layers_than_there_are_is_all_of_them():
    ids = tokens(2)
    _, mine = loss_and_gradients(last_learns(layers=7).train(), ids)
    _, its = loss_and_gradients(last_learns(layers=None).train(), ids)
    close(mine, its)


def test_what_cannot_be_is_said():
    with pytest.raises(ValueError, match="learning_layers must be at least 1; got 0"):
        last_learns(layers=0)
    with pytest.raises(ValueError, match="none of these last layers has the channel 'cms'"):
        NestlingConfig(
            num_hidden_layers=2,
            channel=["cms", "swiglu"],
            levels=[dict(level) for level in LEVELS],
            learning_layers=1,
        )


def test_it_is_saved_and_may_be_changed(tmp_path):
    model = NestlingForCausalLM(presets.tiny("hope", num_hidden_layers=2, hidden_size=16))
    model.save_pretrained(tmp_path)
    again = NestlingForCausalLM.from_pretrained(tmp_path)
    assert again.config.learning_layers == model.config.learning_layers == 1
    every = NestlingForCausalLM.from_pretrained(tmp_path, learning_layers=None)
    assert every.config.first_learning == 0


def test_pages_say_where_levels_learn():
    model = last_learns(dtype=torch.float32)
    assert "fast, slow learn while a sequence is read in the layers from 2 on" in str(
        describe(model)
    )
    assert "levels (learn while it reads, in the last layer)" in model_card(model.config)
    two = model_card(last_learns(layers=2).config)
    assert "levels (learn while it reads, in the last 2 layers)" in two
