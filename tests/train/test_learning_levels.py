"""Runs whose levels learn while they read: the log, a stop and a restart, growth, a warm start."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from nestling.models import NestlingForCausalLM, presets
from nestling.train.batches import Batch
from nestling.train.parts import check
from nestling.train.recipe import changed, get_recipe
from nestling.train.step import loss_sum
from nestling.train.trainer import train

LEVELS = [{"name": n, "chunk": c, "rate": 0.5} for n, c in (("fast", 8), ("slow", 16))]
SMALL = [
    "model.fields.hidden_size=16",
    "model.fields.num_hidden_layers=1",
    "model.fields.num_attention_heads=2",
    "model.fields.intermediate_size=16",
    f"model.fields.levels={json.dumps(LEVELS)}",
    "model.fields.learn_rates=true",
    "data.train=builtin:6",
    "data.valid=builtin:6-7",
    "data.length=48",
    "run.rows=4",
    "run.micro=2",
    "run.steps=6",
    "run.eval_every=3",
    "run.eval_windows=4",
    "run.save_every=3",
    "optim.shape=constant",
    "optim.warmup=0",
]


def run(folder, *changes, recipe="hope"):
    cache = f"data.cache={folder.parent / 'cache'}"
    train(changed(get_recipe(recipe), [*SMALL, cache, *changes]), folder)
    return load_file(folder / "model" / "model.safetensors")


def logged(folder):
    facts = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        facts |= json.loads(line)
    return facts


@pytest.mark.parametrize("recipe", ["hope", "hope_attention"])
def test_a_run_with_learning_levels_tells_what_each_is_worth_and_resumes(tmp_path, recipe):
    whole = run(tmp_path / "whole", recipe=recipe)
    facts = logged(tmp_path / "whole")
    for name in ("fast", "slow"):
        assert math.isfinite(facts[f"effect/{name}"])
        assert facts[f"effect/{name}"] != 0.0
        assert facts[f"distance/{name}"] > 0.0
        assert facts[f"inner_gradient_norm/{name}"] > 0.0
        assert facts[f"rate/{name}"] != 0.5, "rates are trained"
    run(tmp_path / "cut", "run.steps=3", recipe=recipe)
    again = run(tmp_path / "cut", recipe=recipe)
    assert all(torch.equal(value, again[name]) for name, value in whole.items())
    assert not torch.equal(whole["rates.log_rate"], torch.full((2,), 0.5).log())
    model = NestlingForCausalLM.from_pretrained(tmp_path / "whole" / "model")
    assert model.learns


@pytest.mark.parametrize(("length", "told"), [(16, {"effect/fast"}), (8, set())])
def test_levels_that_never_step_in_a_window_are_not_judged(tmp_path, length, told):
    run(tmp_path / "short", f"data.length={length}", "run.steps=3")
    assert {fact for fact in logged(tmp_path / "short") if fact.startswith("effect/")} == told


def test_levels_grow_and_start_warm_from_a_plain_model(tmp_path):
    still = [{"name": level["name"], "chunk": level["chunk"]} for level in LEVELS]
    frozen = [f"model.fields.levels={json.dumps(still)}", "model.fields.learn_rates=false"]
    plain = run(tmp_path / "plain", *frozen)
    assert "rates.log_rate" not in plain
    grown = run(tmp_path / "grown", "model.grow=100,100", "model.fields.learn_rates=false")
    for name, value in plain.items():  # until they grow, levels are those of a plain run
        torch.testing.assert_close(grown[name], value)
    late = run(tmp_path / "late", "model.grow=0,4", "model.fields.learn_rates=false")
    assert {"effect/fast", "effect/slow"} <= set(logged(tmp_path / "late"))
    assert not any(torch.equal(late[n], v) for n, v in plain.items() if "mlps" in n)
    start = f"model.start={tmp_path / 'plain' / 'model'}"
    warm = run(tmp_path / "warm", start, "run.steps=1", "optim.lr=1e-9")
    for name, value in plain.items():
        torch.testing.assert_close(warm[name], value, atol=1e-6, rtol=1e-4)


def test_recipes_that_cannot_learn_say_so():
    recipe = changed(get_recipe("hope"), [*SMALL, "model.grow=1"])
    with pytest.raises(ValueError, match=r"model.grow must give the first step of each of the 2"):
        check(recipe)


def test_levels_carry_what_they_learned_from_window_to_window_and_resume(tmp_path):
    carry = ["data.order=sequential", "model.fields.learn_rates=false"]
    whole = run(tmp_path / "whole", *carry)
    run(tmp_path / "cut", *carry, "run.steps=3")
    again = run(tmp_path / "cut", *carry)
    assert all(torch.equal(value, again[name]) for name, value in whole.items())
    anew = run(tmp_path / "anew", *carry, "data.carry=false")
    assert not all(torch.equal(value, anew[name]) for name, value in whole.items())


def test_windows_of_a_stream_have_the_gradients_of_the_whole():
    torch.manual_seed(0)
    config = presets.tiny(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        levels=LEVELS,
        learning="first_order",
    )
    model = NestlingForCausalLM(config).double().train()
    ids = torch.randint(0, 250, (3, 97))
    old, new, alone = ids[:, :49], ids[:, 48:], torch.tensor([True, False, True])

    def batch(part, fresh):
        there = torch.ones_like(part[:, 1:], dtype=torch.bool)
        return Batch(part[:, :-1], part[:, 1:], there, fresh)

    def slopes(*losses):
        model.zero_grad()
        for loss in losses:
            loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    every = torch.ones(3, dtype=torch.bool)
    cpu = torch.device("cpu")
    first, state = loss_sum(model, batch(old, every), cpu, keep=True)
    second, _ = loss_sum(model, batch(new, ~every), cpu, state, keep=True)
    whole, _ = loss_sum(model, batch(ids, every), cpu)
    torch.testing.assert_close(first + second, whole)
    torch.testing.assert_close(slopes(first, second), slopes(whole))
    # Rows that start a document begin anew; the others go on.
    renewed, _ = loss_sum(model, batch(new, alone), cpu, state, keep=True)
    apart = [
        loss_sum(model, batch(ids[1:2], every[:1]), cpu)[0]
        - loss_sum(model, batch(old[1:2], every[:1]), cpu)[0],
        loss_sum(model, batch(new[[0, 2]], every[:2]), cpu)[0],
    ]
    torch.testing.assert_close(renewed, sum(apart))
