"""A sample of `benchmarks/mutate.py`: a symbol broken on purpose fails its equation's test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_wrong_versions_of_sampled_equations_are_caught():
    options = "--sample 2 --seed 18 --seconds 30 --show".split()
    command = [sys.executable, "benchmarks/mutate.py", *options]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert made.returncode == 0, made.stdout + made.stderr
    assert "equations verified" in made.stdout


def test_an_equation_that_does_not_exist_is_refused():
    command = [sys.executable, "benchmarks/mutate.py", "9999"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert made.returncode == 1
    assert "no such equations: [9999]" in made.stderr
