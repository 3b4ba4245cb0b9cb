"""Checkpoints come back bit for bit, and broken ones are passed over, never used."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from nestling.train.checkpoint import checkpoints, load_latest, save_checkpoint
from nestling.train.recipe import SHAPES, Schedule
from nestling.tree import pack, unpack


def training_state():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.9, 0.95))
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return {
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "torch": torch.get_rng_state(),
        "python": random.Random(3).getstate(),
        "numpy": np.random.default_rng(0).bit_generator.state,
        "odd": [1e-300, float("inf"), -0.0, None, True, (1, (2, "ü")), {0: "a", "0": "b"}],
    }


def same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        assert a == b


def test_states_come_back_bit_for_bit(tmp_path):
    states = training_state()
    save_checkpoint(tmp_path, 7, states, {"loss": 1.5})
    got = load_latest(tmp_path)
    assert got is not None
    assert (got.step, got.facts) == (7, {"loss": 1.5})
    same(got.states, states)


def test_what_cannot_be_saved_is_named():
    with pytest.raises(TypeError, match="cannot save a function"):
        pack({"a": [lambda: 0]})
    with pytest.raises(ValueError, match="unknown mark"):
        unpack({}, {"code": "x"})


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    for step in range(1, 7):
        save_checkpoint(tmp_path, step, {"w": torch.ones(1) * step}, {}, keep=2, best=2)
    assert [p.name[-1] for p in checkpoints(tmp_path)] == ["2", "5", "6"]
    (checkpoints(tmp_path)[-1] / "part.json").write_text("{}")
    save_checkpoint(tmp_path, 6, {"w": torch.ones(1) * 60}, {}, keep=2, best=2)
    got = load_latest(tmp_path)
    assert got is not None
    assert got.states["w"].item() == 60, "a broken checkpoint of the same step is replaced"


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_schedules_warm_up_and_reach_the_floor(shape):
    schedule = Schedule(steps=100, warmup=10, shape=shape, floor=0.1)
    rates = [schedule(step) for step in range(101)]
    assert 0 < rates[0] < rates[5] < rates[10] == 1.0
    assert rates[100] == pytest.approx(1.0 if shape == "constant" else 0.1)
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(rates[10:]))


def test_bad_schedules_are_named():
    with pytest.raises(ValueError, match="shape must be one of"):
        Schedule(steps=10, shape="cos")
    with pytest.raises(ValueError, match="0 <= warmup <= steps"):
        Schedule(steps=10, warmup=11)
