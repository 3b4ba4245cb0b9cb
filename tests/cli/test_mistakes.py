"""Wrong command lines: exit code 2, one line, nothing done."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from nestling.cli import main
from tests.scripts import benchmark

mistakes = benchmark("mistakes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("mistakes")
    mistakes.prepare(made)
    return made


def test_wrong_lines_end_in_one_line_and_change_nothing(folder, monkeypatch):
    """Each has one mistake beside a model, a text and a memory that are right."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    lines = mistakes.lines()
    assert len(lines) >= 400
    bad = [(line, said) for line, said in mistakes.run_here(folder, lines) if said]
    assert not bad, bad[:5]


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        ((0, "", "nestling: x", False), "exit code 0"),
        ((2, "", "usage\nnestling: x", False), "2 lines"),
        ((2, "", "", False), "0 lines"),
        ((2, "done", "nestling: x", False), "it printed"),
        ((2, "", "nestling: x", True), "files were changed"),
        ((2, "", "nestling: x", False), ""),
    ],
)
def test_a_line_that_ends_otherwise_is_counted(ended, said):
    assert mistakes.wrong(*ended).startswith(said)
    assert bool(mistakes.wrong(*ended)) == bool(said)


@pytest.mark.parametrize("line", [["train"], ["train", "huge"], ["cost", "tiny", "--rows", "x"]])
def test_what_argparse_and_what_we_find_is_one_line(line, capsys):
    assert main(line) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert said.err.startswith(f"nestling {line[0]}: ")


def test_a_timeline_that_cannot_be_written_is_refused_before_learning(folder, capsys):
    """It used to fail after learning, and the corrected command learned everything twice."""
    line = ["learn", str(folder / "model"), "--from", str(folder / "text.txt"), "--memory"]
    assert main([*line, str(folder / "new"), "--out", str(folder / "nodir" / "x.html")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert not (folder / "new").exists()


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


def test_an_interrupt_while_a_command_is_imported_is_quiet(monkeypatch, capsys):
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    try:
        assert main(["train", "tiny"]) == 130
    except KeyboardInterrupt:  # which would end all tests
        pytest.fail("the interrupt went through")
    said = capsys.readouterr()
    assert said.out == said.err == ""
