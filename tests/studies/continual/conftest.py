"""A small base model and a data set whose classes it can tell apart, made in a moment."""

from __future__ import annotations

import pytest
import torch

from nestling.models import NestlingForCausalLM, byte_tokenizer, presets
from studies.continual.base import Base
from studies.continual.features import Encoded, Features, label_embeddings

CLASSES = ("cat", "dog", "owl", "eel", "fox", "hen")


def make_base(mixer: str) -> Base:
    torch.manual_seed(1)
    fields = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 24}
    model = NestlingForCausalLM(presets.tiny(mixer, num_attention_heads=2, **fields)).eval()
    return Base(name=mixer, model=model, tokenizer=byte_tokenizer())


@pytest.fixture(scope="session", params=["transformer", "hope"])
def base(request: pytest.FixtureRequest) -> Base:
    return make_base(request.param)


@pytest.fixture(scope="session")
def transformer() -> Base:
    return make_base("transformer")


@pytest.fixture(scope="session")
def features(transformer: Base) -> Features:
    """Gaussian clouds around six centres in 16 dimensions."""
    generator = torch.Generator().manual_seed(3)
    centres = 0.8 * torch.randn(len(CLASSES), 16, generator=generator)

    def split(count: int) -> Encoded:
        y = torch.arange(len(CLASSES)).repeat_interleave(count)
        x = centres[y] + torch.randn(len(y), 16, generator=generator)
        return Encoded(x=x, y=y, texts=tuple(f"{CLASSES[c]} {i}" for i, c in enumerate(y.tolist())))

    labels = label_embeddings(transformer, CLASSES)
    return Features(train=split(40), valid=split(20), test=split(40), labels=labels)
