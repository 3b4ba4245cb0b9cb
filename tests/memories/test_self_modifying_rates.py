"""Where the rates of self-modifying memories start."""

from __future__ import annotations

import pytest
import torch

from nestling.memories.self_modifying import SelfModifying, SelfModifyingConfig


def starts(**fields) -> list[float]:
    """The rate at which each head starts, read back from its gate."""
    memory = SelfModifying(SelfModifyingConfig(width=24, heads=3, **fields))
    return (memory.rule.rate_max * torch.sigmoid(memory.bias[:, 0])).tolist()


def test_all_heads_start_at_one_tenth():
    assert starts() == pytest.approx([0.1, 0.1, 0.1])


def test_rates_are_spread_over_the_heads():
    assert starts(rates=(0.1, 0.9)) == pytest.approx([0.1, 0.3, 0.9], rel=1e-5)
    assert starts(rates=[0.4, 1.6], negative=True) == pytest.approx([0.4, 0.8, 1.6], rel=1e-5)


@pytest.mark.parametrize("rates", [(0.0, 0.5), (0.1, 1.0), (0.1,)])
def test_rates_stay_within_what_the_gate_can_say(rates):
    with pytest.raises(ValueError, match="rates must be two numbers between 0 and 1"):
        SelfModifyingConfig(width=24, heads=3, rates=rates)
