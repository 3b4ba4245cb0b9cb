"""Looking whether training can go on, before a checkpoint is written, changes nothing."""

from __future__ import annotations

import json

import pytest
import torch

from nestling.train.recipe import changed, get_recipe
from nestling.train.trainer import train

SMALL = (
    "data.train=builtin:4",
    "data.valid=builtin:300-301",
    "data.length=64",
    "model.fields.num_hidden_layers=1",
    "model.fields.intermediate_size=8",
    "model.fields.hidden_size=16",
    "run.rows=2",
    "run.steps=5",
    "run.eval_every=100",
)
LEVELS = json.dumps([{"name": n, "chunk": c, "rate": 0.1} for n, c in (("fast", 16), ("slow", 32))])
RUNS = {
    "plain": ("tiny",),
    "levels across steps": ("tiny", "optim.name=m3", "optim.chunks=1,2,3"),
    "carried memories": ("stream",),
    "natural steps": ("hope", f"model.fields.levels={LEVELS}", "model.fields.natural=true"),
}


@pytest.mark.parametrize("name", RUNS)
def test_how_often_a_run_saves_changes_nothing(name, tmp_path):
    recipe, *changes = RUNS[name]
    often, once = (
        train(
            changed(get_recipe(recipe), [*SMALL, *changes, f"run.save_every={every}"]),
            tmp_path / str(every),
        ).model.state_dict()
        for every in (1, 100)
    )
    for key in often:
        assert torch.equal(often[key], once[key]), key
