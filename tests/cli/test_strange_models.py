"""Models from strangers: complete or refused, measured before they are built, never run."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nestling.adaptation import load_pretrained
from nestling.adaptation.pretrained import check_gguf, load_llama2c, load_llama2c_tokenizer
from nestling.cli import main
from nestling.models import NestlingForCausalLM, presets
from nestling.models.tokenizer import byte_tokenizer

SIZES = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "whole"
    torch.manual_seed(0)
    config = presets.tiny("transformer", vocab_size=259, intermediate_size=16, **SIZES)
    NestlingForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def model(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def change_weights(folder: Path, change) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def change_config(folder: Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def refused(folder: Path, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_pretrained(folder)


def test_every_missing_weight_is_noticed(whole, tmp_path):
    loaded, _ = load_pretrained(whole)
    assert torch.isfinite(loaded(torch.tensor([[1, 2]])).logits).all()
    names = list(load_file(whole / "model.safetensors"))
    for number, name in enumerate(names):
        folder = Path(shutil.copytree(whole, tmp_path / str(number)))
        change_weights(folder, lambda weights, name=name: weights.pop(name))
        refused(folder, "weights are incomplete: missing")
    made, _ = load_pretrained(folder, strict=False)
    assert all(torch.isfinite(weight).all() for weight in made.parameters())


def test_weights_that_do_not_belong_are_refused(model):
    change_weights(model, lambda weights: weights.update(extra=torch.zeros(3)))
    refused(model, "weights the model does not have: .*extra")


def test_weights_of_another_shape_or_not_finite_are_refused(model):
    name = "model.norm.weight"
    change_weights(model, lambda weights: weights.update({name: torch.ones(3)}))
    refused(model, "cannot load a model")
    change_weights(model, lambda weights: weights.update({name: torch.full((16,), torch.nan)}))
    refused(model, f"{name} holds a number that is not finite")


def test_eval_never_prints_a_loss_that_is_none(model, tmp_path, capsys):
    change_weights(model, lambda w: w.update({"model.norm.weight": torch.full((16,), torch.inf)}))
    (tmp_path / "text.txt").write_text("some words to read")
    assert main(["eval", str(model), str(tmp_path / "text.txt")]) == 2
    said = capsys.readouterr()
    assert "loss" not in said.out
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_hidden_layers": 300_000}, "num_hidden_layers must be from 0 to 2048"),
        ({"num_hidden_layers": 2000}, "but its files hold"),
        ({"hidden_size": 1 << 19}, "but its files hold"),
        ({"vocab_size": 1 << 24}, "but its files hold"),
        ({"vocab_size": -1}, "vocab_size must be from 0"),
        ({"hidden_size": "16"}, "hidden_size must be from 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be from 0"),
        ({"model_type": "unheard_of"}, "cannot load a model"),
    ],
    ids=str,
)
def test_a_configuration_cannot_ask_for_more_than_the_folder_holds(model, fields, said):
    change_config(model, **fields)
    refused(model, said)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_pipe_or_a_device_in_a_folder_is_not_read(model, name):
    (model / name).unlink()
    os.mkfifo(model / name)
    refused(model, "not a regular file")
    (model / name).unlink()
    (model / name).symlink_to("/dev/zero")
    refused(model, "not a regular file")


def test_nested_json_is_refused(model):
    (model / "config.json").write_text("[" * 200_000)
    refused(model, "not a JSON file")


def test_a_models_own_code_runs_only_when_trusted(model, tmp_path):
    mark = tmp_path / "ran"
    (model / "own.py").write_text(
        f"open({str(mark)!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class Own(LlamaConfig): model_type = 'own'\n"
        "class OwnLM(LlamaForCausalLM): config_class = Own\n"
    )
    code = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnLM"}
    change_config(model, model_type="own", auto_map=code)
    for command in (["generate", str(model), "--prompt", "-"], ["describe", str(model)]):
        done = subprocess.run(
            [sys.executable, "-m", "nestling.cli", *command],
            input="y\nhello\n",
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
        assert not mark.exists()


# llama2.c and GGUF

HEADER = struct.Struct("<7i")


def llama(path: Path, *header: int, floats: int = 100) -> Path:
    path.write_bytes(HEADER.pack(*header) + bytes(4 * floats))
    return path


@pytest.mark.parametrize(
    "header",
    [
        (1 << 20, 1 << 20, 1000, 8, 8, 1 << 20, 1 << 20),
        (8, 8, 2_000_000, 2, 2, 8, 8),
        (8, 8, 1, 2, 2, 8, 2_000_000_000),
        (8, 8, 1, 3, 2, 8, 8),
        (8, 8, 1, 2, 3, 8, 8),
        (8, 8, 1, 8, 8, 8, 8),
        (0, 0, 0, 0, 0, 0, 0),
        (8, 8, 1, 2, 2, 0, 8),
        (-8, 8, 1, 2, 2, 8, 8),
    ],
    ids=str,
)
def test_a_llama2c_header_is_measured_before_a_model_is_built(tmp_path, header):
    with pytest.raises(ValueError, match=r"header|the file is cut"):
        load_llama2c(llama(tmp_path / "m.bin", *header))


def test_a_llama2c_file_of_nan_is_refused(tmp_path):
    count = 1 * (2 * 8 + 2 * 64 + 2 * 64 + 3 * 64) + 8 + 8 * 4 + 8 * 8
    path = llama(tmp_path / "m.bin", 8, 8, 1, 2, 2, 8, 8, floats=count)
    load_llama2c(path)
    path.write_bytes(path.read_bytes()[:-4] + struct.pack("<f", float("nan")))
    with pytest.raises(ValueError, match="not finite"):
        load_llama2c(path)


def test_a_long_token_is_refused(tmp_path):
    path = tmp_path / "tok.bin"
    path.write_bytes(struct.pack("<i", 0) + struct.pack("<fi", 0.0, 1 << 20) + bytes(1 << 20))
    with pytest.raises(ValueError, match="a token of 1048576 bytes"):
        load_llama2c_tokenizer(path)


def gguf(*, tensors: int = 1, settings: bytes = b"", count: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, count) + settings + rest


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


NAMED = text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")
TENSOR = text(b"w") + struct.pack("<IQIQ", 1, 4, 0, 0)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GGUF",
        b"GGML" + bytes(40),
        gguf(tensors=1 << 40),
        gguf(count=1 << 40),
        gguf(count=1, settings=text(b"a") + struct.pack("<I", 99)),
        gguf(count=1, settings=struct.pack("<Q", 1 << 60)),
        gguf(count=1, settings=text(b"a") + struct.pack("<IIQ", 9, 8, 1 << 22)),
        gguf(count=1, settings=text(b"a") + struct.pack("<IIQ", 9, 4, 1 << 60)),
        gguf(count=1, settings=text(b"a") + struct.pack("<IIQ", 9, 9, 1) * 40),
        gguf(count=1, settings=NAMED, rest=text(b"w") + struct.pack("<I", 9)),
        gguf(count=1, settings=NAMED, rest=text(b"w") + struct.pack("<IQIQ", 1, 1 << 50, 0, 0)),
        gguf(count=1, settings=NAMED, rest=text(b"w") + struct.pack("<IQIQ", 1, 4, 0, 1 << 50)),
        gguf(count=0, rest=TENSOR),
    ],
)
def test_a_gguf_header_is_walked_through_first(tmp_path, data):
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(ValueError, match="not a proper GGUF file"):
        check_gguf(path)
    with pytest.raises(ValueError, match=r"m\.gguf: cannot load a model"):
        load_pretrained(path)


def test_a_gguf_tensor_without_weights_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    empty = TENSOR.replace(struct.pack("<IQ", 1, 4), struct.pack("<IQ", 1, 0))
    assert empty != TENSOR
    path.write_bytes(gguf(count=1, settings=NAMED, rest=empty + bytes(64)))
    with pytest.raises(ValueError, match="a tensor without weights"):
        check_gguf(path)


def test_a_proper_gguf_header_passes(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf(count=1, settings=NAMED, rest=TENSOR + bytes(64)))
    check_gguf(path)
    os.truncate(path, 30)
    with pytest.raises(ValueError, match="beyond the end"):
        check_gguf(path)
