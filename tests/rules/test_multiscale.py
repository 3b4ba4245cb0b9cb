"""M3: Algorithm 1 line by line, and what the default promises."""

from __future__ import annotations

import pytest
import torch

from nestling.rules import Gates, Write, apply
from nestling.rules.multiscale import multiscale, multiscale_literal
from nestling.rules.newton_schulz import newton_schulz_naive

SECONDS = ["update", "gradient", "none"]


def run(rule, weight, grads, rate=0.1, state=None, start=0):
    state = rule.init(weight) if state is None else state
    for step, grad in enumerate(grads, start + 1):
        weight, state = apply(rule, weight, Write(grad), state, Gates(rate=rate, step=step))
    return weight, state


@pytest.mark.parametrize("second", SECONDS)
def test_scaling_all_gradients_changes_nothing(second):
    weight, grads = torch.randn(6, 9), torch.randn(20, 6, 9)
    rule = multiscale(second=second, chunk=4)
    plain, _ = run(rule, weight, grads)
    for factor in (1e-6, 1e3):
        scaled, _ = run(rule, weight, grads * factor)
        torch.testing.assert_close(scaled, plain, rtol=1e-4, atol=1e-5)


def test_literal_depends_on_the_scale():
    weight, grads = torch.randn(6, 9), torch.randn(20, 6, 9)
    plain, _ = run(multiscale_literal(chunk=4), weight, grads)
    scaled, _ = run(multiscale_literal(chunk=4), weight, grads / 1000)
    ratio = (scaled - weight).norm() / (plain - weight).norm()
    assert 900 < ratio < 1100


@pytest.mark.parametrize("second", SECONDS)
def test_default_by_hand(second):
    f, rate = 3, 0.1
    weight = torch.randn(4, 6, dtype=torch.float64)
    grads = torch.randn(8, 4, 6, dtype=torch.float64)
    rule = multiscale(
        beta2=0.9, beta3=0.9, chunk=f, slow_weight=0.3, second=second, floor=0.01, rms=0.5
    )
    ours, _ = run(rule, weight, grads, rate)
    fast = slow = v = torch.zeros_like(weight)
    for t in range(1, len(grads) + 1):
        g = grads[t - 1]
        if t > 1 and (t - 1) % f == 0:
            slow = 0.9 * slow + 0.1 * grads[t - 1 - f : t - 1].mean(0)
        fast = 0.95 * fast + 0.05 * g
        out = newton_schulz_naive(0.05 * g + 0.95 * fast) + 0.3 * newton_schulz_naive(slow)
        if second != "none":
            v = 0.9 * v + 0.1 * (g if second == "gradient" else out) ** 2
            out = out / (v.sqrt() / v.sqrt().mean() + 0.01)
        weight = weight - rate * out * 0.5 / out.square().mean().sqrt()
    torch.testing.assert_close(ours, weight)


def test_slow_output_changes_only_when_due_and_the_sum_restarts():
    weight, grads = torch.randn(3, 5), torch.randn(9, 3, 5)
    rule = multiscale(chunk=4)
    state, seen = rule.init(weight), []
    for step, grad in enumerate(grads, 1):
        before = state.slow_out
        weight, state = apply(rule, weight, Write(grad), state, Gates(step=step))
        seen.append(not torch.equal(before, state.slow_out))
    assert [step for step, changed in enumerate(seen, 1) if changed] == [4, 8]
    torch.testing.assert_close(state.total, grads[8])


@pytest.mark.parametrize("rule", [multiscale(chunk=4), multiscale_literal(chunk=4)])
def test_batch_and_resume(rule):
    weights, grads = torch.randn(3, 4, 6), torch.randn(10, 3, 4, 6)
    together, _ = run(rule, weights, grads)
    alone = [run(rule, weights[i], grads[:, i])[0] for i in range(3)]
    torch.testing.assert_close(together, torch.stack(alone))
    half, state = run(rule, weights, grads[:6])
    resumed, _ = run(rule, half, grads[6:], state=state, start=6)
    assert torch.equal(resumed, together)


@pytest.mark.parametrize("second", SECONDS)
def test_zero_gradients_move_nothing(second):
    weight = torch.randn(3, 5)
    new, _ = run(multiscale(second=second, chunk=2), weight, torch.zeros(5, 3, 5))
    assert torch.equal(new, weight)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="chunk"):
        multiscale(chunk=0)
    with pytest.raises(ValueError, match="second must be one of"):
        multiscale(second="adam")
