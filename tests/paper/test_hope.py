"""A Hope block, run as a nested system, equals the block trained in the ordinary way."""

from __future__ import annotations

import pytest
import torch

from nestling.continuum.layers import Block, Chain
from nestling.description import describe
from nestling.levels import Level
from nestling.memories import SelfModifying, SelfModifyingConfig, configure
from nestling.optim import NestedOptimizer
from nestling.paper.nested import NestedSystem
from nestling.paper.nested.hope import hope_block
from nestling.paper.nested.sequences import Token

B, T, D = 2, 4, 6


def make_block(**options):
    config = {"width": D, "heads": 2, "chunk": 1, "chunk_others": 1, "residual": False}
    mixer = SelfModifying(configure(SelfModifyingConfig, **config | options))
    levels = [Level(name="fast", chunk=1), Level(name="slow", chunk=2)]
    return Block(mixer, Chain(D, 5, levels)).double()


def squares(y, target):
    return (y - target).square().sum()


def ordinarily(block, data, rate):
    groups = {"block": [], "0": [], "1": []}
    for name, parameter in block.named_parameters():
        path = name.split(".")
        groups[path[2] if path[0] == "channel" else "block"].append(parameter)
    optimizer = NestedOptimizer(
        [
            (Level(name=name, chunk=chunk), groups[name], lambda p: torch.optim.SGD(p, lr=rate))
            for name, chunk in (("block", 1), ("0", 1), ("1", 2))
        ],
        reduce="sum",
    )
    for x, target in data:
        optimizer.zero_grad()
        squares(block(x)[0], target).backward()
        optimizer.step()
    return dict(block.named_parameters())


@pytest.mark.parametrize("options", [{}, {"conv": 1, "own_values": False}], ids=["hope", "stage 2"])
def test_a_hope_block(options):
    block = make_block(**options)
    data = [torch.randn(2, B, T, D, dtype=torch.float64) for _ in range(4)]
    problems = hope_block(block, squares, batch=B, length=T, rate=0.02, chunks=(1, 2))
    system = NestedSystem(problems)
    assert [sorted(p.name for p in level) for level in system.levels] == [
        ["continuum.1"],
        ["block", "continuum.0"],
        ["alpha", "convolution", "eta", "k", "mem", "v"],
    ]
    tokens = [Token(x[:, t], y[:, t]) for x, y in data for t in range(T)]
    state, ticks = system.run(tokens)
    expected = ordinarily(block, data, 0.02)
    found = {n: v for name in system.problems for n, v in state.parameters[name].items()}
    for name, value in expected.items():
        torch.testing.assert_close(found[name].detach(), value.detach(), rtol=0, atol=1e-10)
    counted = dict.fromkeys(system.problems, 0)
    for tick in ticks:
        for update in tick.updates:
            counted[update.level] += 1
    for component in describe(system).components:
        assert component.frequency * len(tokens) == counted[component.name]


def test_other_blocks_are_refused():
    with pytest.raises(ValueError, match="chunk=1"):
        hope_block(make_block(chunk=4), squares, batch=B, length=T, rate=0.1, chunks=(1, 2))
    with pytest.raises(ValueError, match="must name 2 levels"):
        hope_block(make_block(), squares, batch=B, length=T, rate=0.1, chunks=(1,))
