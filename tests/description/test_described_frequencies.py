"""Frequencies that `describe` reports equal those counted while running."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from described import hope

from nestling.description import describe
from nestling.levels import Level
from nestling.optim import (
    M3,
    NestedOptimizer,
)
from nestling.tree import tree_leaves


def nested_hope(chunks):
    model = hope(levels=[{"name": f"l{i}", "chunk": 8 * c} for i, c in enumerate(chunks)])
    groups: dict[str, list] = {f"l{i}": [] for i in range(len(chunks))} | {"rest": []}
    for name, parameter in model.named_parameters():
        path = name.split(".")
        groups[f"l{path[5]}" if "mlps" in path else "rest"].append(parameter)
    parts = [
        (
            Level(name="rest", chunk=1),
            groups["rest"],
            lambda p: M3(p, lr=1e-2, chunk=2, orthogonal=True),
        )
    ]
    parts += [
        (
            Level(name=f"l{i}", chunk=c),
            groups[f"l{i}"],
            lambda p: M3(p, lr=1e-2, chunk=2, orthogonal=True),
        )
        for i, c in enumerate(chunks)
    ]
    return model, NestedOptimizer(parts)


def test_frequencies_across_steps_equal_those_counted():
    chunks = (1, 3, math.inf)
    model, optimizer = nested_hope(chunks)
    description = describe(model, optimizer)
    steps = 12
    ids = torch.randint(0, 32, (1, 9))
    seen = {n: p.detach().clone() for n, p in model.named_parameters()}
    changed = dict.fromkeys(seen, 0)
    slow: dict[str, list] = {}
    for _ in range(steps):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        for name, parameter in model.named_parameters():
            changed[name] += not torch.equal(parameter, seen[name])
            seen[name] = parameter.detach().clone()
            held = optimizer.state.get(parameter, {}).get("slow")
            if held is not None:
                slow.setdefault(name, []).append(held.clone())
    for level, chunk in enumerate(chunks):
        component = description[f"model.layers.0-1.channel level l{level}"]
        assert component.frequency == (0 if chunk == math.inf else 1 / chunk)
        count = changed[f"model.layers.1.channel.mlps.{level}.up.weight"]
        assert component.frequency * steps == count
        if chunk != math.inf:
            memory = description[f"l{level}: M3.slow"]
            series = slow[f"model.layers.1.channel.mlps.{level}.up.weight"]
            start = torch.zeros_like(series[0])
            moves = sum(not torch.equal(a, b) for a, b in itertools.pairwise([start, *series]))
            assert memory.frequency * steps == pytest.approx(moves)
    assert description["model.layers.0-1.mixer"].frequency * steps == pytest.approx(
        changed["model.layers.0.mixer.gates.weight"]
    )
    frozen = description.levels[0]
    assert frozen.every == "never"
    assert "model.layers.0-1.channel level l2" in [c.name for c in frozen.components]


@pytest.mark.parametrize(
    ("name", "field", "component"),
    [
        ("hope", "weight", "model.layers.0-1.mixer (memory)"),
        ("hope", "small", "model.layers.0-1.mixer (steering)"),
        ("hope_printed", "weights", "model.layers.0-1.mixer (memory)"),
        ("hope_printed", "start", "model.layers.0-1.mixer (k, v, eta, alpha)"),
        ("deltanet", "weight", "model.layers.0-1.mixer (memory)"),
        ("ada_transformer", "weight", "model.layers.0-1.channel.memory (memory)"),
        ("ada_transformer", "keys", "model.layers.0-1.mixer (cache)"),
    ],
)
def test_frequencies_in_context_equal_those_counted(name, field, component):
    model, tokens = hope(name), 32
    described = describe(model)[component]
    block = model.model.layers[0]
    state, x, changes = block.init(1), torch.randn(1, tokens, 16), 0

    def numbers(state):
        part = state.channel if "channel" in component else state.mixer
        leaves = [v for n, v in tree_leaves(part) if n.split(".")[0] == field]
        first = leaves[0].detach()
        return first[:, :, 1:].clone() if field == "start" else first.clone()

    before = numbers(state)
    for t in range(tokens):
        with torch.no_grad():
            _, state = block(x[:, t : t + 1], state)
        after = numbers(state)
        changes += before.shape != after.shape or not torch.equal(before, after)
        before = after
    assert described.frequency * tokens == changes


def test_attention_is_faster_than_the_memory_written_from_it():
    description = describe(hope("ada_transformer"))
    memory = description["model.layers.0-1.channel.memory (memory)"]
    assert memory.needs == ("model.layers.0-1.mixer (cache)",)
    assert description.level_of(memory.name) < description.level_of(memory.needs[0])


def test_titans_momentum_is_a_level_of_its_own():
    description = describe(hope("titans"))
    momentum = description.level_of("model.layers.0-1.mixer (momentum)")
    assert momentum == description.level_of("model.layers.0-1.mixer (memory)") + 1
