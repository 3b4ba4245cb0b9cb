"""`nestling doctor` measures here and says what to change."""

from __future__ import annotations

from nestling import host
from nestling.cli import main


def test_it_prints_versions_devices_and_advice(capsys):
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for word in ("nestling", "torch", "device", "threads", "bf16", "triton", "advice"):
        assert word in said
    assert len(said.partition("advice")[2].split()) > 2


def test_a_cpu_that_faults_on_bf16_is_told_so(capsys, monkeypatch, tmp_path):
    host.bf16_speed.cache_clear()
    monkeypatch.setattr(host, "_MEASURE", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert host.bf16_speed() is None
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "ends the process" in said
    assert "stay with float32" in said
    line = ["train", "tiny", "run.precision=bf16", "run.steps=1", "--out"]
    assert main([*line, str(tmp_path / "run")]) == 2
    assert not (tmp_path / "run").exists()
    assert "bf16 products end this CPU's process" in capsys.readouterr().err
    host.bf16_speed.cache_clear()
