"""Loss of a stream: every token judged once, given what the model may see of it."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from nestling.evaluate.lm import loss_by_position, token_losses
from nestling.models import NestlingForCausalLM, presets


@pytest.fixture(scope="module")
def hope():
    torch.manual_seed(0)
    config = presets.tiny(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    return NestlingForCausalLM(config).eval()


def full(model, ids):
    logits = model(torch.tensor([ids])).logits[0, :-1]
    return functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none").detach()


def test_a_streamed_loss_is_the_loss_of_one_pass(hope):
    ids = torch.randint(256, (130,)).tolist()
    torch.testing.assert_close(
        token_losses(hope, ids, piece=37), full(hope, ids), atol=1e-4, rtol=0
    )


def test_windows_judge_every_token_once():
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(50, (90,)).tolist()
    losses = token_losses(model, ids)
    assert len(losses) == 89
    torch.testing.assert_close(losses[:31], full(model, ids[:32]), atol=1e-5, rtol=0)
    again = full(model, ids[16:48])  # the second window starts half a window back
    torch.testing.assert_close(losses[31:47], again[15:], atol=1e-5, rtol=0)


def test_bins_average_to_the_loss(hope):
    ids = torch.randint(256, (101,)).tolist()
    result = loss_by_position(hope, ids, bins=4)
    assert [b[:2] for b in result.bins] == [(0, 25), (25, 50), (50, 75), (75, 100)]
    assert math.isclose(sum(b[2] for b in result.bins) / 4, result.loss, rel_tol=1e-5)
    assert math.isclose(result.perplexity, math.exp(result.loss))


def test_mistakes_are_named(hope):
    with pytest.raises(ValueError, match="at least 2 tokens; got 1"):
        token_losses(hope, [1])
    with pytest.raises(ValueError, match="no state to carry on"):
        token_losses(hope, [1, 2, 3], window=2, state=object())
