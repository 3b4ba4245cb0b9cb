"""The clock: a level changes exactly at the multiples of its chunk."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestling.levels import Level, boundaries, due


@given(chunk=st.integers(1, 12), length=st.integers(0, 60), cuts=st.lists(st.integers(0, 60)))
def test_boundaries_do_not_depend_on_how_a_stream_is_cut(chunk, length, cuts):
    edges = sorted({0, length, *(c for c in cuts if c < length)})
    seen = [p for a, b in itertools.pairwise(edges) for p in boundaries(a, b, chunk)]
    assert seen == [p for p in range(1, length + 1) if p % chunk == 0]
    assert seen == [p for p in range(length + 1) if due(p, chunk)]


def test_frequency_is_derived_and_infinite_chunks_never_change():
    assert Level(name="fast", chunk=4).frequency == 0.25
    frozen = Level(name="frozen", chunk=math.inf)
    assert frozen.frequency == 0.0
    assert not frozen.due(10**9)
    assert list(boundaries(0, 10**9, math.inf)) == []


@pytest.mark.parametrize("chunk", [0, -1, 2.5, True, "8", math.nan])
def test_bad_chunks_are_named(chunk):
    with pytest.raises(ValueError, match="Level 'x': chunk must be a whole number"):
        Level(name="x", chunk=chunk)
