"""Any model and optimizer as levels: true counts, true frequencies, nothing guessed."""

from __future__ import annotations

import copy
import io
import itertools
import json
import math
from typing import NamedTuple

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModel, LlamaConfig, LlamaForCausalLM

import nestling
from nestling import rules
from nestling.levels import Level
from nestling.memories.state import tree_leaves
from nestling.models.presets import tiny
from nestling.nested import Component, Description, describe
from nestling.optim import (
    DGD,
    M3,
    DeepMomentum,
    DeltaMomentum,
    Muon,
    NestedOptimizer,
    capture,
    compose,
)


def llama(layers=3):
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=32,
            tie_word_embeddings=False,
        )
    )


def hope(name="hope", **fields):
    options = {"self_modifying": {"chunk": 8, "chunk_others": 8}}
    config = tiny(name, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, **fields)
    config.mixer_options = options
    return nestling.NestlingForCausalLM(config)


def names(description):
    return [[c.name for c in level.components] for level in description.levels]


def weights(description):
    return sum(c.parameters for c in description.components)


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
    ("name", "found"),
    [
        ("gpt2", ["h.0-1.attn (cache)"]),
        ("mistral", ["layers.0-1.self_attn (cache)"]),
        ("bert", []),  # sees its whole input at once
        ("mamba", []),  # has a state, but we do not know it
    ],
)
def test_other_families_of_models(name, found):
    config = CONFIG_MAPPING[name]()
    config.num_hidden_layers = 2
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    description = describe(model)
    assert [c.name for c in description.components if c.clock == "token"] == found
    assert weights(description) == sum(p.numel() for p in model.parameters())
    if name == "mistral":
        assert "last 4096 tokens" in description[found[0]].context


@pytest.mark.parametrize(
    ("make", "memories"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), {}),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {"SGD.momentum_buffer": 1}),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), {"AdamW.max_exp_avg_sq": 1}),
        (
            lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
            {"RMSprop.square_avg": 1, "RMSprop.momentum_buffer": 1, "RMSprop.grad_avg": 1},
        ),
        (lambda p: torch.optim.Adagrad(p), {"Adagrad.sum": 1}),
    ],
)
def test_what_torch_optimizers_remember_is_what_they_then_hold(make, memories):
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters())
    description = describe(model, optimizer)
    before = {c.name: c.state for c in description.components if c.kind == "optimizer memory"}
    assert memories.keys() <= before.keys()
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    held: dict[str, int] = {}
    for state in optimizer.state.values():
        for name, value in state.items():
            if torch.is_tensor(value) and value.numel() > 1:
                key = f"{type(optimizer).__name__}.{name}"
                held[key] = held.get(key, 0) + value.numel()
    assert before == held


OURS = {
    "M3": lambda m: M3(m.parameters(), lr=1e-3, chunk=4),
    "Muon": lambda m: Muon(m.parameters()),
    "DeltaMomentum": lambda m: DeltaMomentum(m.parameters()),
    "DeepMomentum": lambda m: DeepMomentum(m.parameters()),
    "DGD": lambda m: DGD(m.parameters(), inputs=capture(m)),
    "Composed": lambda m: compose(m.parameters(), rules.momentum(), rules.adam()),
}


@pytest.mark.parametrize("name", OURS)
def test_our_optimizers_state_has_the_size_we_say(name):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = OURS[name](model)
    description = describe(model, optimizer)
    memories = [c for c in description.components if c.kind == "optimizer memory"]
    model(torch.randn(16, 6)).square().mean().backward()
    optimizer.step()
    held = [v for s in optimizer.state.values() for n, v in s.items() if n != "step"]
    assert sum(c.state for c in memories) == sum(v.numel() for v in held)
    assert all(c.objective != "its rule's" for c in memories)
    assert bool(memories) == (name != "DGD")


def test_a_slow_momentum_is_slower_than_the_weights_that_follow_it():
    model = hope()
    description = describe(model, M3(model.parameters(), lr=1e-3, chunk=4))
    assert description["M3.slow"].chunk == 4
    assert description.level_of("M3.slow") == 1
    assert description.level_of("M3.fast") > description.level_of("model.norm")


def test_an_unknown_rule_is_not_given_an_objective():
    class Own(NamedTuple):
        memory: torch.Tensor

    def step(write, state, weight, gates):
        return write, state

    rule = rules.Rule(lambda weight: Own(torch.zeros_like(weight)), step)
    model = nn.Linear(2, 2)
    assert describe(model, compose(model.parameters(), rule))["Composed.memory"].objective == (
        "its rule's"
    )


def nested_hope(chunks):
    model = hope(levels=[{"name": f"l{i}", "chunk": 8 * c} for i, c in enumerate(chunks)])
    groups: dict[str, list] = {f"l{i}": [] for i in range(len(chunks))} | {"rest": []}
    for name, parameter in model.named_parameters():
        path = name.split(".")
        groups[f"l{path[5]}" if "channel" in path else "rest"].append(parameter)
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
        component = description[f"model.layers.0-1.channel.mlps.{level}"]
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
        changed["model.layers.0.mixer.first"]
    )
    frozen = description.levels[0]
    assert frozen.every == "never"
    assert "model.layers.0-1.channel.mlps.2" in [c.name for c in frozen.components]


@pytest.mark.parametrize(
    ("name", "field", "component"),
    [
        ("hope", "weights", "model.layers.0-1.mixer (memory)"),
        ("hope", "start", "model.layers.0-1.mixer (k, v, eta, alpha)"),
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
    assert "fast every 512 tokens" in description.notes[1]


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
    with pytest.raises(ValueError, match="clock must be one of"):
        Component(name="a", kind="x", clock="hour")


def test_wrong_arguments_are_refused(tmp_path):
    with pytest.raises(TypeError, match=r"takes a torch.nn.Module or a NestedSystem, got int"):
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
