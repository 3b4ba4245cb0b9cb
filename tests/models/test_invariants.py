"""Invariants of every mixer: causality, streams, batches and padding."""

from __future__ import annotations

import pytest
import torch
from small_models import MODELS, model_of, tokens

from nestling.models import MemoryCache
from nestling.tree import state_select, tree_leaves

PARTITIONS = 60
LENGTH = 14
CLOSE = {torch.float64: 1e-10, torch.float32: 1e-5}


def cut(length: int, random: torch.Generator) -> list[int]:
    """A random partition of `length` into pieces, from single tokens to several chunks."""
    sizes = []
    most = int(torch.randint(1, length + 1, (), generator=random))
    while sum(sizes) < length:
        size = int(torch.randint(1, most + 1, (), generator=random))
        sizes.append(min(size, length - sum(sizes)))
    return sizes


def assert_same_state(one, other, close):
    leaves, others = dict(tree_leaves(one)), dict(tree_leaves(other))
    assert leaves.keys() == others.keys()
    for name, leaf in leaves.items():
        torch.testing.assert_close(leaf, others[name], rtol=close, atol=close, msg=name)


@pytest.mark.parametrize("name", MODELS)
def test_a_token_changes_nothing_before_it(name):
    model = model_of(name, torch.float32)
    ids = tokens(2, LENGTH)
    with torch.no_grad():
        before = model(ids).logits
        for t in range(LENGTH):
            changed = ids.clone()
            changed[:, t] = (changed[:, t] - 1) % 11 + 2
            after = model(changed).logits
            assert torch.equal(after[:, :t], before[:, :t]), t
            assert not torch.equal(after[:, t:], before[:, t:]), t


@pytest.mark.parametrize("name", MODELS)
def test_any_partition_of_a_stream_gives_the_same_outputs_and_state(name):
    random = torch.Generator().manual_seed(3)
    for dtype, close in CLOSE.items():
        model = model_of(name, dtype)
        ids = tokens(1, LENGTH)
        with torch.no_grad():
            whole = model(ids, use_cache=True)
            for _ in range(PARTITIONS // 2):
                parts = ids.split(cut(LENGTH, random), dim=1)
                outputs = list(model.stream(parts))
                logits = torch.cat([output.logits for output in outputs], dim=1)
                torch.testing.assert_close(logits, whole.logits, rtol=close, atol=close)
                state = outputs[-1].state
                assert_same_state(state.states, whole.past_key_values.states, close)
                assert state.get_seq_length() == LENGTH


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_is_as_many_single_runs(name):
    model = model_of(name)
    ids = tokens(3, LENGTH)
    with torch.no_grad():
        together = model(ids, use_cache=True)
        for row in range(3):
            alone = model(ids[row : row + 1], use_cache=True)
            torch.testing.assert_close(together.logits[row : row + 1], alone.logits)
            picked = state_select(together.past_key_values.states, torch.tensor([row]))
            assert_same_state(picked, alone.past_key_values.states, 1e-10)


@pytest.mark.parametrize("side", ["left", "right", "inside"])
@pytest.mark.parametrize("name", MODELS)
def test_padding_leaves_no_trace(name, side):
    model = model_of(name)
    real = tokens(2, LENGTH)
    mask = torch.ones(2, LENGTH + 5, dtype=torch.long)
    holes = {"left": range(5), "right": range(LENGTH, LENGTH + 5), "inside": (0, 3, 4, 9, 18)}
    mask[0, list(holes[side])] = 0
    ids = torch.zeros(2, LENGTH + 5, dtype=torch.long)
    ids[0, mask[0].bool()] = real[0]
    ids[1] = tokens(1, LENGTH + 5, seed=5)
    with torch.no_grad():
        padded = model(ids, attention_mask=mask, use_cache=True)
        alone = model(real[:1], use_cache=True)
        torch.testing.assert_close(padded.logits[0, mask[0].bool()], alone.logits[0])
        row = MemoryCache(2, state_select(padded.past_key_values.states, torch.tensor([0])))
        assert row.position.tolist() == [LENGTH]
        following = tokens(1, 6, seed=7)
        torch.testing.assert_close(
            model(following, past_key_values=row).logits,
            model(following, past_key_values=alone.past_key_values).logits,
        )


@pytest.mark.parametrize("name", MODELS)
def test_sequences_at_different_positions_share_a_batch(name):
    model = model_of(name)
    ids, lengths = tokens(2, LENGTH), (3, 9)
    mask = torch.arange(LENGTH) < torch.tensor(lengths).unsqueeze(1)
    with torch.no_grad():
        cache = model(ids, attention_mask=mask.long(), use_cache=True).past_key_values
        assert cache.position.tolist() == list(lengths)
        following = tokens(2, 7, seed=4)
        both = model(following, past_key_values=cache).logits
        for row, length in enumerate(lengths):
            alone = torch.cat([ids[row : row + 1, :length], following[row : row + 1]], 1)
            torch.testing.assert_close(both[row], model(alone).logits[0, length:])
