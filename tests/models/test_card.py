"""Model cards: written with every saved model and pushed in place of an empty one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from small_models import config_of, model_of

from nestling.models import NestlingForCausalLM, model_card, presets


def test_a_saved_model_has_a_card_that_says_what_it_is(tmp_path):
    model = model_of("hope", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    assert {"nestling", "hope"} <= set(card.data.tags)
    assert card.data.license is None
    assert f"# Hope, {model.num_parameters():,} parameters" in card.text
    assert "fast every 4 tokens; slow every 16 tokens" in card.text
    for heading in ("How it was trained", "How to load it", "Licence"):
        assert f"## {heading}" in card.text


def test_the_lines_of_the_card_load_the_model(tmp_path):
    model = model_of("titans", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    from nestling.models import byte_tokenizer

    byte_tokenizer().save_pretrained(tmp_path)
    code = (tmp_path / "README.md").read_text().split("```python\n")[1].split("```")[0]
    found: dict[str, object] = {}
    exec(code.replace("THIS FOLDER", str(tmp_path)), found)
    assert type(found["model"]) is NestlingForCausalLM
    assert torch.equal(found["model"].lm_head.weight, model.lm_head.weight)


def test_a_card_that_somebody_wrote_stays(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    model_of("hope", dtype=torch.float32).save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


@pytest.mark.parametrize("how", ["push_to_hub", "save_pretrained"])
def test_our_card_is_pushed_where_the_hub_has_none(how, tmp_path, monkeypatch):
    """Both ways to the hub make a card of their own after the model was saved."""
    from huggingface_hub.errors import EntryNotFoundError
    from transformers.utils import hub

    class Api:
        def create_repo(self, repo_id, **options):
            return type("Url", (), {"repo_id": repo_id})()

        def __getattr__(self, name):
            raise AssertionError(name)

    def missing(*args, **kwargs):
        raise EntryNotFoundError("none")

    pushed = {}
    monkeypatch.setattr(hub, "hf_api", lambda: Api())
    monkeypatch.setattr("transformers.modeling_utils.hf_api", lambda: Api())
    monkeypatch.setattr(hub.ModelCard, "load", missing)
    monkeypatch.setattr(
        hub.PushToHubMixin,
        "_upload_modified_files",
        lambda self, folder, repo, *args, **options: pushed.update(
            {repo: Path(folder, "README.md").read_text()}
        ),
    )
    model = model_of("hope", dtype=torch.float32)
    if how == "push_to_hub":
        model.push_to_hub("me/bird")
    else:
        model.save_pretrained(tmp_path / "bird", push_to_hub=True, repo_id="me/bird")
    assert "# Hope, " in pushed["me/bird"]
    assert "automatically generated" not in pushed["me/bird"]


def test_learning_levels_hybrids_and_licences_are_said():
    levels = [{"name": "fast", "chunk": 4, "rate": 0.5}, {"name": "slow", "chunk": None}]
    card = model_card(config_of("hope", levels=levels), training="On birds.", licence="mit")
    what = "levels (learn while it reads, in the last layer): fast every 4 tokens, learning at rate"
    assert f"{what} 0.5" in card
    assert "slow fixed" in card
    assert "license: mit" in card
    assert "On birds." in card
    hybrid = presets.tiny(mixer=["attention", "titans", *["self_modifying"] * 3])
    assert "# A hybrid" in model_card(hybrid)
    assert "levels" not in model_card(config_of("titans"))
