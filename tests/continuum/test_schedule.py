"""The clock: levels change exactly at the multiples of their chunks, however the stream is cut."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from nestling.continuum import Continuum, MemoryLevel
from nestling.rules import momentum

TOKENS = 25


def levels_of(chunks):
    rules = [{}, {"rule": momentum(0.9)}, {"retain": 0.9}, {"rank": 3}]
    return [
        MemoryLevel(name=f"l{n}", chunk=chunk, rate=0.3, **rules[n])
        for n, chunk in enumerate(chunks)
    ]


def same(one, other):
    if one is None or isinstance(one, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return one is other or (both and torch.equal(one, other))
    return type(one) is type(other) and all(same(a, b) for a, b in zip(one, other, strict=True))


def pieces(ids, cuts):
    edges = [0, *sorted(set(cuts)), ids.shape[1]]
    return [ids[:, a:b] for a, b in itertools.pairwise(edges)]


@settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    chunks=st.lists(st.integers(2, 12), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, TOKENS - 1), max_size=6),
)
def test_levels_change_exactly_on_schedule_for_any_split(make, layout, chunks, cuts):
    model = make("llama", num_hidden_layers=1)
    continuum = Continuum(model, levels_of(chunks), layout["share"](model, len(chunks)))
    ids = torch.randint(0, 32, (1, TOKENS), generator=torch.Generator().manual_seed(2))
    whole = continuum(ids)
    due = [[p for p in range(1, TOKENS) if p % chunk == 0] for chunk in chunks]
    told = [[u.position for u in whole.updates if u.level == f"l{n}"] for n in range(len(chunks))]
    assert told == due

    state, logits, losses = continuum.init(1), [], []
    for piece in pieces(ids, cuts):
        out = continuum(piece, state)
        for n, chunk in enumerate(chunks):
            passed = state.position // chunk != out.state.position // chunk
            assert same(state.levels[n].fast, out.state.levels[n].fast) != passed
        state = out.state
        logits.append(out.logits)
        losses.append(out.losses)
    assert state.position == TOKENS - 1
    for one, other in zip(state.levels, whole.state.levels, strict=True):
        assert same(one.fast, other.fast)
        assert same(one.rule, other.rule)
    torch.testing.assert_close(torch.cat(logits, 1), whole.logits, atol=1e-5, rtol=1e-4)
    got, want = torch.cat(losses, 1), whole.losses
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("family", ["hope", "gemma2", "mistral", "gpt2"])
def test_token_by_token_is_the_same_memory(make, layout, ids, family):
    model = make(family)
    if family == "hope":
        from nestling.continuum import own_slots

        slots, chunks = own_slots(model), (4, 8)
    else:
        slots, chunks = layout["share"](model, 2), (5, 10)
    levels = [MemoryLevel(name=str(c), chunk=c, rate=0.5) for c in chunks]
    continuum = Continuum(model, levels, slots)
    whole, state, logits = continuum(ids), None, []
    for t in range(ids.shape[1]):
        out = continuum(ids[:, t : t + 1], state)
        state = out.state
        logits.append(out.logits)
    assert all(same(a.fast, b.fast) for a, b in zip(state.levels, whole.state.levels, strict=True))
    torch.testing.assert_close(torch.cat(logits, 1), whole.logits, atol=1e-5, rtol=1e-4)
    assert not torch.equal(continuum(ids, learn=False).logits, whole.logits)


@pytest.mark.parametrize("retain", [1.0, 0.9])
def test_a_state_that_was_handed_out_never_changes(make, layout, ids, retain):
    """Within a call differences are updated in place; what the caller holds is left alone."""
    model = make("llama")
    levels = [MemoryLevel(name="fast", chunk=2, rate=0.3, retain=retain),
              MemoryLevel(name="slow", chunk=4, rate=0.1)]  # fmt: skip
    continuum = Continuum(model, levels, layout["share"](model, 2))
    first = continuum(ids[:, :9])
    before = copy.deepcopy(first.state.levels)
    second = continuum(ids[:, 9:], first.state)
    assert sum(update.level == "fast" for update in second.updates) > 2
    assert same(before, first.state.levels)
    assert same(second.state.levels, continuum(ids).state.levels)


def test_segment_and_context_are_boundaries_too(make, layout, ids):
    model = make("llama", max_position_embeddings=16)
    level = [MemoryLevel(name="one", chunk=12, rate=0.5)]
    slots = layout["share"](model, 1)
    short = Continuum(model, level, slots)
    assert short.context == 16  # bounded by the model
    whole, state = short(ids), None
    for piece in pieces(ids, (3, 17, 18, 30)):
        state = short(piece, state).state
    assert same(state.levels, whole.state.levels)
    assert whole.state.cache[0][0].shape[-2] <= 16
    fine = Continuum(model, level, slots, segment=4)(ids)
    assert [u.position for u in fine.updates] == [12, 24, 36]
    assert not same(fine.state.levels[0].fast, whole.state.levels[0].fast)  # cut at the cache


def test_learning_can_pause(make, layout, ids):
    model = make("llama")
    levels = [MemoryLevel(name="one", chunk=8, rate=0.5)]
    continuum = Continuum(model, levels, layout["share"](model, 1))
    first = continuum(ids[:, :20])
    read = continuum(ids[:, 20:], first.state, learn=False)
    assert same(read.state.levels, first.state.levels)
    assert not read.updates
    assert read.state.position == 40
    again = continuum(ids, read.state)  # the clock went on
    assert [u.position for u in again.updates] == [48, 56, 64, 72, 80]
    assert not again.losses.isnan().any()


def test_only_wanted_targets_are_learned(make, layout, ids):
    model = make("llama").double()
    levels = [MemoryLevel(name="one", chunk=8, rate=0.5, rule=momentum(0.5))]
    continuum = Continuum(model, levels, layout["share"](model, 1))
    both = ids.expand(2, -1)
    wanted = torch.ones_like(both, dtype=torch.bool)
    wanted[1] = False
    out = continuum(both, learn=wanted)
    alone = continuum(ids)
    for pair, one in zip(out.state.levels[0].fast, alone.state.levels[0].fast, strict=True):
        torch.testing.assert_close(pair[:1], one)
        assert not pair[1].any()
    wanted[1, 1:9:2] = True  # half of the first chunk: the mean over those
    half = continuum(both, learn=wanted)
    assert torch.equal(half.state.levels[0].updates, torch.tensor([5, 1]))
    losses = alone.losses[0, 1:9:2].mean()
    torch.testing.assert_close(half.updates[0].loss[1], losses)
