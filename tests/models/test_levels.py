"""Levels of a continuum memory as gated MLPs."""

from __future__ import annotations

import pytest
import torch
from small_models import config_of

from nestling.continuum import Chain, Continuum, FeedForward, MemoryLevel, own_slots
from nestling.continuum.layers import GATED, NOW
from nestling.levels import Level
from nestling.models import NestlingForCausalLM, presets


def test_a_chain_of_one_gated_level_is_a_feed_forward_layer():
    torch.manual_seed(0)
    plain, chain = FeedForward(8, 12), Chain(8, 12, [Level(name="one", chunk=4)], activation=GATED)
    chain.norms[0].load_state_dict(plain.norm.state_dict())
    chain.mlps[0].load_state_dict(plain.mlp.state_dict())
    x = torch.randn(2, 5, 8)
    assert torch.equal(plain(x)[0], chain(x)[0])


@pytest.mark.parametrize("topology", ["chain", "parallel"])
def test_gated_levels_keep_the_size_and_learn(topology):
    config = presets.tiny(activation=GATED, topology=topology)
    assert presets.parameter_count(config) == pytest.approx(1_000_000, rel=0.02)
    model = NestlingForCausalLM(config_of("hope", activation=GATED, topology=topology))
    assert any(slot.name.endswith(".gate.weight") for slot in own_slots(model))
    continuum = Continuum(
        model,
        [MemoryLevel(name="fast", chunk=4, rate=0.1), MemoryLevel(name="slow", chunk=16, rate=0.1)],
        own_slots(model),
    )
    out = continuum(torch.randint(2, 13, (1, 20)))
    assert {update.level for update in out.updates} == {"fast", "slow"}
    for slot in own_slots(model):
        assert continuum.delta(out.state, slot.name).abs().sum() > 0


def test_matrices_of_levels_get_their_values_from_their_mlp():
    model = NestlingForCausalLM(config_of("hope"))
    matrix = model.model.layers[0].channel.mlps[0].up
    before = matrix.weight.clone()
    model._init_weights(matrix)
    assert torch.equal(matrix.weight, before)


def test_layers_of_levels_ask_and_no_operation_is_watched():
    model = NestlingForCausalLM(config_of("hope")).eval()
    continuum = Continuum(model, [MemoryLevel(name="all", chunk=4, rate=0.1)], own_slots(model)[:1])
    seen = []
    watch = model.model.layers[0].register_forward_pre_hook(
        lambda *_: seen.append((torch._C._len_torch_function_stack(), NOW.reading is not None))
    )
    continuum(torch.randint(2, 13, (1, 9)))
    watch.remove()
    assert set(seen) == {(0, True)}
    assert NOW.reading is None
