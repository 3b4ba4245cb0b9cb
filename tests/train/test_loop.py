"""Real runs in real processes: killed, stopped, poisoned, and split over two processes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from nestling.train.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from nestling.train.recipe import get_recipe
from nestling.train.trainer import _same_run

SMALL = [
    "model.fields.hidden_size=32",
    "model.fields.num_hidden_layers=1",
    "model.fields.num_attention_heads=2",
    "model.fields.intermediate_size=32",
    "data.train=builtin:6",
    "data.valid=builtin:6-7",
    "data.length=32",
    "run.rows=4",
    "run.steps=12",
    "run.eval_every=6",
    "run.eval_windows=4",
    "run.save_every=2",
]


def start(out: Path, *changes: str, processes: int = 1, recipe: str = "tiny") -> subprocess.Popen:
    cache = f"data.cache={out.parent / 'cache'}"
    launch = [sys.executable]
    if processes > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [*launch, "-m", "nestling.cli", "train", recipe, *SMALL, cache, *changes]
    return subprocess.Popen(
        [*command, "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finish(process: subprocess.Popen) -> tuple[int, str]:
    said, _ = process.communicate(timeout=300)
    return process.returncode, said


def train(out: Path, *changes: str, **options) -> dict[str, torch.Tensor]:
    code, said = finish(start(out, *changes, **options))
    assert code == 0, said
    return load_file(out / "model" / "model.safetensors")


def assert_same(a, b, **tolerance):
    assert a.keys() == b.keys()
    for name in a:
        if tolerance:
            torch.testing.assert_close(a[name], b[name], msg=name, **tolerance)
        else:
            assert torch.equal(a[name], b[name]), name


def test_killed_runs_continue_bit_for_bit(tmp_path):
    """With M3 on levels of different chunks, micro-batches and carried memories; killed twice."""
    changes = ["optim.name=m3", "optim.lr=0.01", "run.micro=2", "optim.chunks=1,2,3"]
    whole = train(tmp_path / "whole", *changes, recipe="stream")
    out, rng = tmp_path / "killed", random.Random(0)
    for _ in range(2):
        process = start(out, *changes, recipe="stream")
        before = [p.name for p in checkpoints(out / "checkpoints")]
        while process.poll() is None:
            if [p.name for p in checkpoints(out / "checkpoints")] != before:
                break
            time.sleep(0.01)
        time.sleep(rng.random() * 0.1)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert_same(train(out, *changes, recipe="stream"), whole)
    drawn = (out / "timeline.svg").read_text()
    assert drawn == (tmp_path / "whole" / "timeline.svg").read_text()
    assert all(f"{12 // chunk} updates" in drawn for chunk in (1, 2, 3))


def test_a_signal_saves_and_the_same_command_goes_on(tmp_path):
    number = signal.SIGTERM
    long = ["run.steps=100000", "run.save_every=100000", "run.eval_every=100000"]
    out = tmp_path / "run"
    process = start(out, *long)
    metrics = out / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text()) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(number)
    code, said = finish(process)
    assert code == 143, said
    assert "the same command goes on from there" in said
    (saved,) = checkpoints(out / "checkpoints")
    step = load_checkpoint(saved).step
    process = start(out, *long)
    while len(metrics.read_text().splitlines()) < 4 and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    code, said = finish(process)
    assert code == 130, said
    assert f"continuing from step {step}" in said


def test_a_poisoned_loss_changes_nothing_and_stops_the_run(tmp_path):
    out = tmp_path / "run"
    settings = ("run.max_bad=3", "run.keep=1", "optim.shape=constant", "optim.warmup=0")
    code, said = finish(start(out, *settings, "run.save_every=1", "run.steps=2"))
    assert code == 0, said
    (good,) = checkpoints(out / "checkpoints")
    poison = (*settings, "optim.lr=1e37", "run.steps=9")
    code, said = finish(start(out, *poison, "run.save_every=2"))
    assert code == 1
    assert said.count("skipped, nothing changed") == 3
    assert "3 steps in a row" in said
    assert "Traceback" not in said
    code, said = finish(start(out, *poison, "run.save_every=1"))
    assert code == 1
    assert "nothing was saved" in said
    assert checkpoints(out / "checkpoints") == [good], "the last good one is still there"
    code, said = finish(start(out, *settings, "run.steps=3"))
    assert code == 0, said
    assert "continuing from step 2" in said
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["loss"] > 0


def test_a_checkpoint_with_numbers_that_are_none_is_not_continued(tmp_path):
    out = tmp_path / "run"
    train(out, "run.steps=2")
    state = load_checkpoint(checkpoints(out / "checkpoints")[-1])
    states = state.states
    for weight in states["model"].values():
        weight[:] = float("nan")
    save_checkpoint(out / "checkpoints", 3, states, state.facts, keep=5)
    code, said = finish(start(out, "run.steps=9"))
    assert code == 2
    assert "holds a number that is not finite" in said
    assert "Traceback" not in said


def test_a_second_run_in_the_same_folder_is_refused(tmp_path):
    out = tmp_path / "run"
    first = start(out, "run.steps=100000")
    while first.poll() is None and not checkpoints(out / "checkpoints"):
        time.sleep(0.05)
    try:
        code, said = finish(start(out, "run.steps=1"))  # which is over at once if it may run
        assert code == 2, said
        assert f"{out} is in use by process {first.pid}" in said
        assert len(said.splitlines()) == 1
        first.send_signal(signal.SIGTERM)
        assert finish(first)[0] == 143
    finally:
        first.kill()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("run.stepz=3", "unknown key 'run.stepz'; did you mean run.steps?"),
        ("run.steps=many", "run.steps must be a int; got 'many'"),
        ("run.steps=0", "run.steps must be at least 1"),
        ("run.micro=0", "run.micro must be at least 1; got 0"),
        ("run.patience=0", "run.patience must be at least 1; got 0"),
        ("run.max_bad=0", "run.max_bad must be at least 1; got 0"),
        ("run.sample_every=0", "run.sample_every must be at least 1; got 0"),
        ("run.seed=-1", "run.seed must be at least 0; got -1"),
        ("optim.clip=-1", "optim.clip must be a finite number above 0, or none; got -1.0"),
        ("optim.clip=nan", "optim.clip must be a finite number above 0, or none; got nan"),
        ("optim.clip=inf", "optim.clip must be a finite number above 0, or none; got inf"),
        ("optim.lr=inf", "optim.lr must be above 0 and at most 1e+37; got inf"),
        ("optim.lr=nan", "optim.lr must be above 0 and at most 1e+37; got nan"),
        ("optim.weight_decay=nan", "optim.weight_decay must be a finite number from 0; got nan"),
        ("optim.floor=nan", "floor"),
        ("optim.chunks=0,1,1,1", "optim.chunks must be at least 1 each"),
        ("data.train=", "data.train must name at least one source"),
        ("data.train=hf:", "hf:NAME"),
        (
            "model.preset=Size",
            "model.preset must be one of tiny, small, base, ",
        ),
        ("model.fields.hidden_size=x", "model.fields: "),
        ("model.fields.levels=3", "model.fields: "),
        ("model.fields.levels=" + "[" * 100_000, "model.fields: "),
        ("optim.options.x=" + "[" * 900 + "]" * 900, "optim.options for adamw: "),
        ("data.train=/nowhere/x.txt", "no such file or folder"),
        ("model.name=hop", "model.name must be one of"),
        ("model.mixer=hope", "did you mean model.name?"),
        ("optim.name=adam", "optim.name must be one of"),
        ("optim.lr=3e38", "optim.lr must be above 0 and at most 1e+37; got 3e+38"),
        ("optim.chunks=1,2", "one number for each of the 3 levels"),
        ("model.fields.vocab_size=17", "smaller than the tokenizer's vocabulary of 259"),
        ("data.order=random", "data.order must be one of shuffled, documents, sequential"),
        ("data.tokenizer=bpe:7", "bpe:SIZE with a size of at least 260"),
    ],
)
def test_mistakes_get_one_clear_line(tmp_path, change, said, capsys):
    from nestling.cli import main

    cache = f"data.cache={tmp_path}"
    assert main(["train", "tiny", *SMALL, cache, change, "--out", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


def test_another_model_does_not_continue_a_run(tmp_path):
    out = tmp_path / "run"
    train(out, "run.steps=2")
    code, said = finish(start(out, "run.steps=4", "model.fields.hidden_size=64"))
    assert code == 2
    assert "give the new run its own folder" in said


def test_a_checkpoint_of_an_earlier_version_is_of_the_same_run(tmp_path):
    """What was `model.mixer` is read as `model.name`."""
    recipe = get_recipe("tiny")
    old = recipe.to_json()
    old["model"]["mixer"] = old["model"].pop("name")
    _same_run(SimpleNamespace(facts={"recipe": old}), recipe, tmp_path)
    old["model"] = {**old["model"], "mixer": "titans"}
    del old["model"]["name"]
    with pytest.raises(ValueError, match=r"model\.name='titans', not 'hope'"):
        _same_run(SimpleNamespace(facts={"recipe": old}), recipe, tmp_path)
