"""`nestling learn` and `nestling generate --memory`, as a person meets them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nestling.adaptation import load_learner, load_pretrained
from nestling.cli import main
from nestling.models.tokenizer import byte_tokenizer

TEXT = "In the valley of Mor there lived a baker who knew the names of all the winds. " * 12
OTHER = "Seven ships went north, and the eighth came home with snow in its sails. " * 6


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


LEVELS = ["--levels", "16,64,256", "--rate", "0.2"]


def test_learning_and_writing_with_a_memory(model, text, tmp_path, capsys):
    memory = str(tmp_path / "memory")
    out = tmp_path / "timeline.html"
    learns = ["learn", model, "--from", text, *LEVELS, "--memory", memory]
    assert main([*learns, "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert "Learner over LlamaForCausalLM at position" in said.out
    assert "loss" in said.err
    assert "<svg" in out.read_text()
    assert "middle" in out.read_text()
    base, tokenizer = load_pretrained(model)
    learner = load_learner(base, memory, tokenizer=tokenizer)
    learned = learner.score(TEXT[:200])
    learner.reset()
    assert learned < learner.score(TEXT[:200]) - 0.5
    writes = ["generate", model, "--prompt", "In the", "--tokens", "12", "--temperature", "0"]
    assert main([*writes, "--memory", memory]) == 0
    with_memory = capsys.readouterr().out
    assert main(writes) == 0
    assert capsys.readouterr().out != with_memory


def test_a_text_shorter_than_a_chunk_is_said_to_be_lost(model, tmp_path, capsys):
    (note := tmp_path / "note.txt").write_text("Only a line.")
    learns = ["learn", model, "--from", str(note)]
    assert main([*learns, "--memory", str(tmp_path / "long")]) == 0
    assert "note.txt: nothing was learned" in capsys.readouterr().err
    assert main([*learns, "--levels", "4", "--memory", str(tmp_path / "short")]) == 0
    assert "nothing was learned" not in capsys.readouterr().err


def test_running_again_continues_the_memory(model, text, tmp_path, capsys):
    memory, other = tmp_path / "memory", tmp_path / "other.txt"
    other.write_text(OTHER)
    main(["learn", model, "--from", text, *LEVELS, "--memory", str(memory)])
    svg = tmp_path / "timeline.svg"
    again = ["learn", model, "--from", str(other), "--memory", str(memory)]
    assert main([*again, "--out", str(svg)]) == 0
    assert f"goes on with {memory} at position {len(TEXT) - 1:,}" in capsys.readouterr().err
    base, _ = load_pretrained(model)
    positions = [change.position for change in load_learner(base, memory).history]
    assert positions == sorted(positions)
    assert positions[0] == 16
    assert positions[-1] > len(TEXT)
    assert "<svg" in svg.read_text()
    main(again)
    assert "learning it once more" in capsys.readouterr().err


def test_a_killed_run_goes_on_bit_for_bit(model, text, tmp_path, capsys):
    other = tmp_path / "other.txt"
    other.write_text(OTHER)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    options = ["--from", text, str(other), "--save-every", "100"]
    main(["learn", model, *options, *LEVELS, "--memory", str(whole)])
    learns = ["learn", model, *options, *LEVELS, "--memory", str(cut)]
    process = subprocess.Popen([sys.executable, "-m", "nestling.cli", *learns])
    while not (cut / "memory.json").exists() and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    capsys.readouterr()
    assert main(["learn", model, *options, "--memory", str(cut)]) == 0
    base, _ = load_pretrained(model)
    ids = torch.arange(3, 60)[None]
    one, two = (load_learner(base, folder) for folder in (whole, cut))
    assert torch.equal(one(ids).logits, two(ids).logits)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--levels", "64,x"], "--levels: whole numbers with commas between"),
        (["--rate", "fast"], "--rate: a number"),
        (["--rate", "0.1,0.2"], "rate: one for all levels or 3"),
        (["--rule", "sdg"], "rule must be a Rule or one of gd"),
        (["--layers", "last"], "layers must be None"),
        (["--layers", "0,9"], "the model has layers 0 to 1"),
        (["--tokens", "0"], "--tokens must be at least 1"),
        (["--out", "timeline.png"], "--out must end in .html or .svg"),
        (["--limit", "0"], "drift must be a number above 0"),
    ],
)
def test_mistakes_get_one_line(model, text, tmp_path, arguments, said, capsys):
    memory = tmp_path / "memory"
    assert main(["learn", model, "--from", text, "--memory", str(memory), *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert not memory.exists()


def test_wrong_files_and_memories_get_one_line(model, text, tmp_path, capsys):
    memory = tmp_path / "memory"
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")

    def fails(*arguments: str) -> str:
        assert main(list(arguments)) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        return err

    assert "no such file" in fails("learn", model, "--from", "none.txt", "--memory", str(memory))
    assert "an empty file" in fails("learn", model, "--from", str(empty), "--memory", str(memory))
    assert "not a text" in fails("learn", model, "--from", sys.executable, "--memory", str(memory))
    assert "cannot load" in fails("learn", "x.gguf", "--from", text, "--memory", str(memory))
    assert "no such folder" in fails("generate", model, "--memory", str(memory))
    main(["learn", model, "--from", text, "--memory", str(memory)])
    capsys.readouterr()
    said = fails("learn", model, "--from", text, "--memory", str(memory), "--rate", "0.3")
    assert "has its own settings; leave out --rate" in said
    manifest = memory / "memory.json"
    manifest.write_text(manifest.read_text().replace('"gd"', '"dg"'))
    assert "was altered" in fails("generate", model, "--memory", str(memory))
