"""Levels across steps: each level steps exactly when due, on what it has collected (Eq. 71)."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from nestling.levels import Level
from nestling.optim import DGD, M3, NestedOptimizer, capture

CHUNKS = (1, 2, 4, math.inf)


def levels(params: list[nn.Parameter], reduce: str = "mean", lr: float = 0.1) -> NestedOptimizer:
    return NestedOptimizer(
        [
            (Level(name=f"every {c}", chunk=c), [p], lambda q: torch.optim.SGD(q, lr=lr))
            for c, p in zip(CHUNKS, params, strict=True)
        ],
        reduce=reduce,
    )


@pytest.mark.equation(71)
@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_steps_exactly_when_due(reduce: str) -> None:
    params = [nn.Parameter(torch.zeros(2)) for _ in CHUNKS]
    optimizer = levels(params, reduce)
    grads = torch.randn(8, 2)
    for step in range(1, 9):
        for p in params:
            p.grad = grads[step - 1].clone()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for chunk, p in zip(CHUNKS, params, strict=True):
            done = 0 if chunk == math.inf else step // chunk * chunk
            factor = 1.0 if reduce == "sum" or chunk == math.inf else 1.0 / chunk
            torch.testing.assert_close(p.detach(), -0.1 * factor * grads[:done].sum(0))
    assert optimizer.position == 8


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=generator)).square().mean().backward()
        optimizer.step()


def two_levels(model: nn.Sequential, lr: float = 0.01) -> NestedOptimizer:
    return NestedOptimizer(
        [
            (Level(name="fast", chunk=1), model[0].parameters(), lambda p: M3(p, lr=lr, chunk=2)),
            (Level(name="slow", chunk=4), model[2].parameters(), lambda p: torch.optim.Adam(p, lr)),
        ]
    )


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


@pytest.mark.parametrize("stop", [3, 4, 6])
def test_resumes_in_mid_chunk(stop: int) -> None:
    straight, cut = net(), net()
    train(straight, two_levels(straight), 0, 9)
    first = two_levels(cut)
    train(cut, first, 0, stop)
    state = copy.deepcopy(first.state_dict())
    resumed = two_levels(cut, lr=5.0)
    resumed.load_state_dict(state)
    train(cut, resumed, stop, 9 - stop)
    for a, b in zip(straight.parameters(), cut.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_level_without_gradients_is_left_alone() -> None:
    model = net()
    optimizer = two_levels(model)
    before = model[2].weight.detach().clone()
    for _ in range(4):
        model[0](torch.randn(2, 6)).sum().backward()
        optimizer.step()
    assert torch.equal(model[2].weight, before)
    assert not optimizer.state[model[2].weight]


def test_schedulers_see_all_levels() -> None:
    optimizer = two_levels(net())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step()
    schedule.step()
    assert {g["level"] for g in optimizer.param_groups} == {"fast", "slow"}
    assert all(g["lr"] == 0.005 for o in optimizer.optimizers for g in o.param_groups)


def test_a_parameter_listed_twice_is_warned_of_as_in_torch_and_collected_once() -> None:
    listed, once = (nn.Parameter(torch.ones(3)) for _ in range(2))
    level = Level(name="slow", chunk=2)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        twice = NestedOptimizer([(level, [listed, listed], lambda p: torch.optim.SGD(p, lr=0.1))])
    single = NestedOptimizer([(level, [once], lambda p: torch.optim.SGD(p, lr=0.2))])  # twice 0.1
    for grad in (1.0, 5.0):
        for parameter, optimizer in ((listed, twice), (once, single)):
            parameter.grad = torch.full((3,), grad)
            optimizer.step()
    torch.testing.assert_close(listed, once)
    assert once[0].item() == pytest.approx(1 - 0.2 * 3)


def test_refusals() -> None:
    model = net()
    part = (Level(name="a", chunk=1), list(model.parameters()), lambda p: M3(p))
    with pytest.raises(ValueError, match="name of its own"):
        NestedOptimizer([part, part])
    with pytest.raises(TypeError, match="iterable of Tensors or dicts; level 'a' got"):
        NestedOptimizer([(part[0], part[1][0], part[2])])
    with pytest.raises(ValueError, match="one level only"):
        NestedOptimizer([part, (Level(name="b", chunk=2), *part[1:])])
    with pytest.raises(ValueError, match="reduce"):
        NestedOptimizer([part], reduce="max")
    inputs = capture(model)
    waits = (Level(name="a", chunk=2), model.parameters(), lambda p: DGD(p, inputs=inputs))
    with pytest.raises(ValueError, match="chunk=1"):
        NestedOptimizer([waits])
    optimizer = NestedOptimizer([part])
    with pytest.raises(NotImplementedError, match="level"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ValueError, match="groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
