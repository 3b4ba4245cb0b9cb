"""A run reports itself: lines in a log, a bar in a terminal, JSON lines, TensorBoard files."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys

import pytest

from nestling.train.progress import Progress, preparing


def report(folder, out, steps=20):
    with Progress(steps, folder, out=out) as progress:
        for step in range(1, steps + 1):
            progress.step(step, 64, {"loss": 3.0 - step / 10, "lr": 0.1, "gradient_norm/fast": 1})
        progress.record(steps, {"validation_loss": 1.25, "sample": "Day 1"})
        progress.say("saved")


def test_a_log_gets_plain_lines_and_metrics_lie_beside_it(tmp_path):
    out = io.StringIO()
    report(tmp_path, out)
    said = out.getvalue().splitlines()
    assert [line.split("  ")[0] for line in said] == [
        "step 1/20",
        "step 10/20",
        "step 20/20",
        "saved",
    ]
    assert "loss 2.0000" in said[1]
    assert "tokens/s" in said[1]
    assert said[1].endswith(" left")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 10, 20, 20]
    assert rows[1]["loss"] == 2.0
    assert rows[-1] == {"step": 20, "validation_loss": 1.25, "sample": "Day 1"}


def test_the_time_left_is_that_of_the_whole_run_not_of_its_last_steps(tmp_path, monkeypatch):
    clock = iter([0.0, 1.0, 10.0, 1010.0, 1020.0])  # a pause between steps 10 and 20
    monkeypatch.setattr("nestling.train.progress.time.perf_counter", lambda: next(clock))
    out = io.StringIO()
    with Progress(30, tmp_path, out=out) as progress:
        for step in range(1, 31):
            progress.step(step, 64, {"loss": 1.0})
    left = [line.split("  ")[-1] for line in out.getvalue().splitlines()]
    assert left == ["0:29 left", "0:20 left", "8:25 left", "0:00 left"]


@pytest.mark.filterwarnings("ignore")  # the packages' own
def test_tensorboard_reads_the_same_figures(tmp_path):
    pytest.importorskip(
        "tensorboard", reason="needs tensorboard: pip install nestling[tensorboard]"
    )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    report(tmp_path, io.StringIO())
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    names = {"loss", "lr", "gradient_norm/fast", "tokens_per_second", "validation_loss"}
    assert set(events.Tags()["scalars"]) == names
    assert [(e.step, round(e.value, 4)) for e in events.Scalars("loss")] == [
        (1, 2.9),
        (10, 2.0),
        (20, 1.0),
    ]


def test_without_tensorboard_nothing_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    report(tmp_path, io.StringIO())
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_other_processes_are_silent(tmp_path, capsys):
    with Progress(5, tmp_path / "run", speak=False) as progress:
        progress.step(1, 64, {"loss": 1.0})
        progress.say("hello")
    with preparing("text", speak=False) as show:
        assert show is None
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr() == ("", "")


CHILD = """
import sys, time
from pathlib import Path
from nestling.train.progress import Progress, preparing
with preparing("training text") as show:
    for i in range(4):
        show(i, 1000 * i)
        time.sleep(0.06)
with Progress(30, Path(sys.argv[1])) as progress:
    for step in range(1, 31):
        progress.step(step, 64, {"loss": 2.0})
        time.sleep(0.01)
    progress.say("step 30: validation loss 1.2500")
"""


def test_a_terminal_shows_a_bar_that_moves(tmp_path):
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        stderr=follower,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(follower)
    said = b""
    while True:
        try:
            piece = os.read(leader, 4096)
        except OSError:  # the terminal is closed
            break
        said += piece
        if not piece:
            break
    os.close(leader)
    assert process.wait() == 0
    text = said.decode()
    assert "preparing training text: 3 documents, 3,000 tokens" in text
    assert "━" in text
    assert "30/30" in text
    assert "loss 2.0000" in text
    assert "validation loss 1.2500" in text
