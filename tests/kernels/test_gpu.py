"""The page for the first person with a GPU is written without one, in Triton's interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_page_is_rehearsed() -> None:
    command = [sys.executable, "-W", "error::UserWarning", "benchmarks/gpu.py"]
    done = subprocess.run([*command, "--rehearse"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WRONG" not in done.stdout
    for name in ("delta rule, triton", "Hope's memory, triton", "Titans' features memory, triton"):
        assert done.stdout.count(f"  {name}  ") == 2, f"{name} in float32 and bfloat16"
    assert "nestling M3" in done.stdout
    if "cuda" not in done.stdout:
        refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert "needs a CUDA device" in refused.stderr or refused.returncode == 0
