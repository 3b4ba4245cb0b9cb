"""Tiny random language models of several families, and slots on them."""

from __future__ import annotations

import pytest
import torch

from nestling.continuum import Part, Slot

SMALL = {
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}


def build(family: str, **options):
    import transformers as hf

    from nestling.models import NestlingConfig, NestlingForCausalLM

    torch.manual_seed(0)
    sizes = {**SMALL, **options}
    if family == "gpt2":
        sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 512, **options}
        config = hf.GPT2Config(vocab_size=32, bos_token_id=0, eos_token_id=1, **sizes)
        return hf.GPT2LMHeadModel(config).eval()
    if family == "hope":
        chunks = options.get("levels", [{"name": "fast", "chunk": 4}, {"name": "slow", "chunk": 8}])
        config = NestlingConfig(
            vocab_size=32,
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=8,
            levels=chunks,
            mixer=options.get("mixer", "self_modifying"),
            mixer_options=options.get("mixer_options", {"self_modifying": {"chunk": 4}}),
            topology=options.get("topology", "chain"),
        )
        return NestlingForCausalLM(config).eval()
    names = {
        "llama": (hf.LlamaConfig, hf.LlamaForCausalLM, {}),
        "qwen2": (hf.Qwen2Config, hf.Qwen2ForCausalLM, {}),
        "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM, {"head_dim": 4}),
        "mistral": (hf.MistralConfig, hf.MistralForCausalLM, {"sliding_window": 6, "head_dim": 4}),
        "gemma": (hf.GemmaConfig, hf.GemmaForCausalLM, {"head_dim": 4}),
        "gemma2": (hf.Gemma2Config, hf.Gemma2ForCausalLM, {"head_dim": 4, "sliding_window": 6}),
    }
    config, model, extra = names[family]
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    return model(config(**{**special, **extra, **sizes})).eval()


def mlp_names(model):
    return [n for n, p in model.named_parameters() if p.dim() == 2 and (".mlp" in n)]


def share(model, count: int):
    """Every level on every matrix."""
    return [Slot(n, tuple(Part(level) for level in range(count))) for n in mlp_names(model)]


def split(model, hidden: int):
    """Hidden units over two levels: rows of what opens an MLP, columns of what closes it."""
    slots = []
    for name in mlp_names(model):
        axis = 1 if "down" in name or "c_proj" in name else 0
        parts = (Part(0, axis, 0, hidden // 3), Part(1, axis, hidden // 3, hidden))
        slots.append(Slot(name, parts))
    return slots


def by_layer(model, count: int):
    """Each matrix belongs to one level."""
    return [Slot(n, (Part(i % count),)) for i, n in enumerate(mlp_names(model))]


@pytest.fixture(scope="session")
def make():
    return build


@pytest.fixture(scope="session")
def layout():
    return {"share": share, "split": split, "layers": by_layer}


@pytest.fixture
def ids():
    return torch.randint(0, 32, (1, 41), generator=torch.Generator().manual_seed(1))
