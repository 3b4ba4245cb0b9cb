"""The command as a person meets it."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest
import torch

import nestling
from nestling.cli import COMMANDS, main
from nestling.models import NestlingForCausalLM, presets
from nestling.models.tokenizer import byte_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    config = presets.tiny(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    NestlingForCausalLM(config).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def test_help_is_instant_and_complete(capsys):
    code = "import nestling.cli as c, sys; c.main(['--help']); print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.splitlines()[-1] == "False"
    for name in COMMANDS:
        assert name in said.stdout
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        said_too = capsys.readouterr().out
        assert "example" in said_too or name == "demo"
        assert max(map(len, said_too.splitlines())) <= 104
        command = importlib.import_module(f"nestling.cli.{name}")
        assert all(action.help for action in command.parser()._actions), name


def test_unknown_commands_are_named(capsys):
    assert main(["trian"]) == 2
    assert "unknown command 'trian'; known: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("package", "command"), [("transformers", "demo"), ("rich", "describe"), ("matplotlib", "demo")]
)
def test_a_command_says_what_to_install(package, command, tmp_path):
    """The core alone installs the command too, without what most of its parts need."""
    arguments = {"demo": ["demo", "--steps", "1"], "describe": ["describe", "nestling:small"]}
    code = (
        f"import sys\nsys.modules[{package!r}] = None\n"
        f"from nestling.cli import main\nsys.exit(main({arguments[command]}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    extra = {"matplotlib": "report"}.get(package, "lm")
    assert done.returncode == 2
    assert done.stderr == f"nestling {command}: needs {package}: pip install 'nestling[{extra}]'\n"


def test_generate_writes_and_is_repeatable(folder, capsys):
    texts = []
    for _ in range(2):
        assert main(["generate", str(folder), "--prompt", "Day", "--tokens", "12"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("Day")


def test_eval_measures_a_file(folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("In the valley of Mor there lived a baker. " * 5)
    out = tmp_path / "loss.json"
    assert main(["eval", str(folder), str(text), "--bins", "3", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["tokens"] == len(text.read_text())
    assert len(found["bins"]) == 3
    assert f"loss {found['loss']:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "/nowhere/model"], "/nowhere/model: cannot load a model: there is no such"),
        (["generate", "runs/tiny/model"], "there is no such folder (a name on the hub is NAME or"),
        (["eval", "/nowhere/model"], "give a file to read, or --tasks"),
        (["eval", "/nowhere/model", "/nowhere/text"], "/nowhere/text: no such file"),
        (["train", "tinny"], "recipe must be one of tiny, stream, "),
        (["demo", "--steps", "0"], "must be at least 1"),
    ],
)
def test_mistakes_get_one_line(arguments, said, capsys):
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_the_package_is_the_command():
    said = subprocess.run(
        [sys.executable, "-m", "nestling", "--version"], capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == nestling.__version__
