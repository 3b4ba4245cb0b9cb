"""Randomly initialised decoders of a few thousand parameters, one of each family."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gpt2")
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "mistral": MistralConfig,
    "gemma": GemmaConfig,
}


def tiny(family: str = "llama", *, seed: int = 0, vocab: int = 64) -> Any:
    """A model of three layers, width 16, hidden width 24; large enough weights to matter."""
    special = {"bos_token_id": 1, "eos_token_id": 2}
    if family == "gpt2":
        config: Any = GPT2Config(
            vocab_size=vocab,
            n_embd=16,
            n_layer=3,
            n_head=2,
            n_inner=24,
            n_positions=512,
            initializer_range=0.3,
            **special,
        )
    else:
        config = CONFIGS[family](
            vocab_size=vocab,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            max_position_embeddings=512,
            initializer_range=0.3,
            **special,
        )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    return model.requires_grad_(False)
