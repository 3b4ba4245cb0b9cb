"""The trained model that comes with the package."""

from __future__ import annotations

import torch

from nestling.cli import main
from nestling.losses import pair_losses
from nestling.models import pretrained
from nestling.pretrained import HOME, names

TEXT = (
    "It is a truth which nobody in the village would have denied, that the old doctor had been"
    " seen upon the road that evening, and that he had spoken to no one."
)


@torch.no_grad()
def test_it_has_learned_english_and_learns_on():
    assert names() == ["nestling:small"]
    assert sum(path.stat().st_size for path in (HOME / "small").iterdir()) < 10_000_000
    model, tokenizer = pretrained()
    assert model.learns
    assert not model.config.learns_in_training
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    assert float(pair_losses(model(ids).logits[:, :-1], ids[:, 1:]).mean()) < 1.9
    again = torch.cat([ids] * 6, 1)  # longer than the chunks of its levels
    losses = {
        learn: pair_losses(model(again, learn=learn).logits[:, :-1], again[:, 1:])[:, -200:].mean()
        for learn in (True, False)
    }
    assert losses[True] < losses[False]


def test_it_writes_words():
    model, tokenizer = pretrained()
    ids = tokenizer("It was", return_tensors="pt").input_ids
    torch.manual_seed(0)
    out = model.generate(ids, max_new_tokens=120, do_sample=True, temperature=0.5, pad_token_id=256)
    words = tokenizer.decode(out[0], skip_special_tokens=True).lower().split()
    common = {"the", "a", "and", "of", "to", "in", "he", "she", "it", "was", "had", "that", "his"}
    assert len(common & set(words)) >= 3


def test_it_is_described_by_its_name(capsys):
    assert main(["describe", "nestling:small"]) == 0
    assert "fast" in capsys.readouterr().out
    assert main(["describe", "nestling:large"]) == 2
    assert "there are: nestling:small" in capsys.readouterr().err
