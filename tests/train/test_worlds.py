"""Real torchrun processes: two learn what one learns, and a killed one is started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nestling.train.checkpoint import checkpoints

HERE = Path(__file__).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def launch(*command: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*TORCHRUN, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
    )


@pytest.mark.slow
def test_any_number_of_processes_learns_the_same(tmp_path):
    """With carried memories and micro-batches; two processes, then one, then two again."""
    process = launch(str(HERE / "worlds.py"), str(tmp_path))
    said, _ = process.communicate(timeout=400)
    assert process.returncode == 0, said[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert set(found) == {"adamw ddp", "adamw fsdp", "m3 ddp", "m3 fsdp"}
    assert max(found.values()) < 2e-6, found
    assert said.count("continuing from step 3") == said.count("continuing from step 5") == 4


def children(pid: int) -> list[int]:
    """The processes a process has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state = path.read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        if int(state[1]) == pid:
            found.append(int(path.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds torchrun's workers in Linux's /proc")
def test_torchrun_restarts_a_killed_worker_from_the_checkpoint(tmp_path):
    """The elastic restart goes on by itself, and ends as a run that nobody disturbed."""
    sys.path.insert(0, str(HERE))
    import worlds

    changes = [*worlds.SMALL, "optim.name=m3", "run.steps=40", "run.save_every=4"]
    changes += [f"data.cache={tmp_path / 'cache'}", "run.keep=20"]
    command = ["-m", "nestling.cli", "train", "stream", *changes, "--out"]
    out = tmp_path / "killed"
    process = launch("--max-restarts=5", *command, str(out))
    while process.poll() is None and not checkpoints(out / "checkpoints"):
        time.sleep(0.02)
    os.kill(max(children(process.pid)), signal.SIGKILL)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said[-4000:]
    assert "continuing from step" in said
    whole = subprocess.run(
        [sys.executable, *command, str(tmp_path / "whole")], capture_output=True, check=False
    )
    assert whole.returncode == 0, whole.stderr
    got, expected = (
        load_file(p / "model" / "model.safetensors") for p in (out, tmp_path / "whole")
    )
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-3, atol=2e-4, msg=name)


@pytest.mark.slow
def test_no_process_holds_more_than_its_share_of_a_checkpoint():
    """Saving and loading within 1.2 of what each process holds, and equal bit for bit."""
    process = launch(str(HERE.parents[1] / "benchmarks" / "checkpoints.py"), "--layers=12")
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said[-4000:]
    assert said.count("tensors equal") == 2


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_killed_rank_changes_nothing(strategy):
    """Two kills of one of two processes; benchmarks/kills.py does as many as it is asked for."""
    script = HERE.parents[1] / "benchmarks" / "kills.py"
    line = [sys.executable, str(script), "--kills=2", "--steps=12", "--processes=2"]
    done = subprocess.run(
        [*line, f"--strategy={strategy}"], capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "equal bit for bit" in done.stdout
