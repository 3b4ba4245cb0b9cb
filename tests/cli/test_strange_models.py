"""Models from strangers: complete or refused, measured before they are built, never run."""

from __future__ import annotations

import ast
import contextlib
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
from nestling.models import NestlingConfig, NestlingForCausalLM, presets
from nestling.models.tokenizer import byte_tokenizer
from nestling.train.tokenizer import check_tokenizer
from tests.scripts import benchmark

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


def test_a_buffer_that_is_not_finite_is_refused(tmp_path):
    """Natural steps divide by second moments, which are saved as buffers."""
    levels = [{"name": "fast", "chunk": 4, "rate": 0.5}]
    sizes = {**SIZES, "vocab_size": 259, "intermediate_size": 8}
    made = NestlingForCausalLM(
        NestlingConfig(mixer="deltanet", levels=levels, natural=True, **sizes)
    )
    moments = [key for key, _ in made.named_buffers() if key in made.state_dict()]
    assert moments
    made.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    load_pretrained(tmp_path)
    change_weights(tmp_path, lambda weights: weights[moments[0]].fill_(torch.nan))
    refused(tmp_path, f"{moments[0]} holds a number that is not finite")


def test_eval_never_prints_a_loss_that_is_none(model, tmp_path, capsys):
    """Every weight is finite, what they make is not."""

    def enlarge(weights):
        for key, weight in weights.items():
            if weight.dim() == 2 and not any(part in key for part in ("mixer", "embed", "lm_head")):
                weight.fill_(1e17)

    change_weights(model, enlarge)
    loaded, _ = load_pretrained(model)
    assert not torch.isfinite(loaded(torch.tensor([[1, 2]])).logits).all()
    capsys.readouterr()
    (tmp_path / "text.txt").write_text("some words to read")
    assert main(["eval", str(model), str(tmp_path / "text.txt")]) == 2
    said = capsys.readouterr()
    assert "loss" not in said.out
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"vocab_size": -1}, "vocab_size must be from 0"),
        ({"num_hidden_layers": 300_000}, "num_hidden_layers must be from 0 to 2048"),
        ({"num_hidden_layers": 2000}, "but its files hold"),
        ({"hidden_size": 1 << 19}, "but its files hold"),
        ({"vocab_size": 1 << 24}, "but its files hold"),
        ({"hidden_size": "16"}, "hidden_size must be from 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be from 0"),
        ({"model_type": "gpt2", "n_layer": 300_000}, "n_layer must be from 0 to 2048"),
        ({"text_config": {"num_hidden_layers": 300_000}}, "text_config.num_hidden_layers must be"),
        ({"levels": [{"name": "a", "chunk": 1}] * 300}, "at most 64 levels; got 300"),
        ({"model_type": "unheard_of"}, "cannot load a model"),
    ],
    ids=str,
)
def test_a_configuration_cannot_ask_for_more_than_the_folder_holds(model, fields, said):
    change_config(model, **fields)
    refused(model, said)


def test_describe_builds_nothing_that_is_not_sensible(model, capsys):
    change_config(model, vocab_size=1 << 25)  # which costs nothing if it is built after all
    assert main(["describe", str(model)]) == 2
    assert "vocab_size must be from 0 to 16777216; got 33554432" in capsys.readouterr().err
    change_config(model, num_hidden_layers=300_000)
    assert main(["describe", str(model)]) == 2
    assert "num_hidden_layers must be from 0 to 2048; got 300000" in capsys.readouterr().err
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    assert main(["describe", str(model)]) == 2
    assert "not a regular file" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_pipe_or_a_device_in_a_folder_is_not_read(model, name):
    (model / name).unlink()
    os.mkfifo(model / name)
    refused(model, "not a regular file")
    (model / name).unlink()
    (model / name).symlink_to("/dev/zero")
    refused(model, "not a regular file")


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "vocab.txt"])
def test_settings_larger_than_any_are_not_read(model, name):
    (model / name).touch()
    os.truncate(model / name, 1 << 40)  # a hole: no disk, but a terabyte to read
    refused(model, f"{name}: 1099511627776 bytes; at most 67108864 are read")


@pytest.mark.parametrize("how", ["pipe", "hole", "nested", "other"])
def test_the_folder_of_a_tokenizer_is_measured_first(model, how):
    path = model / "tokenizer.json"
    if how == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif how == "hole":
        os.truncate(path, 1 << 40)
    else:
        path.write_text("[" * 100_000 if how == "nested" else '{"model": 3}')
    with pytest.raises(ValueError, match=r"expected bytes, bpe:SIZE, or the folder of a tokenizer"):
        check_tokenizer(str(model))


def test_nested_json_is_refused(model):
    (model / "config.json").write_text("[" * 200_000)
    refused(model, "not a JSON file")


OWN = """
open({mark!r}, 'a').close()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Own(LlamaConfig): model_type = 'own'
class OwnLM(LlamaForCausalLM): config_class = Own
class OwnTokenizer(PreTrainedTokenizerFast): pass
"""


def bring_code(folder: Path, kind: str) -> Path:
    """Let a folder come with Python code; returns the file that exists once that has run."""
    mark = folder.parent / "ran"
    (folder / "own.py").write_text(OWN.format(mark=str(mark)))
    code = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnLM", "AutoModel": "own.OwnLM"}
    if kind == "tokenizer":  # the configuration is as it should be
        path = folder / "tokenizer_config.json"
        own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
        path.write_text(json.dumps(json.loads(path.read_text()) | own))
    elif kind == "model":
        change_config(folder, model_type="own", auto_map=code)
    else:  # a configuration transformers knows, of no language model it knows
        change_config(folder, model_type=kind, auto_map=code)
    return mark


@pytest.fixture
def asked(monkeypatch, tmp_path) -> list[str]:
    """The questions that were asked on standard input; whoever asks is told yes."""
    from transformers import dynamic_module_utils

    questions: list[str] = []
    monkeypatch.setattr("builtins.input", lambda said="": questions.append(said) or "y")
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    return questions


@pytest.mark.parametrize("kind", ["model", "tokenizer", "clip_text_model"])
def test_a_models_own_code_never_runs_untrusted(model, kind, asked, capsys):
    mark = bring_code(model, kind)
    refused(model, "code")
    memory = str(model.parent / "memory")
    text = model.parent / "text.txt"
    text.write_text("some words to read")
    lines = [
        ["generate", str(model)],
        ["eval", str(model), str(text)],
        ["learn", str(model), "--from", str(text), "--memory", memory],
    ]
    if kind == "tokenizer":  # which only training reads without the model
        with pytest.raises(ValueError, match="code"):
            check_tokenizer(str(model))
        lines.append(["train", "tiny", "--out", memory, f"data.tokenizer={model}"])
    else:
        lines.append(["describe", str(model)])
    for line in lines:  # AutoModel knows a CLIPTextModel of its own, which is shown
        assert main(line) == 2 or (line[0] == "describe" and kind != "model"), line
    assert not asked
    assert not mark.exists()
    assert "Traceback" not in capsys.readouterr().err


def test_a_tokenizers_code_beside_a_gguf_never_runs_untrusted(model, asked):
    pytest.importorskip("gguf")
    mark = bring_code(model, "tokenizer")
    benchmark("fuzz").make_gguf(model)
    with contextlib.suppress(ValueError):
        load_pretrained(model / "m.gguf")
    assert not asked
    assert not mark.exists()


@pytest.mark.parametrize("kind", ["model", "tokenizer"])
def test_a_models_own_code_runs_when_trusted(model, kind, asked):
    """So what the tests above refuse would have run."""
    mark = bring_code(model, kind)
    with contextlib.suppress(ValueError):  # its weights are another model's
        load_pretrained(model, trust_remote_code=True)
    assert mark.exists()
    assert not asked


def test_nobody_is_asked_on_standard_input(model):
    """The whole command in a process of its own, with a yes waiting on standard input."""
    mark = bring_code(model, "model")
    done = subprocess.run(
        [sys.executable, "-m", "nestling.cli", "generate", str(model), "--prompt", "-"],
        input="y\nhello\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert not mark.exists()


def test_every_loader_says_whether_code_may_run():
    """`Auto*.from_pretrained` and `from_config` ask on standard input when nothing is said."""
    root = Path(__file__).parents[2]
    silent = []
    for path in [*(root / "src").rglob("*.py"), *(root / "studies").rglob("*.py")]:
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            whose = call.func.value
            auto = isinstance(whose, ast.Name) and whose.id.startswith("Auto")
            said = {keyword.arg for keyword in call.keywords}
            asks = auto and call.func.attr in ("from_pretrained", "from_config")
            if asks and not said & {"trust_remote_code", None}:  # None: pretrained.py's **options
                silent.append(f"{path.relative_to(root)}:{call.lineno}")
    assert not silent


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
        gguf(tensors=0, count=1, settings=NAMED),
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


SMALL = {"block_count": 1, "embedding_length": 64, "feed_forward_length": 64}
BOMBS = {
    "usual": ({}, "declares 6,607,343,616 parameters, but its files hold"),
    "small": (SMALL, "parameters, but its files hold"),
    "layers": ({"block_count": 300_000}, "num_hidden_layers must be from 0 to 2048; got 300000"),
    "context": ({"context_length": 1 << 28}, "max_position_embeddings must be from 0 to"),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_gguf_cannot_ask_for_more_than_it_holds(tmp_path, kind):
    pytest.importorskip("gguf")
    sizes, said = BOMBS[kind]
    sizes = {"context_length": 8, "attention.head_count": 4, **sizes}
    parts = [text(b"llama." + k.encode()) + struct.pack("<II", 4, v) for k, v in sizes.items()]
    settings = NAMED + b"".join(parts)
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf(count=1 + len(sizes), settings=settings, rest=TENSOR + bytes(64)))
    check_gguf(path)
    with pytest.raises(ValueError, match=said):
        load_pretrained(path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.json"])
def test_what_lies_beside_a_gguf_is_measured_too(tmp_path, name):
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf(count=1, settings=NAMED, rest=TENSOR + bytes(64)))
    beside = tmp_path / name
    beside.touch()
    os.truncate(beside, (64 << 20) + 1)
    with pytest.raises(ValueError, match=f"{name}: 67108865 bytes; at most 67108864 are read"):
        load_pretrained(path)
    beside.unlink()
    os.mkfifo(beside)
    with pytest.raises(ValueError, match=f"{name}: not a regular file"):
        load_pretrained(path)


def test_a_proper_gguf_header_passes(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf(count=1, settings=NAMED, rest=TENSOR + bytes(64)))
    check_gguf(path)
    os.truncate(path, 30)
    with pytest.raises(ValueError, match="beyond the end"):
        check_gguf(path)
