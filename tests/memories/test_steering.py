"""Steering: one small memory beside the main one moves all of its projections."""

from __future__ import annotations

import pytest
import torch

from nestling.memories import SelfModifying, SelfModifyingConfig, configure
from nestling.norm import unit
from nestling.scan.self_modifying.naive import scan_naive
from nestling.tree import tree_leaves, tree_map

WIDTH, HEADS, SMALL = 12, 2, 3


def build(**options):
    torch.manual_seed(0)
    config = {"width": WIDTH, "heads": HEADS, "steering": SMALL, "chunk": 4, "chunk_others": 4}
    memory = SelfModifying(configure(SelfModifyingConfig, **{**config, **options})).double()
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return memory


def by_the_equation(memory, x):
    """Token by token: a small memory's read moves k, v and gates, then the main memory (Eq. 88)."""
    batch, steering = x.shape[0], memory.steering
    small = steering.memory
    state = memory.init(batch, dtype=x.dtype)

    def scan(one, inputs, state):
        weights = tree_map(lambda w: w.flatten(0, 1), state.weights)
        begin = torch.zeros(weights.first.shape[0], dtype=torch.int64)
        y, _, _ = scan_naive(one.rule, inputs, weights, weights, begin)
        return y.unflatten(0, (batch, -1))

    opened = memory.shell.open(x, state.tail, None)
    seen = small.shell.ask(steering.inward(opened.x), state.steering.tail)
    y = scan(small, small._inputs(seen, None), state.steering)
    moved = steering.outward(small.shell.close(y, seen.gate))  # [B, T, H (2 d + 2)]
    moved = moved.unflatten(-1, (HEADS, -1)).transpose(1, 2).flatten(0, 1)
    d = WIDTH // HEADS
    k, v, gates = moved.split([d, d, 2], -1)
    inputs = memory._inputs(opened, None)
    parts = dict(zip(memory.static, opened.parts[1:], strict=True))
    inputs = inputs._replace(
        k=unit(parts["k"].flatten(0, 1) + k),
        v=unit(parts["v"].flatten(0, 1) + v),
        gates=inputs.gates + gates,
    )
    return memory.shell.close(scan(memory, inputs, state), opened.gate)


@pytest.mark.parametrize("chunk", [1, 4])
def test_a_steered_memory_is_the_equation_with_moved_projections(chunk):
    memory = build(chunk=chunk, chunk_others=chunk)
    x = torch.randn(2, 11, WIDTH, dtype=torch.float64)
    fast, naive = memory(x)[0], by_the_equation(memory, x)
    torch.testing.assert_close(fast, naive, rtol=1e-9, atol=1e-10)
    parameters = dict(memory.named_parameters())
    found = torch.autograd.grad((fast * x).sum(), list(parameters.values()))
    wanted = torch.autograd.grad((naive * x).sum(), list(parameters.values()))
    for name, a, b in zip(parameters, found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9, msg=lambda t, n=name: f"{n}: {t}")


def test_what_steers_is_small():
    """Main memory d x d, the other g x g; without it every adaptive projection costs d x d."""

    def numbers(memory):
        return sum(leaf.numel() for _, leaf in tree_leaves(memory.init(1).weights))

    d = WIDTH // HEADS
    assert numbers(build()) == HEADS * d * d
    assert numbers(build().steering.memory) == SMALL * SMALL
    assert numbers(build(steering=0)) == 5 * HEADS * d * d


def test_untrained_steering_can_tell_the_beginning_from_the_end():
    """The same token, again and again: a gate that sees only tokens could not change."""
    memory = build(adaptive=("eta",), conv=1)
    x = torch.randn(1, 1, WIDTH, dtype=torch.float64).expand(1, 200, WIDTH)
    steering, state = memory.steering, memory.init(1, dtype=x.dtype).steering
    added = steering.additions(steering.memory.run(steering.inward(x), state, None, 0)[0])
    rate = added["eta"][0, :, 0]
    assert abs(rate[150] - rate[0]) > 10 * abs(rate[199] - rate[150])
