"""Wrong command lines: exit code 2, one line, nothing done."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nestling.cli import main

LINES = [
    "train tiny run.micro=0",
    "train tiny run.patience=0",
    "train tiny model.preset=Size",
    "train tiny model.preset=configure",
    "train tiny model.fields.hidden_size=x",
    "train tiny model.fields.hidden_sizes=8",
    "train tiny model.fields.levels=3",
    "train tiny model.fields.levels=[3]",
    "train tiny data.train=hf:",
    "train tiny data.train=",
    "train tiny data.train=builtin:9-3",
    "train tiny data.tokenizer=bpe:99999999999999999999",
    "train tiny optim.clip=-1",
    "train tiny optim.clip=nan",
    "train tiny optim.lr=inf",
    "train tiny optim.lr=-1",
    "train tiny optim.shape=flat",
    "train tiny --show run.stepz=3",
    "train huge",
    "train tiny run",
    "cost tiny --length 0",
    "cost tiny --gpus 0",
    "cost tiny --tokens nan",
    "cost tiny --utilisation 2",
    "cost tiny --mixer x",
    "cost huge",
    "eval nowhere",
    "eval nowhere text.txt --tokens -5",
    "eval nowhere text.txt --bins 0",
    "eval nowhere text.txt --out nodir/x.json",
    "eval nowhere --tasks ,",
    "eval nowhere text.txt",
    "generate nowhere --tokens 0",
    "generate nowhere --temperature nan",
    "generate nowhere --top-p 0",
    "generate nowhere --seed -1",
    "generate nowhere --memory nomemory",
    "generate nowhere",
    "learn nowhere --from text.txt --memory m --out nodir/x.html",
    "learn nowhere --from text.txt --memory m --limit nan",
    "learn nowhere --from text.txt --memory m --tokens 0",
    "learn nowhere --from nofile.txt --memory m",
    "describe nowhere",
    "describe hope --out nodir/x.svg",
    "describe hope --out x.png",
    "describe hope --optimizer Optimizer",
    "describe hope --optimizer nothing",
    "unknown",
]


@pytest.mark.parametrize("line", LINES)
def test_a_wrong_line_ends_in_one_line_and_changes_nothing(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("words")
    assert main(line.split()) == 2
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 1, said.err
    assert said.err.startswith("nestling")
    assert said.out == ""
    assert os.listdir(tmp_path) == ["text.txt"]


@pytest.mark.parametrize(
    "line",
    [
        ["learn", "m", "--from", "text.txt", "--memory", ""],
        ["generate", "m", "--memory", " "],
        ["generate", "m", "--readout", "x"],
        ["generate"],
        ["train", "--out"],
    ],
    ids=" ".join,
)
def test_arguments_that_cannot_be_read_end_with_2(line, capsys):
    with pytest.raises(SystemExit) as ended:
        main(line)
    assert ended.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_an_empty_task_is_named(capsys):
    assert main(["eval", "nowhere", "--tasks", ""]) == 2
    assert "--tasks names tasks" in capsys.readouterr().err


def test_options_and_changes_may_stand_in_any_order(capsys):
    assert main(["train", "tiny", "--show", "run.steps=3"]) == 0
    assert "run.steps=3" in capsys.readouterr().out


def test_level_names_are_not_read_as_markup(capsys):
    from rich.console import Console

    from nestling.description import describe
    from nestling.models import NestlingForCausalLM, presets

    levels = [{"name": "[/red]", "chunk": 4}, {"name": "[bold]x", "chunk": 8}]
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = NestlingForCausalLM(presets.tiny("hope", vocab_size=9, levels=levels, **sizes))
    Console(force_terminal=True, width=200).print(describe(model))
    assert "[/red]" in capsys.readouterr().out


def command(*line: str, **options) -> subprocess.Popen:
    start = [sys.executable, "-m", "nestling.cli", *line]
    return subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def test_a_reader_that_leaves_is_no_error():
    process = command("--help")
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 0
    assert errors == b""


def test_a_prompt_that_is_not_utf8_is_named():
    process = command("generate", "nowhere", "--prompt", b"\xff\xfe")
    _, errors = process.communicate()
    assert process.returncode == 2
    assert b"--prompt is not valid UTF-8" in errors
    assert b"Traceback" not in errors
