"""Texts of different lengths in one batch, as tokenizers pad them."""

from __future__ import annotations

import pytest
import torch

from nestling.continuum import Continuum, MemoryLevel, align

LEVELS = [MemoryLevel(name="fast", chunk=4, rate=0.5), MemoryLevel(name="slow", chunk=8, rate=0.5)]


def padded_in_front(ids, lengths):
    """Rows of `ids` cut to their lengths, with zeros in front."""
    mask = torch.zeros_like(ids)
    batch = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        batch[row, -length:] = ids[row, :length]
        mask[row, -length:] = 1
    return batch, mask


@pytest.mark.parametrize("family", ["llama", "hope"])
def test_left_padding_moved_to_the_end_learns_as_each_text_alone(make, layout, family):
    model = make(family).double()
    slots = layout["share"](model, 2)
    continuum = Continuum(model, LEVELS, slots)
    ids = torch.randint(1, 32, (3, 25), generator=torch.Generator().manual_seed(5))
    lengths = (25, 17, 9)  # whole numbers of chunks, and the last target
    batch, learn = align(*padded_in_front(ids, lengths))
    out = continuum(batch, learn=learn)
    for row, length in enumerate(lengths):
        assert torch.equal(batch[row, :length], ids[row, :length])
        assert learn[row].tolist() == [True] * length + [False] * (25 - length)
        alone = continuum(ids[row : row + 1, :length])
        torch.testing.assert_close(out.logits[row, :length], alone.logits[0])
        for slot in slots:
            mine, its = (continuum.delta(state, slot.name) for state in (out.state, alone.state))
            torch.testing.assert_close(mine[row], its[0])


def test_padding_inside_a_text_and_other_shapes_are_refused():
    ids = torch.arange(6).view(1, 6)
    with pytest.raises(ValueError, match="padding inside a text"):
        align(ids, torch.tensor([[1, 1, 0, 1, 1, 0]]))
    with pytest.raises(ValueError, match="padding inside a text"):
        align(ids, torch.tensor([[0, 1, 0, 0, 1, 1]]))
    with pytest.raises(ValueError, match="alike"):
        align(ids, torch.ones(1, 5))
    kept, learn = align(ids, torch.tensor([[0, 0, 1, 1, 1, 0]]))
    assert kept[0, :3].tolist() == [2, 3, 4]
    assert learn[0].tolist() == [True] * 3 + [False] * 3
