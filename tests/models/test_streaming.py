"""Streams and saved states."""

from __future__ import annotations

import json

import pytest
import torch
from small_models import MODELS, model_of, tokens

from nestling.files import BrokenFileError
from nestling.models import MemoryCache, fingerprint, load_state, save_state
from nestling.tree import tree_leaves


def last(outputs):
    *_, output = outputs
    return output


def test_losses_of_a_stream_are_those_of_the_whole():
    model = model_of("hope")
    ids = tokens(2, 11)
    losses = torch.cat([o.losses for o in model.stream(ids.split([1, 4, 6], dim=1))], 1)
    logits = model(ids).logits
    expected = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    assert losses[:, 0].isnan().all()
    torch.testing.assert_close(losses[:, 1:].flatten(), expected)


def test_single_tokens_lists_and_tensors_are_the_same_stream():
    model = model_of("hope")
    ids = tokens(1, 10)
    kinds = [iter(ids[0].tolist()), [ids[0, :3].tolist(), [], ids[0, 3:]], [ids]]
    logits = [torch.cat([o.logits for o in model.stream(k, piece=4)], 1) for k in kinds]
    torch.testing.assert_close(logits[0], logits[1])
    torch.testing.assert_close(logits[0], logits[2])


def test_a_stream_that_is_no_stream_of_tokens_says_so():
    model = model_of("hope")
    with pytest.raises(ValueError, match="piece must be at least 1"):
        next(model.stream([1, 2], piece=0))
    with pytest.raises(TypeError, match="takes tokens, not str: encode the text first"):
        model.stream("abc")
    with pytest.raises(TypeError, match="either single tokens or pieces"):
        list(model.stream([1, [2]]))
    with pytest.raises(ValueError, match=r"must be \[T\] or \[B, T\]"):
        list(model.stream([[[[1]]]]))


@pytest.mark.parametrize("name", ["hope", "titans", "deltanet", "transformer"])
def test_the_state_of_a_stream_does_not_grow(name):
    window = {"mixer_options": {"attention": {"window": 5}}} if name == "transformer" else {}
    model = model_of(name, torch.float32, **window)
    sizes = set()
    for output in model.stream([tokens(1, 7, seed=s) for s in range(6)]):
        sizes.add(sum(leaf.numel() for _, leaf in tree_leaves(output.state.states)))
    assert len(sizes) == 1


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_state_goes_on_as_if_nothing_had_happened(name, tmp_path):
    model = model_of(name)
    ids = tokens(2, 13)
    whole = last(model.stream([ids])).logits
    save_state(tmp_path, model, last(model.stream([ids[:, :3]])).state)  # replaced by the next
    save_state(tmp_path, model, last(model.stream([ids[:, :6]])).state)
    assert len(list(tmp_path.iterdir())) == 2
    state = load_state(tmp_path, model)
    assert state.position.tolist() == [6, 6]
    rest = last(model.stream([ids[:, 6:]], state=state)).logits
    assert torch.equal(rest, last(model.stream([ids[:, :6], ids[:, 6:]])).logits)
    torch.testing.assert_close(rest, whole[:, 6:])


def test_a_steered_model_streams_and_its_state_can_be_saved(tmp_path):
    model, ids = (
        model_of("hope", mixer_options={"steered": {"steering": 3, "chunk": 4}}),
        tokens(2, 13),
    )
    whole = model(input_ids=ids).logits
    save_state(tmp_path, model, last(model.stream([ids[:, :6]])).state)
    rest = last(model.stream([ids[:, 6:]], state=load_state(tmp_path, model))).logits
    torch.testing.assert_close(rest, whole[:, 6:])
    said = model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None)
    for place in range(13, 16):
        assert torch.equal(
            said[:, place], model(input_ids=said[:, :place]).logits[:, -1].argmax(-1)
        )


def test_the_state_of_another_model_is_refused(tmp_path):
    model = model_of("hope")
    save_state(tmp_path, model, last(model.stream([tokens(1, 5)])).state)
    other = model_of("hope")
    assert fingerprint(other) == fingerprint(model)
    with torch.no_grad():
        other.model.norm.weight[0] += 1e-6
    with pytest.raises(ValueError, match="belongs to another model"):
        load_state(tmp_path, other)
    longer = {"self_modifying": {"chunk": 8, "chunk_others": 4}}
    with pytest.raises(ValueError, match="belongs to another model"):
        load_state(tmp_path, model_of("hope", mixer_options=longer))


def test_a_damaged_or_empty_state_is_refused(tmp_path):
    model = model_of("hope")
    with pytest.raises(ValueError, match="has not read a token"):
        save_state(tmp_path, model, MemoryCache(2))
    save_state(tmp_path, model, last(model.stream([tokens(1, 5)])).state)
    facts = json.loads((tmp_path / "state.json").read_text())
    facts["meta"]["position"] = [4]
    (tmp_path / "state.json").write_text(json.dumps(facts))
    with pytest.raises(BrokenFileError, match="altered"):
        load_state(tmp_path, model)
