"""Randomly initialised decoders of a few thousand parameters, one of each family."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    GemmaConfig,
    GPT2Config,
    GPTJConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    MptConfig,
    OlmoeConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
)

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gpt2")
OTHERS = ("falcon", "gptj", "mpt", "mixtral", "olmoe", "qwen2_moe")
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "mistral": MistralConfig,
    "gemma": GemmaConfig,
}


SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3}
WIDE = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
EXPERTS = {"intermediate_size": 24, "max_position_embeddings": 512, "num_experts_per_tok": 2}


def other(family: str, *, seed: int = 0, vocab: int = 64) -> Any:
    """A model of three layers whose MLPs are built or named in a way of their own."""
    shared = {"vocab_size": vocab, **SPECIAL}
    configs: dict[str, Any] = {
        "falcon": lambda: FalconConfig(**WIDE, ffn_hidden_size=24, **shared),
        "gptj": lambda: GPTJConfig(
            n_embd=16, n_layer=3, n_head=2, n_inner=24, n_positions=512, rotary_dim=4, **shared
        ),
        "mpt": lambda: MptConfig(d_model=16, n_layers=3, n_heads=2, max_seq_len=512, **shared),
        "mixtral": lambda: MixtralConfig(
            **WIDE, **EXPERTS, num_key_value_heads=1, num_local_experts=4, **shared
        ),
        "olmoe": lambda: OlmoeConfig(
            **WIDE, **EXPERTS, num_key_value_heads=2, num_experts=4, **shared
        ),
        "qwen2_moe": lambda: Qwen2MoeConfig(
            **WIDE,
            **EXPERTS,
            num_key_value_heads=1,
            num_experts=4,
            moe_intermediate_size=12,
            shared_expert_intermediate_size=24,
            **shared,
        ),
    }
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(configs[family]()).eval().requires_grad_(False)


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
