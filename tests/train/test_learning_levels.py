"""Runs whose levels learn while they read: the log, a stop and a restart, growth, a warm start."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from nestling.models import NestlingForCausalLM
from nestling.train.recipe import changed, get_recipe
from nestling.train.trainer import check, train

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
    run(tmp_path / "cut", "run.steps=3", recipe=recipe)
    again = run(tmp_path / "cut", recipe=recipe)
    assert all(torch.equal(value, again[name]) for name, value in whole.items())
    assert not torch.equal(whole["rates.log_rate"], torch.full((2,), 0.5).log())
    model = NestlingForCausalLM.from_pretrained(tmp_path / "whole" / "model")
    assert model.learns


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
    recipe = changed(get_recipe("hope"), [*SMALL, "data.order=sequential"])
    with pytest.raises(ValueError, match=r"set data\.carry=false"):
        check(recipe)
