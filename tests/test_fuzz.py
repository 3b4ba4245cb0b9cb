"""A few cases of `benchmarks/fuzz.py` for every reader: no traceback, no hang, no acceptance."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

_SPEC = importlib.util.spec_from_file_location(
    "fuzz", Path(__file__).parents[1] / "benchmarks" / "fuzz.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
fuzz = importlib.util.module_from_spec(_SPEC)
sys.modules["fuzz"] = fuzz
_SPEC.loader.exec_module(fuzz)


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
