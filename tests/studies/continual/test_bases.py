"""Bases: pooled places of encoders and causal models, kept by the hash of the text."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

from studies.continual.bases import Base, load_base

TEXTS = ("an owl at night", "a cat", "two eels in a river", "hen")


class Letters:
    """A tokenizer of letters."""

    def __call__(self, texts, truncation, max_length):
        assert truncation
        ids = [[1 + ord(c) % 60 for c in text][:max_length] for text in texts]
        return type("Out", (), {"input_ids": ids})


def make_base(causal: bool, **changes) -> Base:
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}
    if causal:
        model = LlamaModel(LlamaConfig(num_attention_heads=2, **shape))
    else:
        model = BertModel(BertConfig(num_attention_heads=2, **shape))
    fields = {"name": f"b{causal}", "causal": causal, "layers": 2, "length": 12, **changes}
    return Base(load=lambda: (model, Letters()), **fields)


@pytest.fixture(params=[False, True], ids=["encoder", "causal"])
def base(request) -> Base:
    return make_base(request.param)


def test_places_are_the_models_own_hidden_states_pooled(base):
    model, tokenizer = base.parts
    ids = torch.tensor(tokenizer(TEXTS[:1], truncation=True, max_length=12).input_ids)
    with torch.no_grad():
        states = model(input_ids=ids, output_hidden_states=True).hidden_states[-2:]
    end = -1 if base.causal else 0
    wanted = [pool for x in states for pool in (x.mean(1), x[:, end], x.amax(1))]
    made = base.encode(TEXTS[:1]).float()
    assert made.shape == (1, len(base.places), 16)
    assert torch.allclose(made[0], torch.cat(wanted), atol=2e-3)
    assert base.places == ["mean -2", "end -2", "max -2", "mean -1", "end -1", "max -1"]


def test_company_and_padding_change_nothing(base):
    together = base.encode(TEXTS).float()
    for i, text in enumerate(TEXTS):
        assert torch.allclose(base.encode([text]).float()[0], together[i], atol=2e-3)


def test_what_is_kept_is_not_read_again(base, tmp_path, monkeypatch):
    told: list[tuple[int, int]] = []
    first = base.features(TEXTS[:3], tmp_path, lambda *counts: told.append(counts))
    assert told == [(3, 3)]
    more = base.features(TEXTS, tmp_path, lambda *counts: told.append(counts))
    assert told[1:] == [(1, 1)]  # only what was missing
    monkeypatch.setattr(Base, "encode", pytest.fail)
    assert torch.equal(base.features((*TEXTS[:3], TEXTS[0]), tmp_path)[:3], first)
    assert torch.equal(more[:3], first)


def test_a_broken_file_is_computed_again(base, tmp_path):
    first = base.features(TEXTS, tmp_path)
    (file,) = tmp_path.rglob("*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:-3] + b"abc")
    told: list[int] = []
    again = base.features(TEXTS, tmp_path, lambda done, _: told.append(done))
    assert told == [4]
    assert torch.equal(again, first)


def test_other_lengths_are_other_features(tmp_path):
    short, long = make_base(False, length=4), make_base(False, length=12)
    assert not torch.equal(short.features(TEXTS, tmp_path), long.features(TEXTS, tmp_path))


def test_a_base_can_learn(base):
    """Gradients reach the base's weights: it need not be frozen."""
    _, ids, mask = next(base.tokens(TEXTS))
    base.read(ids, mask).float().square().sum().backward()
    assert all(p.grad is not None for n, p in base.parts[0].named_parameters() if ".mlp." in n)
    assert any(p.grad is not None for p in base.parts[0].parameters())


def test_minilm_is_the_sentence_model_it_claims_to_be():
    """Its last mean tells like sentences from unlike ones."""
    base = load_base("minilm")
    texts = ("How do I get a new card?", "My card has not arrived yet.", "Whales are mammals.")
    x = torch.nn.functional.normalize(base.encode(texts)[:, 9].float(), dim=1)
    assert base.places[9] == "mean -1"
    near, far = float(x[0] @ x[1]), float(x[0] @ x[2])
    assert near > 0.3 > far


def test_unknown_bases_are_named():
    with pytest.raises(ValueError, match="unknown base 'bert'; known: minilm, smollm2"):
        load_base("bert")
