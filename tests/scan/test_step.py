"""One token in few operations is one token of the loop: outputs, memory, gradients."""

from __future__ import annotations

import pytest
import torch

from nestling.memories import DeltaNetConfig, LinearMemory, Steered, SteeredConfig
from nestling.scan import scan, scan_naive
from nestling.scan.delta.step import takes
from nestling.scan.self_modifying.rule import SelfRule
from nestling.tree import tree_leaves


def one_token(dtype=torch.float64):
    torch.manual_seed(0)
    state, x, u, q = (
        torch.randn(2, 3, *size, dtype=dtype, requires_grad=True)
        for size in ((5, 4), (1, 4), (1, 5), (1, 4))
    )
    rate, retain = (torch.rand(2, 3, 1, dtype=dtype, requires_grad=True) for _ in range(2))
    return state, x, u, rate, retain, q


@pytest.mark.parametrize("read", ["before", "after"])
@pytest.mark.parametrize("erase", [True, False])
def test_a_step_is_one_token_of_the_loop(erase, read):
    given = one_token()
    assert takes(*given)
    found, wanted = ([*way(*given, erase=erase, read=read)] for way in (scan, scan_naive))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    flow = [torch.randn_like(part) for part in wanted]
    fast, slow = (torch.autograd.grad(way, given, flow) for way in (found, wanted))
    for one, other in zip(fast, slow, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_what_is_no_step_goes_the_longer_way():
    state, x, u, rate, retain, q = one_token(torch.float32)
    for given in ((state, x.bfloat16(), u, rate, retain, q), (state, x, u, rate, retain, None)):
        assert not takes(*given)
        found, wanted = scan(*given, erase=True), scan_naive(*given, erase=True)
        for one, other in zip(found, wanted, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other)
    assert not takes(state.bfloat16(), x.bfloat16())


RULES = {
    "plain": {},
    "tied": {"tied": True},
    "shut": {"shut": 0.3},
    "all": {"tied": True, "shut": 0.3, "rate_max": 2.0, "retain_max": 0.99},
}


@pytest.mark.parametrize("options", RULES.values(), ids=list(RULES))
def test_rate_and_retain_are_those_of_the_gates(options):
    torch.manual_seed(0)
    rule = SelfRule(**options)
    raw = (3 * torch.randn(2, 3, 50, 2, dtype=torch.float64)).requires_grad_()
    valid = torch.rand(2, 1, 50) > 0.3
    gates = rule.gates(raw, valid)
    wanted = (gates.rate, gates.log_retain.exp())
    found = rule.rate_and_retain(raw, valid)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
    flow = [torch.randn_like(part) for part in wanted]
    fast, slow = (torch.autograd.grad(way, raw, flow)[0] for way in (found, wanted))
    torch.testing.assert_close(fast, slow, rtol=1e-11, atol=1e-12)


MEMORIES = {
    "steered": lambda: Steered(SteeredConfig(width=12, heads=2, steering=3)),
    "steered, scanned": lambda: Steered(
        SteeredConfig(width=12, heads=2, steering=3, backend="naive")
    ),
    "delta": lambda: LinearMemory(DeltaNetConfig(width=12, heads=2)),
}


def token_by_token(memory, x, mask):
    state, parts = memory.init(2), []
    for t in range(x.shape[1]):
        y, state = memory(x[:, t : t + 1], state, mask[:, t : t + 1])
        parts.append(y)
    return torch.cat(parts, 1), state


@pytest.mark.parametrize("make", MEMORIES.values(), ids=list(MEMORIES))
@pytest.mark.parametrize("padded", [False, True])
def test_token_by_token_is_the_whole_with_its_gradients(make, padded):
    torch.manual_seed(0)
    memory = make().double()
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    x = torch.randn(2, 9, 12, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2, 9, dtype=torch.bool)
    if padded:
        mask[0, 2] = mask[0, 7] = mask[1, 5] = False
    wanted, end = memory(x, None, mask)
    found, state = token_by_token(memory, x, mask)
    with torch.no_grad():
        decoded, _ = token_by_token(memory, x, mask)
    for y in (found, decoded):
        torch.testing.assert_close(y, wanted, rtol=1e-9, atol=1e-10)
    for (_, one), (_, other) in zip(tree_leaves(state), tree_leaves(end), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
    taught = [x, *memory.parameters()]
    fast, slow = (
        torch.autograd.grad(way.square().sum(), taught, allow_unused=True)
        for way in (found, wanted)
    )
    for one, other in zip(fast, slow, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)
