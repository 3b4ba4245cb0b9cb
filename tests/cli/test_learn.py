"""`nestling learn` and `nestling generate --memory`, as a person meets them."""

from __future__ import annotations

import gzip
import html
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nestling.adaptation import Learner, load_learner, load_pretrained
from nestling.cli import main
from nestling.files import locked
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


LEVELS = ["--chunks", "16,64,256", "--rate", "0.2"]


def test_learning_and_writing_with_a_memory(model, text, tmp_path, capsys):
    memory = str(tmp_path / "memory")
    out = tmp_path / "timeline.html"
    learns = ["learn", model, "--from", text, *LEVELS, "--memory", memory]
    assert main([*learns, "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert "Learner over LlamaForCausalLM at position" in said.out
    assert "text.txt: 3,744 tokens read" in said.err  # four passes
    assert "loss on the text" in said.err
    assert "on the model's own text" in said.err
    page = out.read_text()
    told = html.escape(next(line for line in said.err.splitlines() if "loss on the text" in line))
    assert page.index(told) < page.index("<svg")  # the result comes first
    assert "middle" in page
    assert "figure svg { width: 100%" in page  # no horizontal scroll
    assert page.count("<th>") == 4  # level, chunk, updates, and one number
    numbers = re.findall(r"drift ([0-9.]+%)", page)
    assert len(numbers) == 3  # the picture and the table say the same
    assert all(f"<td>{number}</td>" in page for number in numbers)
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


def test_the_page_says_which_level_only_receives(model, text, tmp_path, capsys):
    """By default the slow one: "learns every 512 tokens" beside a fast one of drift 0 puzzled."""
    command = ["learn", model, "--from", text, "--passes", "1"]
    for name, options, receives in (("default", [], True), ("own", LEVELS, False)):
        out = tmp_path / f"{name}.html"
        memory = ["--memory", str(tmp_path / name), "--out", str(out)]
        assert main([*command, *options, *memory]) == 0
        assert ("<td>receives every " in out.read_text()) is receives
        assert ("that one lets go of it" in out.read_text()) is receives


def test_slow_learning_says_where_it_is(model, text, tmp_path, capsys, monkeypatch):
    """Where there is no terminal, a line comes after a while, not only after many tokens."""
    assert main(["learn", str(model), "--from", str(text), "--memory", str(tmp_path / "a")]) == 0
    quick = capsys.readouterr().err.count(" tokens  loss ")
    monkeypatch.setattr("nestling.cli.learn._Bar.seconds", 0.0)
    assert main(["learn", str(model), "--from", str(text), "--memory", str(tmp_path / "b")]) == 0
    assert capsys.readouterr().err.count(" tokens  loss ") > quick


def test_a_text_shorter_than_a_chunk_is_learned_and_a_single_token_is_said_to_be_lost(
    model, tmp_path, capsys
):
    (note := tmp_path / "note.txt").write_text("Only a line.")
    learns = ["learn", model, "--from", str(note), "--memory"]
    assert main([*learns, str(tmp_path / "long")]) == 0
    said = capsys.readouterr().err
    assert "nothing was learned" not in said
    assert "note.txt: 48 tokens read, 4 updates" in said
    assert main([*learns, str(tmp_path / "none"), "--tokens", "1"]) == 1
    assert "note.txt: nothing was learned" in capsys.readouterr().err


def test_a_text_that_is_refused_ends_with_1_and_is_named(model, text, tmp_path, capsys):
    memory = str(tmp_path / "memory")
    bad = tmp_path / "bad.txt"
    bad.write_text("q7!zX" * 60)
    learns = ["learn", model, "--memory", memory, "--from"]
    assert main([*learns, text, *LEVELS]) == 0
    base, _ = load_pretrained(model)
    ids = torch.arange(3, 60)[None]
    before = load_learner(base, memory)(ids).logits
    capsys.readouterr()
    assert main([*learns, str(bad), "--forget", "0.0001"]) == 1
    said = capsys.readouterr().err
    assert "alarm:" in said
    assert "bad.txt: refused; the memory is as it was before this text" in said
    assert torch.equal(load_learner(base, memory)(ids).logits, before)


def test_a_memory_in_use_is_not_learned_into(model, text, tmp_path, capsys):
    memory = tmp_path / "memory"
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with locked(memory):
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    try:
        code = main(["learn", model, "--from", text, "--memory", str(memory), *LEVELS])
    finally:
        done.set()
        thread.join()
    said = capsys.readouterr()
    assert code == 2
    assert f"{memory} is in use by" in said.err
    assert len(said.err.splitlines()) == 1
    assert not list(memory.iterdir())


def test_undo_and_export_from_the_command_line(model, text, tmp_path, capsys):
    peft = pytest.importorskip("peft")
    memory, lora = str(tmp_path / "memory"), tmp_path / "lora"
    assert main(["learn", model, "--from", text, "--memory", memory, "--export", str(lora)]) == 0
    base, _ = load_pretrained(model)
    ids = torch.arange(3, 60)[None]
    learned = load_learner(base, memory)(ids).logits
    with torch.no_grad():
        exported = peft.PeftModel.from_pretrained(load_pretrained(model)[0], lora).eval()(ids)
    assert torch.allclose(exported.logits, learned, atol=2e-5)
    assert main(["learn", model, "--memory", memory, "--undo", "text.txt"]) == 0
    undone = load_learner(base, memory)(ids).logits
    with torch.no_grad():
        plain = base(ids).logits
    assert float((undone - plain).abs().max()) < 0.1 * float((learned - plain).abs().max())
    capsys.readouterr()
    assert main(["learn", model, "--memory", memory, "--undo", "text.txt"]) == 2
    assert "no text 'text.txt' that can be undone" in capsys.readouterr().err


def test_eval_with_a_memory(model, text, tmp_path, capsys):
    memory = str(tmp_path / "memory")
    main(["learn", model, "--from", text, *LEVELS, "--memory", memory])
    capsys.readouterr()
    assert main(["eval", model, text, "--bins", "1"]) == 0
    plain = float(capsys.readouterr().out.split("loss ")[1].split(",")[0])
    assert main(["eval", model, text, "--bins", "1", "--memory", memory]) == 0
    said = capsys.readouterr().out
    assert float(said.split("loss ")[1].split(",")[0]) < plain - 0.5
    assert f"without the memory: loss {plain:.4f}" in said


def test_texts_may_be_compressed_and_must_be_texts(model, text, tmp_path, capsys):
    """A file of other bytes would be read as if it were a text, and get a loss."""
    packed = tmp_path / "text.txt.gz"
    packed.write_bytes(gzip.compress(Path(text).read_bytes()))
    said = []
    for path in (text, str(packed)):
        assert main(["eval", model, path, "--bins", "1"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    memory = str(tmp_path / "memory")
    assert main(["learn", model, "--from", str(packed), *LEVELS, "--memory", memory]) == 0
    capsys.readouterr()
    (tmp_path / "wrong.txt").write_bytes(packed.read_bytes())
    (tmp_path / "torn.gz").write_bytes(packed.read_bytes()[:-9])
    for name, reason in (("wrong.txt", "not a text in UTF-8"), ("torn.gz", "cannot be unpacked")):
        assert main(["eval", model, str(tmp_path / name)]) == 2
        assert f"{name}: {reason}" in capsys.readouterr().err


def test_eval_asks_for_the_facts_of_a_file(model, tmp_path, capsys):
    path = tmp_path / "facts.txt"
    path.write_text("The baker of the valley is called Anselm. He was born in Mor in 1812. " * 8)
    memory = str(tmp_path / "memory")
    main(["learn", model, "--from", str(path), *LEVELS, "--memory", memory])
    said = capsys.readouterr()
    assert "the model writes a sample of its own" in said.err
    assert main(["eval", model, str(path), "--memory", memory, "--facts", "--limit", "6"]) == 0
    said = capsys.readouterr().out
    right, asked = (int(said.split("facts: ")[1].split()[place]) for place in (0, 2))
    plain = int(said.split("without the memory: ")[2].split()[0])
    assert 0 <= plain < right <= asked <= 6
    assert main(["eval", model, "--tasks", "x", "--facts"]) == 2
    assert "--facts asks about a file" in capsys.readouterr().err
    path.write_text("nothing here.")
    assert main(["eval", model, str(path), "--facts"]) == 2
    assert "no names, dates or numbers" in capsys.readouterr().err


def test_running_again_continues_the_memory(model, text, tmp_path, capsys):
    memory, other = tmp_path / "memory", tmp_path / "other.txt"
    other.write_text(OTHER)
    main(["learn", model, "--from", text, *LEVELS, "--memory", str(memory)])
    base, _ = load_pretrained(model)
    position = load_learner(base, memory).position
    assert position >= 4 * (len(TEXT) - 1)  # four passes
    svg = tmp_path / "timeline.svg"
    again = ["learn", model, "--from", str(other), "--memory", str(memory)]
    assert main([*again, "--out", str(svg)]) == 0
    assert f"goes on with {memory} at position {position:,}" in capsys.readouterr().err
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


def test_a_stopped_run_goes_on_to_the_passes_it_was_given(model, text, tmp_path, monkeypatch):
    other = tmp_path / "other.txt"
    other.write_text(OTHER)
    files = ["--from", text, str(other), "--save-every", "300"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    main(["learn", model, *files, *LEVELS, "--passes", "1", "--memory", str(whole)])
    save = Learner.save

    def stopped(*given, **options):
        save(*given, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "save", stopped)
        assert main(["learn", model, *files, *LEVELS, "--passes", "1", "--memory", str(cut)]) == 130
    assert main(["learn", model, *files, "--memory", str(cut)]) == 0
    base, _ = load_pretrained(model)
    assert load_learner(base, cut).position == load_learner(base, whole).position


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--chunks", "64,x"], "--chunks: must be a whole number; got 'x'"),
        (["--rate", "fast"], "--rate: must be a number"),
        (["--rate", "0.1,0.2,0.3"], "rate: one for all levels or 2"),
        (["--rule", "sdg"], "rule must be one of natural, gd"),
        (["--chunks", "512,64"], "rising order; got [512, 64]"),
        (["--passes", "0"], "--passes: must be at least 1"),
        (["--out", "nodir/x.html"], "--out: there is no folder nodir"),
        (["--layers", "last"], "layers must be None"),
        (["--layers", "0,9"], "the model has layers 0 to 1"),
        (["--tokens", "0"], "--tokens: must be at least 1"),
        (["--out", "timeline.png"], "--out: must end in .html or .svg"),
        (["--drift", "0"], "--drift: must be a finite number above 0"),
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
    assert "no memory is saved there" in fails("generate", model, "--memory", str(memory))
    main(["learn", model, "--from", text, "--memory", str(memory)])
    capsys.readouterr()
    said = fails("learn", model, "--from", text, "--memory", str(memory), "--rate", "0.3")
    assert "has its own settings; leave out --rate" in said
    manifest = memory / "memory.json"
    manifest.write_text(manifest.read_text().replace('"natural"', '"artless"'))
    assert "was altered" in fails("generate", model, "--memory", str(memory))
