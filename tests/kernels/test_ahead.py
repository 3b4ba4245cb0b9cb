"""All kernels compile for GPUs of two generations and fit them, found without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.kernels.cases import ALL

ROOT = Path(__file__).resolve().parents[2]
SHARED = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes of shared memory a block may have on each generation."""


@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 128] if ALL else [64])
@pytest.mark.parametrize("arch", SHARED)
def test_kernels_fit(arch: int, d: int, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.ahead", str(arch), str(d)],
        env=environment, capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len({one["name"].split("(")[0] for one in found}) == 12, [one["name"] for one in found]
    for one in found:
        assert one["stack"] <= 16, f"{one['name']} spills: {one['stack']} bytes of stack"
        assert one["shared"] <= SHARED[arch], f"{one['name']}: {one['shared']} bytes shared"
