"""A memory as a PEFT LoRA: existing servers and `peft` itself load it without nestling.

A LoRA adds `B A` to a linear layer's weight, and a memory of low rank is just that. The folder has
the two files `peft` reads, `adapter_config.json` and `adapter_model.safetensors`; with them

    PeftModel.from_pretrained(base_model, folder)

has the logits of the learner.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor
from torch.nn import functional

from nestling.files import write_atomic


class LowRank(NamedTuple):
    """One layer's difference as `b @ a`."""

    a: Tensor  # [R, Di]
    b: Tensor  # [Do, R]


def save_peft(
    folder: Path,
    layers: Mapping[str, LowRank],
    *,
    base: str = "",
    transposed: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write the differences of some linear layers, by module name, as a LoRA of one rank.

    Layers of a lower rank than the highest are filled up with zeros. base: name of the base model.
    transposed: the layers store their weights inputs first (GPT-2).
    """
    if not layers:
        raise ValueError("nothing was learned yet, so there is nothing to export")
    rank = max(layer.a.shape[0] for layer in layers.values())
    tensors = {}
    for name, (a, b) in layers.items():
        room = rank - a.shape[0]
        filled = functional.pad(a, (0, 0, 0, room)), functional.pad(b, (0, room))
        for kind, value in zip(("lora_A", "lora_B"), filled, strict=True):
            stored = value.detach().to("cpu", dtype).contiguous()
            tensors[f"base_model.model.{name}.{kind}.weight"] = stored
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": rank,  # a scale of 1
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "inference_mode": True,
        "target_modules": sorted(layers),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "adapter_model.safetensors", safetensors.torch.save(tensors))
    write_atomic(folder / "adapter_config.json", (json.dumps(config, indent=1) + "\n").encode())
    return folder
