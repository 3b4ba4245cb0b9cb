"""The example a newcomer runs first: it runs, and it shows what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "first_look.py"


def test_short_run_prints_both_tables_and_writes_the_picture(tmp_path):
    picture = tmp_path / "look.png"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--short", "--out", str(picture)],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert "A winding valley (Eq. 53)" in done.stdout
    rows = {line[:24].strip(): line[24:].split() for line in done.stdout.splitlines() if line}
    assert {"gradient descent", "momentum", "delta momentum"} <= rows.keys()
    end = {name: float(row[2]) for name, row in rows.items() if len(row) == 4 and name}
    assert end["delta gradient descent"] < end["gradient descent"]
    assert picture.read_bytes().startswith(b"\x89PNG")
