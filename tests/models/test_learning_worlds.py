"""Levels that learn, in two gloo processes: DDP and FSDP2 take the steps of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_two_processes_train_learning_levels_as_one(tmp_path: Path) -> None:
    script = Path(__file__).with_name("learning_worlds.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(script), str(tmp_path / "found.json")],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == 6
    for name, (apart, moved) in found.items():
        assert moved > 0.1, name
        assert apart < 1e-7 * moved, name
