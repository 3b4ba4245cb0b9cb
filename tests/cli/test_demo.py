"""The main job from beginning to end, with very little training."""

from __future__ import annotations

import re

import pytest

from nestling.cli import main


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of TensorBoard's packages
def test_the_demo_trains_reads_and_reports(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))  # the cache of prepared text
    little = ["--steps", "2", "--documents", "2", "--characters", "650"]
    assert main(["demo", "--out", str(tmp_path / "demo"), *little]) == 0
    said = capsys.readouterr()
    assert f"report: {tmp_path / 'demo' / 'report.html'}" in said.out
    assert "== training Hope" in said.err
    assert "== reading 2 unseen documents of 6" in said.err
    text = (tmp_path / "demo" / "report.html").read_text()
    assert text.count("<svg") == 5
    rows = re.findall(r"<td>(\w+)</td><td>([\d,]+)</td>", text)
    assert [name for name, _ in rows] == ["Hope", "Transformer"]
    sizes = [int(size.replace(",", "")) for _, size in rows]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.02)
    assert "10 updates" in text, "the fastest level changed every 64 bytes"
