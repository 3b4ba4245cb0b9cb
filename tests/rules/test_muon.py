"""Muon against torch.optim.Muon (bfloat16) and against the formula in float64; AdaMuon by hand."""

from __future__ import annotations

import math

import pytest
import torch

from nestling.rules import Gates, Write, apply
from nestling.rules.muon import adamuon, muon, rms_scale, shape_scale
from nestling.rules.newton_schulz import newton_schulz_naive


def run(rule, weight, grads, rate, retain=1.0):
    state = rule.init(weight)
    for step, grad in enumerate(grads, 1):
        gates = Gates(rate=rate, retain=retain, step=step)
        weight, state = apply(rule, weight, Write(grad), state, gates)
    return weight


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(6, 24), (24, 6)])
def test_like_torch(scale, nesterov, shape):
    start = torch.randn(shape, dtype=torch.float64)
    grads = torch.randn(4, *shape, dtype=torch.float64)
    rate, weight_decay = 0.02, 0.5
    ours = run(
        muon(nesterov=nesterov, scale=scale), start, grads, rate, retain=1 - rate * weight_decay
    )

    theirs = torch.nn.Parameter(start.float())
    optimizer = torch.optim.Muon(
        [theirs], lr=rate, weight_decay=weight_decay, nesterov=nesterov, adjust_lr_fn=scale
    )
    for grad in grads:
        theirs.grad = grad.float()
        optimizer.step()
    moved = (ours - start).norm()
    assert (ours - theirs.double()).norm() < 0.03 * moved  # torch runs Newton-Schulz in bfloat16

    exact, buffer = start.clone(), torch.zeros_like(start)
    rows, columns = shape
    factor = math.sqrt(max(1, rows / columns))
    factor = factor if scale == "original" else 0.2 * math.sqrt(max(shape))
    for grad in grads:
        buffer = buffer.lerp(grad, 0.05)
        update = grad.lerp(buffer, 0.95) if nesterov else buffer
        exact = (1 - rate * weight_decay) * exact - rate * factor * newton_schulz_naive(update)
    torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("sign", [True, False])
def test_adamuon_by_hand(sign):
    start = torch.randn(4, 7, dtype=torch.float64)
    grads = torch.randn(3, 4, 7, dtype=torch.float64)
    buffer = second = torch.zeros_like(start)
    weight = start
    for step, grad in enumerate(grads, 1):
        buffer = 0.95 * buffer + grad
        update = grad + 0.95 * buffer
        update = newton_schulz_naive(update.sign() if sign else update)
        second = 0.9 * second + 0.1 * update**2
        update = update / ((second / (1 - 0.9**step)).sqrt() + 1e-8)
        weight = weight - 0.01 * 0.2 * update * math.sqrt(28) / update.norm()
    ours = run(adamuon(second_decay=0.9, sign=sign), start, grads, 0.01)
    torch.testing.assert_close(ours, weight)


def test_leading_dimensions_are_batch():
    weights, grads = torch.randn(3, 4, 6), torch.randn(2, 3, 4, 6)
    for rule in (muon(), adamuon()):
        together = run(rule, weights, grads, 0.1)
        alone = [run(rule, weights[i], grads[:, i], 0.1) for i in range(3)]
        torch.testing.assert_close(together, torch.stack(alone))


def test_scales():
    grad = torch.randn(2, 8, 2)
    gates = Gates()
    out, _ = shape_scale("original").step(Write(grad), (), grad, gates)
    torch.testing.assert_close(out.grad, 2 * grad)
    out, _ = rms_scale(0.2).step(Write(grad), (), grad, gates)
    torch.testing.assert_close(out.grad.square().mean((-2, -1)).sqrt(), torch.full((2,), 0.2))
    out, _ = rms_scale().step(Write(0 * grad), (), grad, gates)
    assert torch.equal(out.grad, 0 * grad)
    with pytest.raises(ValueError, match="match_rms_adamw"):
        shape_scale("adam")
