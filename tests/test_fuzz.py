"""A few cases of `benchmarks/fuzz.py` for every reader: no traceback, no hang, no acceptance."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scripts import benchmark

fuzz = benchmark("fuzz")


@pytest.fixture(scope="module")
def readers():
    return fuzz.readers()


NAMES = "tree state memory checkpoint run packed study llama2c tokenizer gguf model".split()


@pytest.mark.parametrize("name", NAMES)
def test_damaged_and_crafted_files_are_refused(name, readers, tmp_path):
    assert sorted(readers) == sorted(NAMES)
    with fuzz.silent():
        counts = fuzz.run(readers[name], 20, 20, 1, tmp_path)
    assert not counts.failures, counts.failures
    assert counts.ends["random: refused"]
    assert counts.ends["crafted: refused"]
    assert counts.megabytes <= fuzz.MEGABYTES


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_recipes_are_refused_or_right(seed):
    assert fuzz.attempt(lambda: fuzz.recipe_case(random.Random(seed))) in ("refused", "read")
