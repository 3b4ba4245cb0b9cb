"""Bad configurations fail at once, with a message that names the field and what is allowed."""

from __future__ import annotations

import pytest
import torch
from small_models import MODELS, config_of, model_of

from nestling.levels import Level
from nestling.models import NestlingConfig, NestlingForCausalLM

BAD = {
    "heads do not divide": ({"num_attention_heads": 3}, "multiple of num_attention_heads=3"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads must be at least 1"),
    "unknown mixer": ({"mixer": "selfmodifying"}, "mixer must be one of attention, .*selfmod"),
    "unknown channel": ({"channel": "mlp"}, "channel must be one of cms, .*got 'mlp'"),
    "unknown option": (
        {"mixer_options": {"steered": {"chunks": 2}}},
        "no option chunks; it has .*chunk",
    ),
    "option of a mixer that is not there": (
        {"mixer_options": {"selfmod": {}}},
        "mixer_options are given by the mixer's name, as in",
    ),
    "unknown option of another mixer": (
        {"mixer_options": {"self_modifying": {"chunks": 2}}},
        "no option chunks; it has .*chunk_others",
    ),
    "chunk 0": ({"mixer_options": {"steered": {"chunk": 0}}}, "chunk must be .*got 0"),
    "level chunk 0": ({"levels": [{"name": "fast", "chunk": 0}]}, "chunk must be .*got 0"),
    "level without chunk": ({"levels": [{"name": "fast"}]}, "a name and a chunk"),
    "a level that is a number": (
        {"levels": [512]},
        r"a name and a chunk, as in \{'name': 'fast', 'chunk': 512\}, and .*; got 512",
    ),
    "options without the mixer": (
        {"mixer_options": {"chunk": 32}},
        r"as in mixer_options=\{'steered': \{'chunk': 32\}\}; got \{'chunk': 32\}",
    ),
    "a model for a mixer": ({"mixer": "hope"}, r"presets.tiny\(model='hope'\)"),
    "no levels": ({"levels": []}, "at least one level"),
    "level twice": ({"levels": [{"name": "a", "chunk": 2}] * 2}, "different names"),
    "unknown topology": ({"topology": "tree"}, "topology must be one of chain, parallel"),
    "unknown activation": ({"activation": "gelo"}, "activation must be one of"),
    "list of mixers too short": ({"mixer": ["attention"]}, "one per layer"),
    "typo": ({"num_hidden_layer": 2}, "did you mean 'num_hidden_layers'"),
    "no vocabulary": ({"vocab_size": 0}, "vocab_size must be at least 1"),
    "no width": ({"intermediate_size": 0}, "intermediate_size must be at least 1"),
    "odd in-context width": (
        {"channel": "in_context", "intermediate_size": 7},
        "must divide the in-context",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_configuration_says_what_is_wrong(name):
    fields, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        config_of("hope", **fields)


def test_a_configuration_spoiled_later_is_refused_by_the_model():
    config = config_of("hope")
    config.num_attention_heads = 3
    with pytest.raises(ValueError, match="multiple of"):
        NestlingForCausalLM(config)


def test_another_vocabulary_is_refused_before_loading(tmp_path):
    model_of("hope", torch.float32).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="vocab_size=13; it cannot be loaded with vocab_size=14"):
        NestlingForCausalLM.from_pretrained(tmp_path, vocab_size=14)


def test_levels_are_recorded_as_levels():
    config = NestlingConfig(levels=[{"name": "fast", "chunk": 8}, {"name": "still", "chunk": None}])
    assert config.level_list == (
        Level(name="fast", chunk=8),
        Level(name="still", chunk=float("inf")),
    )
    assert NestlingForCausalLM(config).model.layers[0].channel.levels == config.level_list


def test_hybrids_by_a_list_per_layer():
    config = config_of("hope", mixer=["self_modifying", "attention"], channel=["cms", "swiglu"])
    kinds = [type(layer.mixer).__name__ for layer in NestlingForCausalLM(config).model.layers]
    assert kinds == ["SelfModifying", "Attention"]


@pytest.mark.parametrize("name", MODELS)
def test_a_configuration_survives_json(name, tmp_path):
    config = config_of(name)
    config.save_pretrained(tmp_path)
    assert NestlingConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()
