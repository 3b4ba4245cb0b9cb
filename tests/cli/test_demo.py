"""The main job from beginning to end, with very little training."""

from __future__ import annotations

import html
import re

import pytest

from nestling.cli import main
from nestling.models import presets
from nestling.train.recipe import get_recipe


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of TensorBoard's packages
def test_the_demo_trains_reads_and_reports(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))  # the cache of prepared text
    little = ["--steps", "2", "--documents", "2", "--characters", "1200"]
    assert main(["demo", "--out", str(tmp_path / "demo"), *little]) == 0
    said = capsys.readouterr()
    first, changes, kept, report = said.out.splitlines()
    assert report.startswith(f"report: {tmp_path / 'demo' / 'report.html'}")
    assert first.startswith("Best at the second half of unseen documents: ")
    for reader in ("all levels learn", "only the fastest level", "frozen", "Transformer, learning"):
        assert reader in first
        assert reader in kept
    assert "== training Hope" in said.err
    read = re.search(r"== reading 2 unseen documents of (1,\d\d\d) bytes", said.err)
    size = int(read.group(1).replace(",", ""))
    text = (tmp_path / "demo" / "report.html").read_text()
    assert text.index(html.escape(first)) < text.index("<h2"), "the result comes first"
    assert text.count("<svg") == 6
    rows = re.findall(r"<td>(Hope|Transformer)</td><td>([\d,]+)</td>", text)
    assert [name for name, _ in rows] == ["Hope", "Transformer"]
    sizes = [int(size.replace(",", "")) for _, size in rows]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.02)
    levels = presets.tiny("hope", **get_recipe("hope").model.fields).memory_levels
    for level in levels:  # every level that is named has changed
        count = (size - 1) // level.chunk
        assert f"{level.name} {count}" in changes
        row = re.search(rf"<td>{level.name}</td><td>{level.chunk:,} bytes</td>(.*?)</tr>", text)
        cells = re.findall(r"<td>(.*?)</td>", row.group(1))
        assert cells[1] == str(count)
        assert (float(cells[2]) > 0) == (count > 0)
