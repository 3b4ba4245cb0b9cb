"""Models, optimizers and adapting on a pretended CUDA device: nothing mixes devices, nothing waits
where it need not, results are those of the CPU, and launches stay few."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
from nestling.models import presets

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
]

ROOT = Path(__file__).resolve().parents[2]


@cache
def found(group: str) -> dict[str, Any]:
    """The counts of each scenario of a group, run in a process of its own."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.pretend.scenarios", group],
        env=environment, capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    failed = [f"{line['name']}: {line['error']}" for line in lines if line["error"]]
    assert not failed, "\n".join(failed)
    return {line["name"]: line["counts"] for line in lines}


def test_models_train_without_waiting_and_generate() -> None:
    every = found("models")
    assert len(every) == len(presets.MODELS) + 1
    for name, counts in every.items():
        assert counts["forward"]["waits"] == {}, name
        assert counts["backward"]["waits"] == {}, name
        waits = counts["generate"]["waits"]  # (those at "?" are Hugging Face's loop's)
        ours = {at: n for at, n in waits.items() if not at.endswith("at ?")}
        assert sum(ours.values()) <= 1, f"{name}: {ours}"  # whether the prompt's rows are packed


def test_optimizers_step_without_waiting() -> None:
    every = found("optimizers")
    assert len(every) == 12
    for name, counts in every.items():
        most = 8 if name == "DGD" else 0  # (it looks at the inputs it captured)
        assert sum(counts["step"]["waits"].values()) <= most, name


def test_adapting_learns_what_it_learns_on_a_cpu() -> None:
    assert len(found("adapting")) == 8


def test_few_launches() -> None:
    """Per layer and 2,048 tokens. Attention, which has no scan, says what a block takes beside."""
    limits = {
        "hope": (300, 700),
        "hope_printed": (300, 700),
        "deltanet": (80, 170),
        "gated_delta": (80, 170),
        "retnet": (80, 170),
        "transformer": (100, 110),
    }
    every = found("launches")
    assert every.keys() == limits.keys()
    for name, (forward, backward) in limits.items():
        counts = every[name]
        assert counts["forward"]["launches"] <= forward, f"{name}: {counts['forward']}"
        assert counts["backward"]["launches"] <= backward, f"{name}: {counts['backward']}"
        assert counts["forward"]["waits"] == counts["backward"]["waits"] == {}, name
