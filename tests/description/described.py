"""Small models that the tests of `describe` look at."""

from __future__ import annotations

from transformers import LlamaConfig, LlamaForCausalLM

import nestling
from nestling.models.presets import tiny


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
    options = {"self_modifying": {"chunk": 8, "chunk_others": 8}, "steered": {"steering": 4}}
    config = tiny(name, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, **fields)
    config.mixer_options = options
    return nestling.NestlingForCausalLM(config)


def names(description):
    return [[c.name for c in level.components] for level in description.levels]


def weights(description):
    return sum(c.parameters for c in description.components)
