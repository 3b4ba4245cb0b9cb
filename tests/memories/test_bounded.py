"""Stability by construction (deviations 7-8): row norms stay under `bound()` whatever comes in."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

from nestling.memories import SelfModifying, SelfModifyingConfig, configure
from nestling.scan.self_modifying.naive import learn
from nestling.scan.self_modifying.rule import Inputs, SelfRule

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import bounded

SIZES = {"width": 8, "heads": 2, "chunk": 16, "chunk_others": 16}


@pytest.mark.parametrize("name", bounded.CONFIGURATIONS)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_adversarial_streams_stay_under_the_bound(name, trained, residual):
    """A small retention limit makes the bound small enough to be felt within a short stream."""
    torch.manual_seed(0)
    options = {**SIZES, **bounded.CONFIGURATIONS[name], "residual": residual}
    memory = SelfModifying(configure(SelfModifyingConfig, **options, retain_max=0.99))
    if trained:
        bounded.train(memory, steps=5)
    else:
        with torch.no_grad():
            for parameter in memory.parameters():
                parameter.add_(2 * torch.randn_like(parameter))
    most, finite = bounded.largest_row(memory, 4000, piece=500)
    assert finite
    assert (most <= memory.bound() * (1 + 1e-5)).all()


def test_twenty_thousand_tokens_of_every_stream():
    torch.manual_seed(1)
    memory = SelfModifying(configure(SelfModifyingConfig, width=8, heads=2))
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.add_(torch.randn_like(parameter))
    most, finite = bounded.largest_row(memory, 20_000, piece=1024)
    assert finite
    assert (most <= memory.bound() * (1 + 1e-5)).all()


def greedy(rate_max, steps, retain=0.9, c=1.0):
    """The adversary who picks the input that makes a row longest at every step."""
    rule = SelfRule(rate_max=rate_max, retain_max=retain)
    token = Inputs(torch.zeros(1, 2), torch.zeros(1, 2, 2), torch.zeros(1, 2))
    w = torch.zeros(1, 1, 2, dtype=torch.float64)
    alpha = torch.tensor([retain], dtype=torch.float64)
    angles = torch.linspace(0, math.pi, 181, dtype=torch.float64)
    choices = torch.stack([angles.cos(), angles.sin()], -1)
    for _ in range(steps):
        best = w
        for x in choices:
            for sign in (-c, c):
                u = torch.full((1, 1), sign, dtype=torch.float64)
                after, _ = learn(rule, w, None, (x[None], u), rate_max * alpha, alpha, token)
                best = after if after.norm() > best.norm() else best
        w = best
    return float(w.norm())


@pytest.mark.parametrize("negative", [False, True])
def test_the_bound_is_tight(negative):
    """A greedy adversary stays below it and comes within three percent."""
    options = {"retain_max": 0.9, "negative": negative}
    memory = SelfModifying(configure(SelfModifyingConfig, **SIZES, **options))
    with torch.no_grad():
        memory.first.zero_()
    bound = float(memory.bound().max())
    reached = greedy(2.0 if negative else 1.0, 60)
    assert 0.97 * bound <= reached <= bound


def test_a_write_survives_256_tokens_at_the_start():
    """Retention alone keeps more than half; with the erasing of random keys a third is left."""
    torch.manual_seed(0)
    memory = SelfModifying(configure(SelfModifyingConfig, width=128, heads=2))
    x = torch.randn(1, 257, 128)
    changed = x.clone()
    changed[:, 0] = torch.randn(128)
    with torch.no_grad():
        first = [memory(x[:, :1])[1].weights.first for x in (x, changed)]
        last = [memory(x)[1].weights.first for x in (x, changed)]
    left = (last[0] - last[1]).norm() / (first[0] - first[1]).norm()
    assert left > 1 / 3


@pytest.mark.parametrize("residual", [False, True])
def test_zero_inputs_write_nothing(residual):
    """As printed the weights shrink evenly; differences stay at zero."""
    memory = SelfModifying(configure(SelfModifyingConfig, **SIZES, residual=residual)).double()
    _, state = memory(torch.zeros(2, 40, 8, dtype=torch.float64))
    if residual:
        assert not state.weights.first.any()
        return
    shrunk = state.weights.first / memory.init(2).weights.first
    torch.testing.assert_close(shrunk, shrunk[:, :, :1, :1, :1].expand_as(shrunk))
    assert (shrunk < 0.99).all()


def effective_rank(weights):
    values = torch.linalg.svdvals(weights)
    return float((values.sum(-1).square() / values.square().sum(-1)).mean())


@torch.no_grad()
def test_only_residual_memories_outlive_a_long_stream():
    """Values a memory makes itself lie in its own range (deviation 22): its rank can only fall."""
    ranks = {}
    for residual in (False, True):
        torch.manual_seed(0)
        memory = SelfModifying(configure(SelfModifyingConfig, width=16, heads=1, residual=residual))
        words, state = torch.randn(40, 16), None
        for _ in range(8):
            _, state = memory(words[torch.randint(40, (1, 512))], state)
        memories = state.weights.first + (memory.first if residual else 0)
        ranks[residual] = effective_rank(memories) / effective_rank(memory.first)
    assert ranks[False] < 0.25
    assert ranks[True] > 0.6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, "heads must divide width"),
        ({"chunk": 0}, "chunk must be a whole number of at least 1"),
        ({"chunk": 64, "chunk_others": 48}, "one a multiple of the other"),
        ({"objective": "l1"}, "objective must be one of dot, l2; got 'l1'"),
        ({"adaptive": ("k", "w")}, "adaptive must be some of"),
        ({"retain_max": 1.0}, "retain_max must be in"),
        ({"clip": 0.0}, "clip must be positive"),
        ({"retain": 1.0}, "retain must be between 0.0001 and 1"),
        ({"adding": 3}, "adding counts heads that do not erase, of 2"),
        ({"adding": 1, "erase": False}, "adding=1 with erase=False"),
        ({"expansion": -1}, "expansion must be a whole number of at least 0"),
        ({"steering": 4}, "a memory that a small one steers is the mixer 'steered'"),
        ({"projections": {"steering": 4}}, r"steering \(got 4\)"),
    ],
)
def test_bad_configurations_fail_before_any_work(options, message):
    with pytest.raises(ValueError, match=message):
        configure(SelfModifyingConfig, **{**SIZES, **options})
