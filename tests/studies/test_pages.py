"""The stored runs beside the pages make the pages, byte for byte; quick runs of every study run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from studies.__main__ import STUDIES, main

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "adapt": ["adapt.md", "adapt_smollm2.md"],
    "optim": ["optim.md"],
    "languages": ["languages.md"],
    "babilong": ["babilong.md", "babilong.svg"],
    "levels": ["levels.md", "levels.svg", "levels_appendix.md"],
    "lm": ["language_models.md", "language_models.svg", "language_models_appendix.md"],
    "continual": ["continual.md", "continual.svg", "continual_appendix.md"],
    "timescales": ["continual_timescales.md", "continual_timescales.svg"],
    "deep_memory": ["deep_memory.md", "deep_memory.svg", "deep_memory_appendix.md"],
    "beyond": ["continual_beyond.md", "continual_beyond.svg", "continual_beyond_appendix.md"],
}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "docs" / "results", tmp_path / "pages"))


def same(out: Path, names: list[str]) -> None:
    for name in names:
        assert (out / name).read_bytes() == (ROOT / "docs" / "results" / name).read_bytes(), name


@pytest.mark.parametrize("study", PAGES)
def test_stored_runs_make_the_page(study, out, tmp_path):
    for name in PAGES[study]:
        if study != "optim":  # parts without stored runs stay as they are on the page
            (out / name).unlink()
    assert main([study, "--report", "--out", str(out), "--runs", str(tmp_path / "runs")]) == 0
    same(out, PAGES[study])
    if (out / f"{PAGES[study][0][:-3]}.json").exists():
        same(out, [f"{PAGES[study][0][:-3]}.json"])


@pytest.mark.parametrize("study", sorted({*STUDIES} - {"queue", "pretrained"}))
def test_every_study_runs_in_quick(study, shared_data, tmp_path, capsys):
    command = [study, "--quick", "--data", str(shared_data)]
    command += ["--out", str(tmp_path / "out"), "--runs", str(tmp_path / "runs")]
    assert main(command) == 0, capsys.readouterr().err
    assert list((tmp_path / "out").glob("*.md"))


def test_unknown_studies_are_named(capsys):
    assert main(["foo"]) == 2
    assert "unknown study 'foo'" in capsys.readouterr().err
