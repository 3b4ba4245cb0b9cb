"""The engine against Eq. 71 by loops: outputs, fast weights and the gradients of the meta-loss."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck
from torch.func import functional_call

from nestling.continuum import Continuum, MemoryLevel, naive, own_slots
from nestling.continuum import fast as differences
from nestling.rules import adam, adamw, identity, momentum, multiscale, muon
from nestling.scan import any_order


@pytest.fixture(autouse=True, params=["factors", "matrix"])
def form(request, monkeypatch):
    """How gradients are kept in a segment: as they come, or formed wherever they may be."""
    if request.param == "matrix":
        monkeypatch.setattr(differences, "PASS", 0)


def close(one, other):
    torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-7)


def compare(model, levels, slots, ids, **options):
    """Run both and compare everything they leave behind."""
    out = Continuum(model, levels, slots, **options)(ids)
    mean = options.pop("reduce", "mean") == "mean"
    want = naive(model, levels, slots, ids, mean=mean, **options)
    close(out.logits, want.logits.detach())
    close(out.losses[0, 1:], want.losses.detach())
    for level, state, fast, changed in zip(
        levels, out.state.levels, want.fast, want.changed, strict=True
    ):
        assert changed == [u.position for u in out.updates if u.level == level.name]
        for mine, its in zip(state.fast, fast, strict=True):
            close(torch.zeros_like(its) if mine is None else mine[0].detach(), its.detach())
    return out


RULES = {"gd": identity, "momentum": momentum(0.9), "adam": adam(), "adamw": adamw(decay=0.1)}
RULES |= {"muon": muon(), "m3": multiscale(chunk=2)}


@pytest.mark.parametrize("rule", RULES)
def test_any_rule_on_shared_slots(make, layout, ids, rule):
    model = make("llama", num_hidden_layers=1).double()
    levels = [
        MemoryLevel(name="fast", chunk=4, rate=0.5),
        MemoryLevel(name="ruled", chunk=6, rate=0.02, retain=0.9, rule=RULES[rule]),
        MemoryLevel(name="slow", chunk=12, rate=0.3),
        MemoryLevel(name="slower", chunk=24, rate=0.3),  # fed by "slow"
    ]
    out = compare(model, levels, layout["share"](model, 4), ids[:, :30])
    assert out.updates[-1].distance > 0


@pytest.mark.parametrize("kind", ["split", "layers"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_split_matrices_and_layers(make, layout, ids, family, kind):
    model = make(family).double()
    hidden = 12 if family == "llama" else 32
    slots = layout[kind](model, hidden if kind == "split" else 2)
    levels = [MemoryLevel(name="a", chunk=5, rate=0.5), MemoryLevel(name="b", chunk=10, rate=0.5)]
    compare(model, levels, slots, ids, reduce="sum")


@pytest.mark.parametrize("topology", ["chain", "parallel"])
def test_our_own_models_where_each_mlp_is_a_level(make, ids, topology):
    model = make("hope", topology=topology).double()
    levels = [MemoryLevel(name="fast", chunk=4, rate=0.5), MemoryLevel(name="slow", chunk=8)]
    compare(model, levels, own_slots(model), ids[:, :18])


@pytest.mark.parametrize("transfer", ["frozen", "first_order", "reptile", "second_order"])
def test_nested_levels_return_to_a_learned_start(make, layout, ids, transfer):
    model = make("gpt2", attn_implementation="eager").double()
    levels = [
        MemoryLevel(name="fast", chunk=3, rate=0.5, rule=momentum(0.5)),
        MemoryLevel(name="middle", chunk=6, rate=0.5),
        MemoryLevel(name="slow", chunk=18, rate=0.5),
    ]
    out = compare(model, levels, layout["share"](model, 3), ids, transfer=transfer)
    continuum, state = Continuum(model, levels, layout["share"](model, 3), transfer=transfer), None
    for at in range(ids.shape[1]):  # a return sets the count of updates back
        state = continuum(ids[:, at : at + 1], state).state
        since = [int(level.updates) for level in state.levels]
        assert since == [at % 6 // 3, at % 18 // 6, at // 18]
    if transfer == "frozen":  # and ends where the level began
        for name, due in (("fast", [6, 12, 18, 24, 30, 36]), ("middle", [18, 36])):
            back = [u.position for u in out.updates if u.level == name and not u.distance.any()]
            assert back == due
    started = out.state.levels[0].start[0] is not None and bool(out.state.levels[0].start[0].any())
    assert started == (transfer != "frozen")


def meta_gradient(run, model, slots):
    weights = [dict(model.named_parameters())[slot.name] for slot in slots]
    return torch.autograd.grad(run(), weights)


@pytest.mark.parametrize("transfer", [None, "reptile", "second_order"])
def test_second_order_gradients_of_the_meta_loss(make, layout, ids, transfer):
    model = make("gpt2", attn_implementation="eager").double()
    levels = [
        MemoryLevel(name="fast", chunk=3, rate=2.0, rule=momentum(0.5)),
        MemoryLevel(name="slow", chunk=6, rate=1.0, retain=0.9),
    ]
    slots, ids = layout["share"](model, 2), ids[:, :14]
    continuum = Continuum(model, levels, slots, transfer=transfer)
    options = {"transfer": transfer, "second_order": True}
    mine = meta_gradient(
        lambda: continuum(ids, meta="second_order").losses[0, 1:].mean(), model, slots
    )
    its = meta_gradient(
        lambda: naive(model, levels, slots, ids, **options).losses.mean(), model, slots
    )
    first = meta_gradient(
        lambda: Continuum(model, levels, slots)(ids, meta="first_order").losses[0, 1:].mean(),
        model,
        slots,
    )
    for one, other, rough in zip(mine, its, first, strict=True):
        close(one, other)
        assert (one - rough).norm() > 1e-4 * one.norm()  # the second order matters here


BASES = {
    "hope": {},
    "hope, two layers": {"mixer_options": {"self_modifying": {"chunk": 4, "expansion": 1}}},
    "hope, stage 1": {
        "mixer_options": {
            "self_modifying": {"chunk": 4, "expansion": 1, "adaptive": (), "own_values": False,
                               "residual": False}
        }
    },
    "hope, deltanet": {"mixer": "deltanet", "mixer_options": {}},
    "hope, attention": {"mixer": "attention", "mixer_options": {}},
    "llama": {},
}  # fmt: skip


@pytest.mark.parametrize("base", BASES)
def test_second_order_through_fast_kernels(make, layout, ids, base):
    """Scans with backward passes written by hand, and fused attention, as they come by default."""
    model = make(base.split(",")[0], **BASES[base]).double()
    levels = [
        MemoryLevel(name="fast", chunk=3, rate=2.0),
        MemoryLevel(name="slow", chunk=6, rate=1.0),
    ]
    slots, ids = layout["share"](model, 2), ids[:, :10]
    continuum = Continuum(model, levels, slots)
    mine = meta_gradient(
        lambda: continuum(ids, meta="second_order").losses[0, 1:].mean(), model, slots
    )
    with any_order():
        its = meta_gradient(
            lambda: naive(model, levels, slots, ids, second_order=True).losses.mean(), model, slots
        )
    first = meta_gradient(
        lambda: continuum(ids, meta="first_order").losses[0, 1:].mean(), model, slots
    )
    for one, other in zip(mine, its, strict=True):
        close(one, other)
    apart = sum(float((one - rough).norm()) for one, rough in zip(mine, first, strict=True))
    assert apart > 1e-4 * sum(float(one.norm()) for one in mine)


def test_gradcheck_by_weights_and_rates(make, layout, ids):
    """Finite differences through three updates, by the initial weights and by learned rates."""
    model = make("gpt2", n_layer=1, n_embd=4, n_inner=3, attn_implementation="eager").double()
    levels = [MemoryLevel(name="a", chunk=2, rate=2.0), MemoryLevel(name="b", chunk=4, rate=1.0)]
    slots = layout["share"](model, 2)
    continuum = Continuum(model, levels, slots, learn_rates=True)
    names = [f"model.{slot.name}" for slot in slots]
    start = [dict(continuum.named_parameters())[name].detach().clone() for name in names]
    rates = continuum.log_rate.detach().clone()

    def loss(log_rate, *weights):
        given = {"log_rate": log_rate, **dict(zip(names, weights, strict=True))}
        out = functional_call(continuum, given, (ids[:, :7],), {"meta": "second_order"})
        return out.losses[0, 1:].sum()

    inputs = [each.requires_grad_() for each in (rates, *start)]
    assert gradcheck(loss, inputs, eps=1e-6, atol=1e-6, rtol=1e-4)
