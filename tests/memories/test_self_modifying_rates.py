"""Where the gates of self-modifying memories start, and what heads do with their writes."""

from __future__ import annotations

import pytest
import torch

from nestling.memories import SelfModifying, SelfModifyingConfig, Titans, TitansConfig, configure


def starts(**fields) -> list[float]:
    """The rate at which each head starts, read back from its gate."""
    memory = SelfModifying(configure(SelfModifyingConfig, width=24, heads=3, **fields))
    return (memory.rule.rate_max * torch.sigmoid(memory.bias[:, 0])).tolist()


def test_all_heads_start_at_one_hundredth():
    assert starts() == pytest.approx([0.01, 0.01, 0.01])


def gradient_of_titans(length: int, rate: float) -> float:
    """The norm of a gradient through an untrained Titans that reads sixteen tokens at random."""
    torch.manual_seed(0)
    memory = Titans(configure(TitansConfig, width=32, heads=2, rates=(rate, rate)))
    x = torch.randn(16, 32)[torch.randint(16, (2, length))]
    y = memory(x)[0]
    found = torch.autograd.grad((y * torch.randn_like(y)).sum(), list(memory.parameters()))
    return float(torch.cat([g.flatten() for g in found]).norm())


def test_gradients_through_an_untrained_titans_do_not_explode_on_long_texts():
    """Errors of a chunk are taken where it begins: at ten times the rate its steps overshoot."""
    (rate, _) = TitansConfig(width=32, heads=2).rates.start
    growth = 16**0.5  # of a sum of independent terms
    assert gradient_of_titans(2048, rate) < 2 * growth * gradient_of_titans(128, rate)
    assert gradient_of_titans(2048, 0.1) > 100 * growth * gradient_of_titans(128, 0.1)


def test_rates_are_spread_over_the_heads():
    assert starts(rates=(0.1, 0.9)) == pytest.approx([0.1, 0.3, 0.9], rel=1e-5)
    assert starts(rates=[0.4, 1.6], negative=True) == pytest.approx([0.4, 0.8, 1.6], rel=1e-5)


@pytest.mark.parametrize("rates", [(0.0, 0.5), (0.1, 1.0), (0.1,)])
def test_rates_stay_within_what_the_gate_can_say(rates):
    with pytest.raises(ValueError, match="rates must be two numbers between 0 and 1"):
        configure(SelfModifyingConfig, width=24, heads=3, rates=rates)


def test_retention_starts_where_it_is_told():
    memory = SelfModifying(
        configure(SelfModifyingConfig, width=24, heads=3, retain=0.9, retain_max=0.999)
    )
    started = memory.rule.gates(memory.bias).log_retain.exp().tolist()
    assert started == pytest.approx([0.9] * 3, rel=1e-3)


@torch.no_grad()
def test_a_head_that_adds_counts_and_one_that_erases_settles():
    """The same token again and again: its writes add up, or replace each other."""
    torch.manual_seed(0)
    gates = {"rates": (0.5, 0.5), "retain": 0.99999, "retain_max": 0.999999}
    memory = SelfModifying(
        configure(SelfModifyingConfig, width=16, heads=2, adaptive=(), adding=1, conv=1, **gates)
    )
    token = torch.randn(1, 1, 16)
    norms = {
        n: memory(token.expand(1, n, 16))[1].weights.first[0, :, 0].norm(dim=(-2, -1))
        for n in (30, 60)
    }
    adds, erases = (norms[60] / norms[30]).tolist()
    assert adds == pytest.approx(2, rel=1e-3)
    assert erases == pytest.approx(1, rel=1e-3)
