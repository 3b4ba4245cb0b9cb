"""Presets: sizes as promised, and the same size for every model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nestling.models import NestlingForCausalLM, presets
from nestling.models.presets import MODELS

SIZES = {
    presets.tiny: 1_000_000,
    presets.small: 5_000_000,
    presets.base: 60_000_000,
    presets.hope_760m: 760_000_000,
    presets.hope_1b3: 1_300_000_000,
}


@pytest.mark.parametrize("preset", SIZES, ids=lambda p: p.__name__)
@pytest.mark.parametrize("mixer", MODELS)
def test_all_models_of_a_size_have_as_many_parameters(preset, mixer):
    count = presets.parameter_count(preset(model=mixer))
    assert abs(count / SIZES[preset] - 1) < 0.0125, count  # hidden widths go in steps of four


@pytest.mark.parametrize("mixer", MODELS)
def test_the_count_is_that_of_the_model(mixer):
    for config in (presets.tiny(mixer), presets.tiny(mixer, tie_word_embeddings=False)):
        with torch.device("meta"):
            model = NestlingForCausalLM(config)
        if config.tie_word_embeddings:
            model.tie_weights()
        assert model.num_parameters() == presets.parameter_count(config)


def test_tiny_is_hope_on_bytes():
    config = presets.tiny()
    assert (config.mixer, config.channel, config.vocab_size) == ("steered", "cms", 259)
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (256, 257, 258)


def test_options_of_a_mixer_are_added_to_those_of_the_model():
    printed = presets.tiny("hope_printed").mixer_config(0)
    assert not printed.projections.residual
    more = {"projections": {"conv": 2}, "chunk": 32}
    both = presets.tiny("hope_printed", mixer_options={"self_modifying": more})
    config = both.mixer_config(0)
    assert (config.projections.residual, config.projections.conv, config.chunk) == (False, 2, 32)
    untied = presets.tiny(mixer_options={"steered": {"retention": {"tied": False}}})
    usual = presets.tiny().mixer_config(0).retention
    assert untied.mixer_config(0).retention == replace(usual, tied=False)


def test_options_of_a_mixer_that_is_not_there_are_refused():
    message = "options of 'self_modifying', and the mixer of 'hope' is 'steered'"
    with pytest.raises(ValueError, match=message):
        presets.tiny(mixer_options={"self_modifying": {"chunk": 32}})


def test_fields_can_be_given_and_mistakes_are_named():
    assert presets.tiny(num_hidden_layers=2, intermediate_size=32).intermediate_size == 32
    with pytest.raises(ValueError, match="model must be one of hope, "):
        presets.tiny("mamba")
    with pytest.raises(ValueError, match="mixer='titans' names a model: say model='titans'"):
        presets.tiny(mixer="titans")
    hybrid = presets.tiny(num_hidden_layers=2, mixer=["self_modifying", "attention"])
    assert hybrid.mixer == ["self_modifying", "attention"]
    with pytest.raises(ValueError, match="more than 1000000"):
        presets.tiny(hidden_size=1024)


def test_a_hope_without_a_continuum_memory_has_no_levels_that_learn():
    assert presets.tiny("hope").learns
    assert presets.tiny("hope_attention").learns
    assert not presets.tiny("hope", channel="swiglu").learns
    with pytest.raises(ValueError, match="levels learn in the channel 'cms'"):
        presets.tiny(channel="swiglu", levels=[{"name": "fast", "chunk": 4, "rate": 0.1}])
