"""Any model and optimizer as levels: true counts, true frequencies, nothing guessed."""

from __future__ import annotations

import copy
import io
import json

import pytest
import torch
from described import hope, llama, names, weights
from torch import nn
from transformers import CONFIG_MAPPING, AutoModel

import nestling
from nestling.description import Component, Description, describe
from nestling.memories import SelfModifying, SelfModifyingConfig, configure
from nestling.optim import (
    Muon,
)


def test_a_llama_with_adamw():
    model = llama()
    description = describe(model, torch.optim.AdamW(model.parameters()))
    outer, moments, inner = names(description)
    assert inner == ["model.layers.0-2.self_attn (cache)"]
    assert moments == ["AdamW.exp_avg", "AdamW.exp_avg_sq"]
    assert "model.layers.0-2.mlp" in outer
    assert "lm_head" in outer
    total = sum(p.numel() for p in model.parameters())
    assert weights(description) == total
    assert description["AdamW.exp_avg"].state == total
    assert description["model.layers.0-2.mlp"].copies == 3
    assert description["model.layers.0-2.mlp"].needs == tuple(moments)
    assert description.level_of("lm_head") == 1


def test_heads_that_add_are_told_from_those_that_erase():
    memory = SelfModifying(configure(SelfModifyingConfig, width=8, heads=2, adding=1))
    assert describe(memory)["SelfModifying (memory)"].objective.endswith(
        "without erasing in 1 of 2 heads"
    )


def test_experts_of_all_layers_are_one_component_until_their_paces_differ():
    layer = {"experts": nn.ModuleList(nn.Linear(2, 2) for _ in range(4)), "gate": nn.Linear(2, 4)}
    model = nn.ModuleDict(
        {"layers": nn.ModuleList(copy.deepcopy(nn.ModuleDict(layer)) for _ in range(3))}
    )
    description = describe(model, torch.optim.SGD(model.parameters(), lr=0.1))
    (level,) = description.levels
    assert {c.name: c.copies for c in level.components} == {
        "layers.0-2.experts.0-3": 12,
        "layers.0-2.gate": 3,
    }
    for block in model["layers"]:
        block["experts"][1].requires_grad_(False)
    frozen, trained = describe(model, torch.optim.SGD(model.parameters(), lr=0.1)).levels
    assert [c.name for c in frozen.components] == ["layers.0-2.experts.1"]
    assert "layers.0-2.experts.0,2-3" in [c.name for c in trained.components]


@pytest.mark.parametrize(
    ("name", "found", "noted"),
    [
        ("gpt2", ["h.0-1.attn (cache)"], None),
        ("mistral", ["layers.0-1.self_attn (cache)"], None),
        ("bert", [], "BertSelfAttention"),  # sees its whole input at once
        ("mamba", [], "MambaMixer"),  # has a state, but we do not know it
    ],
)
def test_other_families_of_models(name, found, noted):
    config = CONFIG_MAPPING[name]()
    config.num_hidden_layers = 2
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    description = describe(model)
    assert [c.name for c in description.components if c.clock == "token"] == found
    assert weights(description) == sum(p.numel() for p in model.parameters())
    notes = [note for note in description.notes if "not known here" in note]
    assert [noted in note for note in notes] == ([True] if noted else [])
    if name == "mistral":
        assert "last 4096 tokens" in description[found[0]].context


class Strange(nn.Module):
    """Keeps a running mean of its inputs: it does learn, but nobody told us."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))


class Curious(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["notes"] = torch.zeros(5)


def test_unknown_modules_and_optimizers_are_not_guessed():
    model = Strange()
    optimizer = Curious(model.parameters())
    description = describe(model, optimizer)
    assert names(description) == [["inside"], ["Curious.state"]]
    assert description["Curious.state"].state is None
    assert description["Curious.state"].objective == "unknown until the first step"
    optimizer.step()
    after = describe(model, optimizer)["Curious.notes"]
    assert (after.objective, after.state) == ("unknown", 10)


def test_torch_modules_that_read_sequences_are_named_as_not_known():
    model = nn.ModuleList([nn.MultiheadAttention(4, 2), nn.LSTM(4, 4), nn.Linear(4, 4)])
    (note,) = describe(model, torch.optim.SGD(model.parameters(), lr=0.1)).notes
    assert "not known here: LSTM, MultiheadAttention" in note


def test_a_module_can_speak_for_itself():
    class Speaking(Strange):
        def describe_levels(self, name):
            yield Component(name=f"{name}mean", kind="memory", clock="token", state=2)

    description = describe(nn.Sequential(Speaking(), nn.Linear(2, 2)))
    assert description["0mean"].state == 2
    assert description.level_of("0mean") == 2


def test_frozen_and_forgotten_parameters_are_told():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    description = describe(model, torch.optim.SGD(model[1].parameters(), lr=0.1))
    assert description.levels[0].every == "never"
    assert any("no optimizer steps them" in note for note in description.notes)
    assert weights(description) == sum(p.numel() for p in model.parameters())
    other = describe(model, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    assert any("not trained parameters of this model" in note for note in other.notes)


def test_without_an_optimizer_nothing_outside_the_context_changes():
    description = describe(hope())
    assert description.levels[0].every == "never"
    assert description.levels[-1].every == "every token"
    assert "no optimizer was given" in description.notes[0]
    assert "fast every 128 tokens" in description.notes[1]


def test_order_of_definition_2_is_checked():
    slow = Component(name="slow", kind="x", clock="step", chunk=4)
    with pytest.raises(ValueError, match="Definition 2's order does not hold"):
        Description("t", [slow, Component(name="fast", kind="x", clock="token", needs=("slow",))])
    with pytest.raises(ValueError, match="equal frequency need each other"):
        Description(
            "t",
            [
                Component(name="a", kind="x", clock="step", needs=("b",)),
                Component(name="b", kind="x", clock="step", needs=("a",)),
            ],
        )
    with pytest.raises(ValueError, match="which is not described"):
        Description("t", [Component(name="a", kind="x", clock="step", needs=("ghost",))])
    with pytest.raises(ValueError, match="names must differ"):
        Description("t", [slow, slow])
    with pytest.raises(ValueError, match=r"clock must be one of .*; got"):
        Component(name="a", kind="x", clock="hour")


def test_wrong_arguments_are_refused(tmp_path):
    with pytest.raises(TypeError, match=r"or an object with a method describe_levels.*got int"):
        describe(3)
    with pytest.raises(TypeError, match="optimizer must be"):
        describe(nn.Linear(1, 1), "adam")
    with pytest.raises(ValueError, match=r"must end in .svg or .html"):
        describe(nn.Linear(1, 1)).draw(tmp_path / "x.png")
    with pytest.raises(KeyError, match="no component 'ghost'"):
        describe(nn.Linear(1, 1))["ghost"]


def test_table_json_and_rich_say_the_same():
    from rich.console import Console

    model = llama()
    description = nestling.describe(model, Muon(model.parameters(), lr=1e-3))
    data = json.loads(description.to_json())
    assert [level["level"] for level in data["levels"]] == [1, 2, 3]
    console = Console(width=250, record=True, file=io.StringIO())
    console.print(description)
    rich_text = console.export_text()
    for component in description.components:
        assert component.name in str(description)
        assert component.name in rich_text
    frozen = json.loads(describe(nn.Linear(1, 1)).to_json())
    assert frozen["levels"][0]["components"][0]["chunk"] is None
