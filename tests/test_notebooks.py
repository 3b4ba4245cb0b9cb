"""Every notebook runs from its first cell to its last, and is stored without outputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_three():
    assert [path.stem for path in NOTEBOOKS] == ["describe", "first_look", "keep_learning"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    notebook = json.loads(path.read_text())
    assert notebook["nbformat"] == 4
    names: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], f"cell {number} was stored with outputs"
            code = compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec")
            exec(code, names)
    check = CHECKS.get(path.stem)
    if check is not None:
        check(names, tmp_path)


def _learned(names, folder):
    """The valley is learned, forgotten, and there again, as the page says."""
    assert names["after"] < names["before"] - 0.05
    assert names["learner"].score(names["ahead"]) == pytest.approx(names["after"], abs=1e-6)


def _compared(names, folder):
    curves = names["curves"]
    assert curves["M3"][-1] < curves["M3"][0] / 2
    assert names["error"] < 0.01


def _drawn(names, folder):
    assert (folder / "levels.html").stat().st_size > 1000
    assert len(names["description"].levels) > 3


CHECKS = {"keep_learning": _learned, "first_look": _compared, "describe": _drawn}
