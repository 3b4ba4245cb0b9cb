"""Real torchrun processes: two learn what one learns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    assert max(found.values()) < 2e-5, found
    assert said.count("continuing from step 3") == said.count("continuing from step 5") == 4
