"""Rules compose, and `apply` takes the step."""

from __future__ import annotations

import torch

from nestling.rules import Gates, Write, apply, chain, identity, stateless


def test_apply_retains_and_descends():
    weight, grad = torch.randn(3, 2), torch.randn(3, 2)
    out, state = apply(identity, weight, Write(grad), (), Gates(rate=0.1, retain=0.9))
    torch.testing.assert_close(out, 0.9 * weight - 0.1 * grad)
    assert state == ()


def test_chain_runs_left_to_right_and_keeps_states_apart():
    rule = chain(stateless(lambda g: g + 1), stateless(lambda g: 2 * g))
    weight = torch.zeros(2, 2)
    write, state = rule.step(Write(torch.ones(2, 2)), rule.init(weight), weight, Gates())
    torch.testing.assert_close(write.grad, torch.full((2, 2), 4.0))
    assert state == ((), ())
