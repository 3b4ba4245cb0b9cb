"""`nestling describe`: our models and others by name, any optimizer, table, JSON and picture."""

from __future__ import annotations

import inspect
import json

import pytest
from transformers import BertConfig, LlamaConfig

from nestling.cli import main
from nestling.models import NestlingForCausalLM, presets
from nestling.optim import M3, param_groups


def test_a_table_and_a_picture(tmp_path, capsys):
    out = tmp_path / "x.html"
    assert main(["describe", "hope", "--optimizer", "M3", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    chunk = inspect.signature(M3).parameters["chunk"].default
    assert f"every {chunk} steps" in text
    assert "M3.slow" in text
    assert "<svg" in out.read_text()


def test_the_model_says_which_matrices_are_orthogonalised(capsys):
    """Embeddings and vectors alone have a first moment: a list of parameters would not tell."""
    assert main(["describe", "transformer", "--optimizer", "M3", "--json"]) == 0
    levels = json.loads(capsys.readouterr().out)["levels"]
    state = {c["name"]: c["state"] for level in levels for c in level["components"]}
    model = NestlingForCausalLM(presets.tiny("transformer"))
    rest = next(g for g in param_groups(model) if not g["orthogonal"])["params"]
    assert state["M3.first"] == sum(p.numel() for p in rest)


def test_json_of_a_model_folder(tmp_path, capsys):
    LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=100,
        num_attention_heads=2,
        vocab_size=32,
    ).save_pretrained(tmp_path)
    assert main(["describe", str(tmp_path), "--optimizer", "AdamW", "--json"]) == 0
    levels = json.loads(capsys.readouterr().out)["levels"]
    assert [level["every"] for level in levels] == ["every step", "every step", "every token"]
    assert levels[-1]["components"][0]["copies"] == 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such/model"], "no such model; it is no folder here; --download asks the hub"),
        (["hop"], "hop: no such model; did you mean hope?"),
        (["/"], "the folder holds no model"),
        (["hope", "--optimizer", "Nope"], "neither nestling.optim nor torch.optim has it"),
        (["hope", "--out", "x.png"], "must end in .svg or .html"),
    ],
)
def test_mistakes_end_in_one_line(arguments, message, capsys):
    assert main(["describe", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_a_mistyped_name_never_asks_the_network(monkeypatch, capsys):
    """With the hub allowed, a wrong name still ends at once: no socket is opened."""
    import socket

    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "create_connection", lambda *a, **k: pytest.fail("asked the net"))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: pytest.fail("asked the net"))
    assert main(["describe", "someone/llamma-7b"]) == 2
    assert "someone/llamma-7b: no such model" in capsys.readouterr().err


def test_a_model_without_a_language_head_is_described_too(tmp_path, capsys):
    BertConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        vocab_size=32,
        architectures=["BertModel"],
    ).save_pretrained(tmp_path)
    assert main(["describe", str(tmp_path), "--optimizer", "AdamW"]) == 0
    assert "layer.0-2" in capsys.readouterr().out
