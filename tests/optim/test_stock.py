"""Optimizers among stock tools: models they are given, schedulers, hooks, copies, older states."""

from __future__ import annotations

import copy
import io
import pickle
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_flatten
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from nestling import rules
from nestling.levels import Level
from nestling.optim import (
    DGD,
    M3,
    AdaMuon,
    DeepMomentum,
    DeltaMomentum,
    Muon,
    NestedOptimizer,
    Retaining,
    capture,
    compose,
    param_groups,
)

V, D = 48, 32


def llama(tied: bool, vocabulary: int = V) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": D, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=vocabulary, tie_word_embeddings=tied, **sizes, **heads)
    )


def gpt2(tied: bool, vocabulary: int = V) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_embd": D, "n_layer": 2, "n_head": 2, "n_positions": 40}
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, tie_word_embeddings=tied, **sizes))


def tables(model: nn.Module) -> set[int]:
    """The parameters of embeddings and of the head."""
    known = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    return {id(p) for m in [*known, model.get_output_embeddings()] for p in m.parameters()}


def decayed(model: nn.Module) -> list[dict]:
    """Groups as `transformers.Trainer` makes them: matrices, and all that does not decay."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("give", [nn.Module.parameters, nn.Module.named_parameters, decayed])
@pytest.mark.parametrize("vocabulary", [V, D], ids=["usual", "as wide as the model"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("make", [llama, gpt2])
def test_no_embedding_and_no_head_is_orthogonalised(make, tied, vocabulary, give) -> None:
    model = make(tied, vocabulary)
    optimizer = M3(give(model))
    kinds = {
        id(p): optimizer.kind(group, p) for group in optimizer.param_groups for p in group["params"]
    }
    assert not any(kinds[table].hidden for table in tables(model))
    matrices = [p for p in model.parameters() if p.ndim >= 2 and id(p) not in tables(model)]
    assert sum(kinds[id(p)].hidden for p in matrices) >= len(matrices) - 1


def test_matrices_that_somebody_has_chosen_are_orthogonalised() -> None:
    def weight(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(shape))

    level = [weight(64, 16), weight(16, 64), weight(64, 16), weight(16, 64)]
    assert Muon(level).param_groups[0]["hidden"] == [True] * 4
    assert Muon([weight(9, 4)]).param_groups[0]["hidden"] == [True]
    table_and_head = [weight(48, 16), weight(48, 16)]
    assert Muon(table_and_head).param_groups[0]["hidden"] == [False, False]


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Learn a fixed text of bytes; the last loss."""
    text = (torch.arange(4 * 24).view(4, 24) ** 2 + 3) % V
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=text, labels=text).loss
        loss.backward()
        optimizer.step()
    return loss.item()


def test_plain_parameters_train_nearly_as_well_as_labelled_ones() -> None:
    losses = {}
    for name, give in {"plain": nn.Module.parameters, "labelled": param_groups}.items():
        model = llama(tied=False)
        losses[name] = learn(model, M3(give(model), lr=0.01), 40)
    assert losses["labelled"] < 1.0
    assert losses["plain"] < losses["labelled"] + 0.2


def test_the_trainer_form_of_the_readme_trains(tmp_path) -> None:
    from transformers import Trainer, TrainingArguments

    text = (torch.arange(4 * 24).view(4, 24) ** 2 + 3) % V
    rows = [{"input_ids": row, "labels": row} for row in text]
    losses = {}
    for name in ("instance", "class"):
        model = llama(tied=False)
        how = {
            "instance": {"optimizers": (M3(param_groups(model), lr=0.01), None)},
            "class": {"optimizer_cls_and_kwargs": (M3, {"lr": 0.01})},
        }[name]
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=40, per_device_train_batch_size=4, use_cpu=True,
            report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=40,
            lr_scheduler_type="constant",
        )  # fmt: skip
        Trainer(model, arguments, train_dataset=rows, **how).train()
        with torch.no_grad():
            losses[name] = model(input_ids=text, labels=text).loss.item()
    assert losses["instance"] < 1.0
    assert losses["class"] < losses["instance"] + 0.2


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4))


def nested(model: nn.Sequential, **options) -> NestedOptimizer:
    return NestedOptimizer(
        [
            (Level(name="fast", chunk=1), model[0].parameters(), lambda p: M3(p, **options)),
            (Level(name="slow", chunk=3), model[2].parameters(), lambda p: AdaMuon(p, **options)),
        ]
    )


MAKERS = {
    "M3": lambda m, **o: M3(m.parameters(), **o),
    "Muon": lambda m, **o: Muon(m.parameters(), **o),
    "AdaMuon": lambda m, **o: AdaMuon(m.parameters(), **o),
    "DGD": lambda m, **o: DGD(m.parameters(), inputs=capture(m), **o),
    "DeltaMomentum": lambda m, **o: DeltaMomentum(m.parameters(), **o),
    "DeepMomentum": lambda m, **o: DeepMomentum(m.parameters(), **o),
    "compose": lambda m, **o: compose(m.parameters(), rules.lion(), **o),
    "nested": nested,
    "Retaining": lambda m, **o: Retaining(
        [p for p in m.parameters() if p.ndim == 2], inputs=capture(m), chunk=3, **o
    ),
}
every = pytest.mark.parametrize("name", list(MAKERS))


def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def same(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@every
def test_rates_that_are_tensors_of_one_element(name: str) -> None:
    models = [net(), net()]
    for model, rate in zip(models, (0.05, torch.tensor([[0.05]])), strict=True):
        run(model, MAKERS[name](model, lr=rate), 4)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(ValueError, match=r"Tensor lr must be 1-element.*a tensor of one element"):
        MAKERS[name](net(), lr=torch.tensor([0.1, 0.2]))


def test_a_wrong_rate_is_named_before_the_parameters_as_in_torch() -> None:
    two = torch.tensor([0.1, 0.2])
    for make in (torch.optim.AdamW, M3, Muon, DeepMomentum):
        with pytest.raises(ValueError, match="Tensor lr must be 1-element"):
            make(None, lr=two)


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "Retaining"])  # has none
@pytest.mark.parametrize("schedule", ["OneCycleLR", "CyclicLR"])
def test_schedules_that_cycle_momentum(name: str, schedule: str) -> None:
    model = net()
    optimizer = MAKERS[name](model, lr=0.01)
    options = {"OneCycleLR": {"total_steps": 8}, "CyclicLR": {"base_lr": 0.001, "step_size_up": 3}}
    kind = getattr(torch.optim.lr_scheduler, schedule)
    cycle = kind(optimizer, max_lr=0.02, cycle_momentum=True, **options[schedule])
    seen = set()
    for step in range(6):
        run(model, optimizer, 1, first=step)
        cycle.step()
        group = optimizer.param_groups[0]
        seen.add(group["betas"][0] if "betas" in group else group["momentum"])
    assert len(seen) > 3
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("name", ["DGD", "compose"])
def test_momentum_over_a_rule_is_that_of_sgd(name: str) -> None:
    make = {"compose": lambda m, **o: compose(m.parameters(), **o), "DGD": MAKERS["DGD"]}[name]
    model, other = net(), net()
    rate = 0.05 if name == "compose" else 1e-6  # to first order in the rate DGD is SGD
    run(model, make(model, lr=rate, momentum=0.9), 5)
    run(other, torch.optim.SGD(other.parameters(), lr=rate, momentum=0.9), 5)
    for a, b, c in zip(model.parameters(), other.parameters(), net().parameters(), strict=True):
        torch.testing.assert_close(a - c, b - c, rtol=0.05, atol=1e-7)


@every
def test_copies_go_on_alike(name: str) -> None:
    model = net()
    pair = {"model": model, "optimizer": MAKERS[name](model, lr=0.02)}
    run(model, pair["optimizer"], 4)
    twin = copy.deepcopy(pair)
    for one in (pair, twin):
        run(one["model"], one["optimizer"], 5, first=4)
    same(model, twin["model"])
    through = pickle.loads(pickle.dumps(pair))
    for one in (pair, through):
        run(one["model"], one["optimizer"], 5, first=9)
    same(model, through["model"])


def test_rules_can_be_pickled() -> None:
    made = [
        rules.adam(0.8, eps=1e-6), rules.muon(), rules.multiscale(chunk=3), rules.adamw(),
        rules.chain(rules.lion(), rules.weight_decay(0.1)), rules.signsgd, rules.dgd(erase=0.5),
        rules.nonlinear(rules.momentum(), torch.tanh), rules.deep_momentum(hidden=4),
    ]  # fmt: skip
    assert pickle.loads(pickle.dumps(rules.identity)) is rules.identity
    for rule in made:
        again = pickle.loads(pickle.dumps(rule))
        weight, x, u = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5, 3)
        write = rules.Write(-u.mT @ x, x, u)
        one, _ = rules.apply(rule, weight, write, rule.init(weight), rules.Gates(0.1))
        two, _ = rules.apply(again, weight, write, again.init(weight), rules.Gates(0.1))
        assert torch.equal(one, two)
        assert rule[2:5] == again[2:5]


@every
def test_hooks_run_once(name: str) -> None:
    model = net()
    optimizer = MAKERS[name](model, lr=0.01)
    seen: list[str] = []

    def note(what: str):
        return lambda *_: seen.append(what)

    handles = [
        register_optimizer_step_pre_hook(note("all before")),
        register_optimizer_step_post_hook(note("all after")),
    ]
    optimizer.register_step_pre_hook(note("before"))
    optimizer.register_step_post_hook(note("after"))
    optimizer.register_state_dict_pre_hook(note("saving"))
    optimizer.register_state_dict_post_hook(note("saved"))
    optimizer.register_load_state_dict_pre_hook(note("loading"))
    optimizer.register_load_state_dict_post_hook(note("loaded"))
    try:
        run(model, optimizer, 1)
    finally:
        for handle in handles:
            handle.remove()
    assert seen == ["all before", "before", "after", "all after"]
    seen.clear()
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["saving", "saved", "loading", "loaded"]


def test_a_levels_own_hooks_run_when_it_steps() -> None:
    model, seen = net(), []
    optimizer = nested(model, lr=0.01)
    slow = optimizer.optimizers[1]
    slow.register_step_pre_hook(lambda *_: seen.append(("before", optimizer.position)))
    slow.register_step_post_hook(lambda *_: seen.append(("after", optimizer.position)))
    run(model, optimizer, 7)
    assert seen == [("before", 3), ("after", 3), ("before", 6), ("after", 6)]


@every
def test_load_hooks_may_change_the_state(name: str) -> None:
    model = net()
    optimizer = MAKERS[name](model, lr=0.01)
    run(model, optimizer, 4)

    def slower(_, state):
        groups = [{**group, "lr": 0.002} for group in state["param_groups"]]
        return {**state, "param_groups": groups}

    ends = []
    optimizer.register_load_state_dict_pre_hook(slower)
    optimizer.register_load_state_dict_post_hook(lambda o: ends.append(o.param_groups[0]["lr"]))
    optimizer.load_state_dict(optimizer.state_dict())
    assert ends == [0.002]


@every
def test_settings_younger_than_a_state_are_filled_in(name: str) -> None:
    model = net()
    optimizer = MAKERS[name](model, lr=0.01)
    run(model, optimizer, 4)
    saved = optimizer.state_dict()
    keep = ("params", "lr", "level", "position")
    old = [{k: v for k, v in group.items() if k in keep} for group in saved["param_groups"]]
    optimizer.load_state_dict({**saved, "param_groups": old})
    assert [set(g) for g in optimizer.param_groups] == [set(g) for g in saved["param_groups"]]
    run(model, optimizer, 3, first=4)


@every
def test_all_state_is_contiguous(name: str) -> None:
    model = net()
    optimizer = MAKERS[name](model, lr=0.01)
    run(model, optimizer, 4)
    held, _ = tree_flatten([list(state.values()) for state in optimizer.state.values()])
    assert held
    assert all(v.is_contiguous() for v in held)


class Turned(NamedTuple):
    memory: torch.Tensor


def turned(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, laid out column by column."""
    return x.mT.contiguous().mT


def test_state_of_any_rule_is_kept_contiguous() -> None:
    """A checkpoint sent from rank 0 reads memory as it lies: views would be scrambled."""

    def init(weight: torch.Tensor) -> Turned:
        return Turned(turned(torch.zeros_like(weight)))

    def step(write, state, weight, gates):
        memory = turned(0.9 * state.memory + write.grad)
        return write._replace(grad=memory), Turned(memory)

    model = net()
    optimizer = compose(model.parameters(), rules.Rule(init, step), lr=0.01, foreach=False)

    def contiguous() -> bool:
        held = [v for state in optimizer.state.values() for v in state.values()]
        return len(held) > 6 and all(v.is_contiguous() for v in held)

    optimizer.create_state()
    assert contiguous()
    run(model, optimizer, 2)
    assert contiguous()
    saved = optimizer.state_dict()
    matrix = saved["state"][0]["memory"]
    saved["state"][0] = {**saved["state"][0], "memory": turned(matrix)}
    optimizer.load_state_dict(saved)
    assert contiguous()
    assert torch.equal(optimizer.state_dict()["state"][0]["memory"], matrix)


@every
def test_a_saved_run_goes_on_to_the_bit(name: str) -> None:
    """In the middle of a chunk where there are chunks, through a file of tensors alone."""
    model = net()
    optimizer = MAKERS[name](model, lr=0.02)
    run(model, optimizer, 4)
    saved = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], saved)
    saved.seek(0)
    weights, state = torch.load(saved, weights_only=True)
    other = net()
    other.load_state_dict(weights)
    resumed = MAKERS[name](other, lr=0.5)
    resumed.load_state_dict(state)
    for one, how in ((model, optimizer), (other, resumed)):
        run(one, how, 5, first=4)
    same(model, other)


@every
def test_a_group_that_is_refused_is_not_added(name: str) -> None:
    optimizer = MAKERS[name](net(), lr=0.02)
    groups = len(optimizer.param_groups)
    with pytest.raises((ValueError, TypeError, NotImplementedError)):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))], "lr": -1.0})
    assert len(optimizer.param_groups) == groups


def test_what_levels_have_collected_moves_to_the_parameters_device() -> None:
    model = net()
    optimizer = nested(model, lr=0.01)
    run(model, optimizer, 4)
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    elsewhere = net().to("meta")
    moved = nested(elsewhere, lr=0.01)
    moved.load_state_dict(torch.load(saved))
    kept = moved._kept[next(elsewhere[2].parameters())]
    assert kept["nested.sum"].device.type == "meta"
    assert kept["nested.count"].item() == 1
