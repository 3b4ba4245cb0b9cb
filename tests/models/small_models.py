"""Small models of every kind, and random tokens, for the tests of this folder."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from nestling.models import NestlingConfig, NestlingForCausalLM, presets
from nestling.models.specs import MIXERS

VOCABULARY = 13
CHUNK = 4
MODELS = tuple(presets.MODELS)


def config_of(name: str, **given: Any) -> NestlingConfig:
    """A model of two layers, width 16, with chunks of 4 tokens where it has chunks."""
    parts = presets.MODELS[name]
    known = {f.name for f in fields(MIXERS[parts["mixer"]][0])}
    options = {key: CHUNK for key in ("chunk", "chunk_others") if key in known}
    own = parts.get("mixer_options", {}).get(parts["mixer"], {})
    base: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "levels": [{"name": "fast", "chunk": 4}, {"name": "slow", "chunk": 16}],
        "initializer_range": 1.0,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    mixed = {"mixer_options": {parts["mixer"]: own | options}}
    return NestlingConfig(**{**parts, **base, **mixed, **given})


def model_of(name: str, dtype: torch.dtype = torch.float64, **given: Any) -> NestlingForCausalLM:
    """The small model with weights that make every part matter."""
    torch.manual_seed(1)
    return NestlingForCausalLM(config_of(name, **given)).to(dtype).eval()


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (batch, length), generator=random)
