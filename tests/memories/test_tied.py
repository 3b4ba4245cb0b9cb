"""Retention tied to the write (deviation 24): nothing fades where nothing is written."""

from __future__ import annotations

import pytest
import torch

from nestling.memories import Rates, Retention, SelfModifying, SelfModifyingConfig, configure
from nestling.scan.self_modifying import SelfRule

SIZES = {"width": 8, "heads": 2, "chunk": 16, "chunk_others": 16}


def build(rate=None, **options):
    """A memory with random parameters whose rates, where given, are all about this."""
    torch.manual_seed(0)
    memory = SelfModifying(configure(SelfModifyingConfig, **SIZES, **options))
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.add_(torch.randn_like(parameter))
        if rate is not None:
            memory.bias[:, 0] = torch.logit(torch.tensor(rate))
            memory.readout[:, 0] = 0.0
            if memory.gates is not None:
                memory.gates.weight.view(2, 2, -1)[:, 0] = 0.0
    return memory


@torch.no_grad()
@pytest.mark.parametrize("step", [1, 64])
def test_where_nothing_is_written_the_state_stands_still_exactly(step):
    """A thousand tokens that all say rate 0 (its gate is at -200), one by one and in pieces."""
    silent = build(1e-9, retention={"tied": True})
    silent.bias[:, 0] = -200.0
    loose = build(1e-9)
    loose.bias[:, 0] = -200.0
    state = silent.init(2)
    noise = torch.randn(state.weights.first.shape, generator=torch.Generator().manual_seed(1))
    weights = state.weights._replace(first=noise)
    state = state._replace(weights=weights, start=weights)
    fading = state
    x = torch.randn(2, 1024 if step > 1 else 64, 8)
    for at in range(0, x.shape[1], step):
        _, state = silent(x[:, at : at + step], state)
        _, fading = loose(x[:, at : at + step], fading)
    assert torch.equal(state.weights.first, noise)
    assert (fading.weights.first.norm() < 0.9 * noise.norm()) if step > 1 else True


def test_the_gates_are_the_formula():
    """alpha = 1 - s (1 - a), eta = alpha r s; gradients as autograd finds them."""
    rule = SelfRule(tied=True, rate_max=1.5, retain_max=0.95)
    raw = torch.randn(7, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    raw.requires_grad_()
    gates = rule.gates(raw)
    s, f = torch.sigmoid(raw).unbind(-1)
    a = 1e-4 + (0.95 - 1e-4) * f
    alpha = 1 - s * (1 - a)
    torch.testing.assert_close(gates.log_retain.exp(), alpha)
    torch.testing.assert_close(gates.rate, 1.5 * s * alpha)
    share, loss = torch.randn(2, 7, dtype=torch.float64)
    out = (share * torch.log(gates.rate / alpha) + loss * gates.log_retain).sum()
    (want,) = torch.autograd.grad(out, raw)
    found = rule.gates_backward(gates.write, gates.keep, share, loss, None)
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("tied", [False, True])
def test_a_gate_below_its_threshold_is_shut(tied):
    """s = max(0, (sigmoid - c) / (1 - c)) (deviation 25); gradients as autograd finds them."""
    rule = SelfRule(tied=tied, shut=0.4, retain_max=0.95)
    raw = torch.randn(64, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    raw.requires_grad_()
    gates = rule.gates(raw)
    sigmoid, f = torch.sigmoid(raw).unbind(-1)
    s = ((sigmoid - 0.4) / 0.6).clamp_min(0)
    a = 1e-4 + (0.95 - 1e-4) * f
    alpha = 1 - s * (1 - a) if tied else a
    torch.testing.assert_close(gates.rate, s * alpha)
    torch.testing.assert_close(gates.log_retain, alpha.log())
    shut = sigmoid < 0.4
    assert 10 < int(shut.sum()) < 54
    assert (gates.rate[shut] == 0).all()
    assert not tied or (gates.log_retain[shut] == 0).all()
    weight, loss = torch.randn(2, 64, dtype=torch.float64)
    out = (weight * s + loss * gates.log_retain).sum()  # d log s = d s / s
    (want,) = torch.autograd.grad(out, raw)
    found = rule.gates_backward(gates.write, gates.keep, weight * s, loss, None).detach()
    torch.testing.assert_close(found, want)


@torch.no_grad()
def test_a_memory_with_gates_that_shut_keeps_what_it_knows_over_any_noise():
    """Noise whose sigmoids stay below the threshold changes nothing, not even by rounding, and
    the same noise wears down a memory that is only tied."""
    noise = torch.randn(1, 4096, 8, generator=torch.Generator().manual_seed(1))
    kept = []
    for rates in ({"shut": 0.1}, {}):
        memory = build(0.05, retention={"tied": True, "most": 0.9}, rates=rates)
        state = memory.init(1)
        weights = torch.randn(state.weights.first.shape, generator=torch.Generator().manual_seed(2))
        filled = state.weights._replace(first=weights)
        _, after = memory(noise, state._replace(weights=filled, start=filled))
        kept.append((after.weights.first - weights).norm() / weights.norm())
    assert kept[0] == 0
    assert kept[1] > 0.5


def test_rates_start_where_they_are_told_whatever_is_shut():
    for shut in (0.0, 0.05, 0.5):
        rates = Rates(start=(0.02, 0.3), shut=shut)
        memory = SelfModifying(SelfModifyingConfig(width=16, heads=2, rates=rates))
        assert memory.rule.gates(memory.bias).write.tolist() == pytest.approx([0.02, 0.3], rel=1e-4)
    with pytest.raises(ValueError, match=r"shut must be in \[0, 1\); got 1.0"):
        Rates(shut=1.0)


def test_a_tied_memory_is_made_on_any_device():
    with torch.device("meta"):
        memory = SelfModifying(
            SelfModifyingConfig(width=8, heads=2, retention=Retention(tied=True))
        )
    assert memory.bias.is_meta


def adversary(memory, tokens, piece=4096):
    """The longest row ever seen at the ends of pieces, in streams that push one way."""
    g = torch.Generator().manual_seed(3)
    one = torch.randn(8, generator=g)
    most, state = 0.0, None
    for at in range(0, tokens, piece):
        noise = torch.randn(min(piece, tokens - at), 8, generator=g)
        sign = torch.where(torch.arange(noise.shape[0]) % 2 == 0, 1.0, -1.0)[:, None]
        x = torch.stack([one.expand_as(noise), 1e6 * noise.sign(), sign * one, noise])
        _, state = memory(x, state)
        most = max(most, float(state.weights.first.norm(dim=-1).max()))
        assert state.weights.first.isfinite().all()
    return most


@torch.no_grad()
def test_a_hundred_thousand_tokens_of_almost_no_rate_stay_under_the_bound():
    memory = build(1e-4, retention={"tied": True, "most": 0.9})
    reached = adversary(memory, 100_000)
    assert 0 < reached <= float(memory.bound().max()) * (1 + 1e-5)


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"negative": True},
        {"momentum": True},
        {"erase": False},
        {"residual": False},
        {"rates": {"shut": 0.3}},
        {"rates": {"shut": 0.3, "most": 2.0}},
    ],
)
def test_tied_rows_stay_under_the_bound(options):
    memory = build(retention={"tied": True, "most": 0.9}, **options)
    reached = adversary(memory, 4096, piece=256)
    assert 0 < reached <= float(memory.bound().max()) * (1 + 1e-5)


def greedy(shares, a, steps):
    """Rows of length w meet an input that makes them longest, writing with these shares (r = 1)."""
    longest = torch.zeros(())
    for step in range(steps):
        s = shares[step % len(shares)]
        alpha = 1 - s * (1 - a)
        longest = (alpha**2 * (longest**2 + s)).sqrt()  # k orthogonal to the row: nothing is erased
    return float(longest)


@pytest.mark.parametrize("shares", [(1.0,), (0.1,), (1e-3,), (1.0, 1e-3)])
def test_the_tied_bound_holds_for_the_worst_inputs_and_is_tight_for_small_writes(shares):
    memory = SelfModifying(
        SelfModifyingConfig(width=8, heads=2, retention=Retention(tied=True, most=0.9))
    )
    bound = float(memory.bound().max())
    reached = greedy(shares, 0.9, int(50 / min(shares)))
    assert reached <= bound
    if shares == (1e-3,):
        assert reached > 0.99 * bound


def test_retention_is_spread_over_heads_from_fast_to_slow():
    """The share that is lost has geometric steps, as rates have; tied or not, tokens start so."""
    for tied in (False, True):
        retention = Retention(start=(0.9, 0.999), tied=tied)
        memory = SelfModifying(
            SelfModifyingConfig(
                width=24, heads=3, rates=Rates(start=(0.2, 0.4)), retention=retention
            )
        )
        lost = 1 - memory.rule.gates(memory.bias).log_retain.exp()
        assert lost.tolist() == pytest.approx([0.1, 0.01, 0.001], rel=0.12)


def test_a_tied_memory_is_built_on_the_meta_device():
    """Presets count parameters there."""
    config = configure(SelfModifyingConfig, **SIZES, retention={"tied": True})
    with torch.device("meta"):
        memory = SelfModifying(config)
    assert memory.bias.is_meta


def test_a_start_that_cannot_be_is_refused():
    config = SelfModifyingConfig(
        width=8, heads=2, rates=Rates(start=(1e-3, 1e-3)), retention=Retention(tied=True)
    )
    with pytest.raises(ValueError, match="tied retention cannot start at"):
        SelfModifying(config)
