"""One token read alone is a token of the whole, from weights as they are now, and in few calls."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from nestling.models import MemoryCache, NestlingForCausalLM, modeling, one_token, presets
from nestling.tree import tree_leaves
from tests.models.small_models import MODELS, model_of, tokens

LEARNING = [
    {"name": "fast", "chunk": 4, "rate": 0.5},
    {"name": "slow", "chunk": 8, "rate": 0.3, "retain": 0.9},
]


@pytest.fixture
def taken(monkeypatch):
    """Whether each one-token call was read this way."""
    found = []

    def read(*given):
        logits = one_token.read_one_token(*given)
        found.append(logits is not None)
        return logits

    monkeypatch.setattr(modeling, "read_one_token", read)
    return found


def begun(model, ids, length=5, **options):
    cache = MemoryCache(len(model.model.layers))
    model(ids[:, :length], past_key_values=cache, use_cache=True, **options)
    return cache


def one_by_one(model, ids, cache):
    start = cache.get_seq_length()
    steps = [model(ids[:, t : t + 1], past_key_values=cache) for t in range(start, ids.shape[1])]
    return torch.cat([step.logits for step in steps], 1)


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_read_alone_are_those_of_the_whole(name, batch, taken):
    model, ids = model_of(name), tokens(batch, 14)
    for parameter in model.parameters():
        parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
    whole = MemoryCache(2)
    wanted = model(ids, past_key_values=whole, use_cache=True).logits
    cache = begun(model, ids)
    torch.testing.assert_close(one_by_one(model, ids, cache), wanted[:, 5:], rtol=1e-9, atol=1e-9)
    assert taken == [True] * 9
    assert cache.get_seq_length() == 14
    pairs = zip(tree_leaves(cache.states), tree_leaves(whole.states), strict=True)
    for (_, found), (_, state) in pairs:
        torch.testing.assert_close(found, state, rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("topology", ["chain", "parallel"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("batch", [1, 3])
def test_levels_learn_from_tokens_read_alone(batch, activation, topology, taken):
    """And to the bit what they learn without: they read each segment again as a whole."""
    form = {"levels": LEARNING, "activation": activation, "topology": topology}
    model, ids = model_of("hope", **form), tokens(batch, 27)
    wanted = model(ids).logits
    cache, plain = begun(model, ids), begun(model, ids)
    found = one_by_one(model, ids, cache)
    torch.testing.assert_close(found, wanted[:, 5:], rtol=1e-9, atol=1e-9)
    assert taken.count(False) == 5  # after 8, 12, ... 24 tokens a level steps first
    assert taken.count(True) == 17
    model.model.layers[0].mixer.register_forward_hook(lambda *_: None)
    one_by_one(model, ids, plain)
    assert taken[22:] == [False] * 22
    ours, theirs = cache.learned.states[0], plain.learned.states[0]
    assert torch.equal(ours.tokens, theirs.tokens)
    assert torch.equal(ours.wanted, theirs.wanted)
    for (_, one), (_, other) in zip(
        tree_leaves(ours.levels), tree_leaves(theirs.levels), strict=True
    ):
        assert torch.equal(one, other)


@torch.no_grad()
def test_caches_take_turns_and_are_copied():
    """What one has learned is not the other's; sequences may be chosen in between."""
    model, ids = model_of("hope", levels=LEARNING), tokens(4, 20)
    one, other = begun(model, ids[:1], 9), begun(model, ids[1:3], 7)
    wanted = [model(rows).logits for rows in (ids[:1], ids[1:3])]
    for _ in range(6):
        for cache, rows, whole in ((one, ids[:1], wanted[0]), (other, ids[1:3], wanted[1])):
            at = cache.get_seq_length()
            logits = model(rows[:, at : at + 1], past_key_values=cache).logits
            torch.testing.assert_close(logits, whole[:, at : at + 1], rtol=1e-9, atol=1e-9)
    twin = deepcopy(one)
    other.batch_select_indices(torch.tensor([1, 0]))
    for cache, rows, whole in (
        (one, ids[:1], wanted[0]),
        (twin, ids[:1], wanted[0]),
        (other, ids[1:3].flip(0), wanted[1].flip(0)),
    ):
        at = cache.get_seq_length()
        found = one_by_one(model, rows, cache)
        torch.testing.assert_close(found, whole[:, at:], rtol=1e-9, atol=1e-9)


def replaced(model):
    model.model.layers[1].mixer.shell.out = nn.Linear(16, 16, bias=False, dtype=torch.float64)


def stepped(model):
    loss = model(tokens(1, 6), labels=tokens(1, 6)).loss
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def loaded(model):
    model.load_state_dict(model_of("hope").state_dict())
    with torch.no_grad():
        model.model.norm.weight.mul_(2)


def assigned(model):
    weight = model.model.layers[0].channel.mlps[0].down.weight
    weight.data = 2 * weight.data


def wrapped(model):
    layer = model.model.layers[0].channel.mlps[1].up
    layer.register_forward_hook(lambda module, given, y: 2 * y)


CHANGES = [replaced, stepped, loaded, assigned, wrapped]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_seen_at_once(change):
    model, ids = model_of("hope"), tokens(2, 9)
    with torch.no_grad():
        cache = begun(model, ids)
        before = model(ids[:, 5:6], past_key_values=cache).logits
    change(model)
    with torch.no_grad():
        cache, plain = begun(model, ids), begun(model, ids)
        model(ids[:, 5:6], past_key_values=cache)
        found = model(ids[:, 6:7], past_key_values=cache).logits
        wanted = model(ids[:, 5:7], past_key_values=plain).logits
    assert not torch.allclose(wanted[:, :1], before)
    torch.testing.assert_close(found, wanted[:, 1:], rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_weights_changed_behind_autograd_are_seen_by_the_next_cache():
    model, ids = model_of("hope"), tokens(1, 9)
    model(ids[:, 5:6], past_key_values=begun(model, ids))
    for parameter in model.parameters():
        parameter.data.mul_(1.1)  # (leaves no version)
    found = one_by_one(model, ids, begun(model, ids))
    torch.testing.assert_close(found, model(ids).logits[:, 5:], rtol=1e-9, atol=1e-9)


def test_where_modules_are_called(taken, monkeypatch):
    """Gradients, autocast, padding, wrapped layers, other dtypes, and what is asked for."""
    model, ids = model_of("hope", torch.float32), tokens(2, 6)
    token = ids[:, 5:]
    with torch.no_grad():
        cache = begun(model, ids)
    model(token, past_key_values=cache.copy())
    assert taken.pop() is False  # gradients may be wanted
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            model(token, past_key_values=cache.copy())
        assert taken.pop() is False
        mask = torch.ones(2, 6)
        assert model(token, mask, past_key_values=cache.copy()).logits is not None
        assert taken.pop() is True
        mask[0, -1] = 0
        model(token, mask, past_key_values=cache.copy())
        assert model(token, past_key_values=cache.copy(), labels=token).loss is not None
        assert model(token, past_key_values=cache.copy(), output_hidden_states=True).hidden_states
        assert taken == []
        layer = model.model.layers[0].mixer.shell.out
        parametrize.register_parametrization(layer, "weight", nn.Identity())
        model(token, past_key_values=cache.copy())
        assert taken.pop() is False
        parametrize.remove_parametrizations(layer, "weight")
        model(token, past_key_values=cache.copy())
        assert taken.pop() is True
        monkeypatch.setattr(one_token, "MOST", 100)
        one_token._KEPT.clear()
        model(token, past_key_values=cache.copy())
        assert taken.pop() is False
        monkeypatch.setattr(one_token, "MOST", 2**20)
        half = model.to(torch.bfloat16)
        half(token, past_key_values=begun(half, ids))
        assert taken.pop() is False


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_tokens_read_in_inference_mode_can_be_read_on_from_outside(mode):
    model, ids = model_of("hope", levels=LEARNING), tokens(1, 20)
    with torch.no_grad():
        wanted = model(ids).logits
    with mode():
        cache = begun(model, ids)
        parts = [one_by_one(model, ids[:, :11], cache)]
    with torch.no_grad():
        parts.append(one_by_one(model, ids, cache))
    torch.testing.assert_close(torch.cat(parts, 1), wanted[:, 5:], rtol=1e-9, atol=1e-9)
    assert not any(leaf.is_inference() for _, leaf in tree_leaves(cache.learned.states))


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 2])
def test_what_was_returned_stays(batch):
    """The next token has the places of this one's results, but not those of what it returned."""
    model, ids = model_of("hope"), tokens(batch, 12)
    cache, kept = begun(model, ids), []
    for t in range(5, 12):
        logits = model(ids[:, t : t + 1], past_key_values=cache).logits
        leaves = [logits, *(leaf for _, leaf in tree_leaves(cache.states))]
        kept.append((leaves, [leaf.clone() for leaf in leaves]))
        if t == 8:  # another batch in between
            begun(model, tokens(4, 6))
            model(tokens(4, 1), past_key_values=begun(model, tokens(4, 5)))
    for leaves, copies in kept:
        for leaf, copy in zip(leaves, copies, strict=True):
            assert torch.equal(leaf, copy)


@torch.no_grad()
def test_threads_write_at_once_with_one_model():
    model, rows = model_of("hope"), tokens(4, 60)
    wanted = [one_by_one(model, row, begun(model, row)) for row in rows.split(1)]

    def write(row):
        with torch.no_grad():
            return one_by_one(model, row, begun(model, row))

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(write, rows.split(1)))
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def test_a_forgotten_model_is_freed():
    model, ids = model_of("hope"), tokens(1, 6)
    with torch.no_grad():
        model(ids[:, 5:], past_key_values=begun(model, ids))
    assert model in one_token._KEPT
    before = len(one_token._KEPT)
    del model
    gc.collect()
    assert len(one_token._KEPT) < before


class Calls(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize("learn", [False, True])
def test_a_token_takes_few_operations(learn):
    """Of all kinds, at four layers: about 50 a layer."""
    size = presets.Size(width=64, layers=4, heads=4, vocabulary=32, parameters=300_000)
    model = NestlingForCausalLM(presets.configure(size, "hope")).eval()
    ids = torch.randint(32, (1, 6))
    cache = begun(model, ids, 4, learn=learn)
    model(ids[:, 4:5], past_key_values=cache, learn=learn)
    with Calls() as calls:
        model(ids[:, 5:], past_key_values=cache, learn=learn)
    assert calls.count <= 220
