"""The example that learns where a memory begins: it runs, and learning to learn is what helps."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "meta_learning.py"))


@pytest.mark.parametrize("way", ["first_order", "reptile", "second_order"])
def test_a_memory_that_learned_where_to_begin_learns_new_languages(way):
    quarters = EXAMPLE["loss_of"](EXAMPLE["train"](way, 0.3, seed=0, steps=40), seed=2)
    assert quarters[-1] < 1.9  # chance is 2.77
    assert quarters[0] > quarters[-1] + 0.5  # it falls while it reads


def test_a_memory_that_begins_anywhere_does_not():
    quarters = EXAMPLE["loss_of"](EXAMPLE["train"]("none", 0.3, seed=0, steps=40), seed=2)
    assert quarters[-1] > 2.6
