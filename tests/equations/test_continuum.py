"""Eq. 70-74: the continuum memory system, executed by the engine and by hand."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call
from torch.nn import functional

from nestling.continuum import Continuum, MemoryLevel, meta_loss, own_slots
from nestling.models import NestlingConfig, NestlingForCausalLM

IDS = torch.randint(0, 16, (1, 13), generator=torch.Generator().manual_seed(0))


def tiny(topology="chain"):
    torch.manual_seed(1)
    config = NestlingConfig(
        vocab_size=16,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=6,
        mixer="deltanet",
        levels=[{"name": "fast", "chunk": 3}, {"name": "slow", "chunk": 6}],
        topology=topology,
    )
    model = NestlingForCausalLM(config).double().eval()
    levels = [MemoryLevel(name="fast", chunk=3, rate=0.5), MemoryLevel(name="slow", chunk=6)]
    return model, levels, own_slots(model)


def named(model, slots, level):
    mine = [slot.name for slot in slots if slot.parts[0].level == level]
    return {name: model.get_parameter(name).detach() for name in mine}


def chunk_gradient(model, weights, ids, state, by):
    """The gradient of a segment's mean loss by some weights, and the cache after it."""
    leaves = {name: weights[name].clone().requires_grad_() for name in by}
    given = {"input_ids": ids[:, :-1], "past_key_values": state, "use_cache": True}
    out = functional_call(model, {**weights, **leaves}, kwargs=given)
    loss = functional.cross_entropy(out.logits[0], ids[0, 1:])
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return dict(zip(by, grads, strict=True)), out.past_key_values


@pytest.mark.equation(70, 71)
def test_each_mlp_of_the_chain_changes_on_its_clock_by_its_chunks_gradient():
    model, levels, slots = tiny()
    out = Continuum(model, levels, slots)(IDS)
    fast, slow = named(model, slots, 0), named(model, slots, 1)
    weights, state = {**fast, **slow}, None
    state = model.make_cache()
    sums = {name: torch.zeros_like(value) for name, value in slow.items()}
    for k in range(4):
        text = IDS[:, 3 * k : 3 * k + 4]
        grads, state = chunk_gradient(model, weights, text, state, list(weights))
        state = model.make_cache(_detached(state.states), 3 * k + 3)
        sums = {name: total + grads[name] for name, total in sums.items()}
        weights = {**weights, **{n: weights[n] - 0.5 * grads[n] for n in fast}}  # every 3
        if k % 2:  # every 6: the mean over two segments
            weights = {**weights, **{n: weights[n] - 0.01 * sums[n] / 2 for n in slow}}
            sums = {name: torch.zeros_like(value) for name, value in slow.items()}
    continuum = Continuum(model, levels, slots)
    for slot in slots:
        base = model.get_parameter(slot.name).detach()
        mine = base + continuum.delta(out.state, slot.name)[0]
        torch.testing.assert_close(mine, weights[slot.name])


def _detached(states):
    from nestling.tree import state_detach

    return state_detach(states)


@pytest.mark.equation(72)
def test_a_nested_level_returns_to_the_start_the_slower_level_learned():
    model, levels, slots = tiny()
    nested = Continuum(model, levels, slots, transfer="first_order")
    out = nested(IDS[:, :7])  # one context of the fast level: two updates, then back
    fast = named(model, slots, 0)
    weights = {**fast, **named(model, slots, 1)}
    one, state = chunk_gradient(model, weights, IDS[:, :4], model.make_cache(), list(fast))
    state = model.make_cache(_detached(state.states), 3)
    weights = {**weights, **{n: weights[n] - 0.5 * one[n] for n in fast}}
    two, _ = chunk_gradient(model, weights, IDS[:, 3:7], state, list(fast))
    for start, name in zip(out.state.levels[0].start, fast, strict=True):
        learned = -levels[1].rate * (one[name] + two[name]) / 2  # at the slow level's rate
        torch.testing.assert_close(start[0], learned)
    assert out.state.levels[0].fast == out.state.levels[0].start
    assert [u.level for u in out.updates] == ["fast", "fast", "slow"]
    assert [int(level.updates) for level in out.state.levels] == [0, 1]  # the fast one is back


@pytest.mark.equation(73)
def test_sequential_levels_learn_all_initial_states_at_the_slowest():
    """One outer step on the meta-loss moves every level's initial state, and none is reset."""
    model, levels, slots = tiny()
    continuum = Continuum(model, levels, slots)
    loss, out = meta_loss(continuum, IDS, meta="first_order")
    loss.backward()
    assert all(model.get_parameter(slot.name).grad.any() for slot in slots)
    made = [sum(u.level == level.name for u in out.updates) for level in levels]
    assert [int(level.updates) for level in out.state.levels] == made  # none went back
    before = float(loss.detach())
    with torch.no_grad():
        for slot in slots:
            weight = model.get_parameter(slot.name)
            weight -= 0.1 * weight.grad
    assert float(meta_loss(continuum, IDS)[0].detach()) < before


@pytest.mark.equation(73)
def test_the_meta_loss_is_the_mean_loss_and_reptile_pulls_to_where_levels_ended():
    model, levels, slots = tiny()
    continuum = Continuum(model, levels, slots)
    loss, out = meta_loss(continuum, IDS, meta="reptile")
    torch.testing.assert_close(loss, out.losses[:, 1:].mean())
    loss.backward()
    for slot in slots:
        pull = -continuum.delta(out.state, slot.name).mean(0)
        torch.testing.assert_close(model.get_parameter(slot.name).grad, pull)


@pytest.mark.equation(74)
def test_independent_levels_learn_in_context_under_a_learned_aggregation():
    model, levels, slots = tiny("parallel")
    continuum = Continuum(model, levels, slots)
    out = continuum(IDS)
    assert [u.position for u in out.updates if u.level == "slow"] == [6, 12]
    loss, _ = meta_loss(continuum, IDS, meta="first_order")
    loss.backward()
    weights = [p for n, p in model.named_parameters() if n.endswith("channel.weight")]
    assert weights
    assert all(p.grad.any() for p in weights)
    with torch.no_grad():  # a level without weight in the sum has no surprise, and never moves
        for weight in weights:
            weight[1] = 0.0
    still = continuum(IDS)
    assert not any(fast.any() for fast in still.state.levels[1].fast)
    assert all(fast.any() for fast in still.state.levels[0].fast)
