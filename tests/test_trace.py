"""The way of a token through a Hope layer, and of an update through `adapt`, stays short."""

from __future__ import annotations

import pytest

from benchmarks import trace


@pytest.mark.parametrize("way", ["layer", "update"])
def test_few_files_are_passed_through(way):
    found, (files, depth) = getattr(trace, way)(), trace.LIMITS[way]
    assert len(found.files) <= files, found.files
    assert depth is None or found.depth <= depth
