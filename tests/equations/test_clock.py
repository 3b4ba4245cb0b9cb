"""The clock of the continuum memory system."""

from __future__ import annotations

import pytest
import torch

from nestling.levels import Level


@pytest.mark.equation(71)
def test_levels_change_only_on_their_clock_by_what_they_accumulated():
    levels = [Level(name="fast", chunk=2), Level(name="slow", chunk=4)]
    grads = torch.randn(9, 3)
    for level in levels:
        weight, chunk_sum, trace = torch.zeros(3), torch.zeros(3), []
        for position, grad in enumerate(grads, start=1):
            chunk_sum = chunk_sum + 0.1 * grad
            if level.due(position):
                weight, chunk_sum = weight - chunk_sum, torch.zeros(3)
            trace.append(weight)
        for position, weight in enumerate(trace, start=1):
            done = position // level.chunk * level.chunk
            torch.testing.assert_close(weight, -0.1 * grads[:done].sum(0))
