"""The trained models that come with the package, loaded."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoTokenizer

from nestling.models.modeling import NestlingForCausalLM
from nestling.pretrained import find


def pretrained(
    name: str = "small", *, dtype: torch.dtype = torch.float32
) -> tuple[NestlingForCausalLM, Any]:
    """A model that comes with the package, ready to generate, and its tokenizer.

    name: "small"; commands take the same model as `nestling:small`.
    """
    folder = find(name)
    model = NestlingForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    return model, AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
