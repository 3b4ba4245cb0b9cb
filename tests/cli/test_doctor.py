"""`nestling doctor` measures here and says what to change."""

from __future__ import annotations

import importlib.metadata
import json

from nestling import machine
from nestling.cli import main
from nestling.train import trainer


def test_it_prints_versions_devices_and_advice(capsys):
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for word in ("nestling", "torch", "device", "threads", "bf16", "triton", "advice"):
        assert word in said
    assert len(said.partition("advice")[2].split()) > 2


def test_a_cpu_that_faults_on_bf16_is_told_so(capsys, monkeypatch, tmp_path):
    machine.bf16_speed.cache_clear()
    monkeypatch.setattr(
        machine, "_MEASURE", "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
    )
    assert machine.bf16_speed() is None
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "ends the process" in said
    assert "stay with float32" in said
    line = ["train", "tiny", "run.precision=bf16", "run.steps=1", "--out"]
    assert main([*line, str(tmp_path / "run")]) == 2
    assert not (tmp_path / "run").exists()
    assert "bf16 products end this CPU's process" in capsys.readouterr().err
    machine.bf16_speed.cache_clear()


def test_a_cpu_that_emulates_bf16_is_told_so_in_training(capsys, monkeypatch, tmp_path):
    """And one that is quicker in bf16 is told nothing, and trains."""
    for speed, warns in ((0.2, True), (2.0, False)):
        monkeypatch.setattr(trainer, "bf16_speed", lambda speed=speed: speed)
        line = ["train", "tiny", "run.precision=bf16", "run.steps=1", "--out"]
        assert main([*line, str(tmp_path / str(speed))]) == 0
        said = capsys.readouterr()
        assert ("emulated on this CPU: 0.20x" in said.out + said.err) == warns


def test_the_bill_names_what_is_installed_and_who_needs_it(capsys):
    assert main(["doctor", "--bill"]) == 0
    text = capsys.readouterr().out
    found = json.loads(text)
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.5")
    assert found["metadata"]["component"]["name"] == "nestling"
    parts = {part["name"]: part for part in found["components"]}
    assert parts["torch"]["version"] == importlib.metadata.version("torch")
    assert parts["torch"]["purl"].startswith("pkg:pypi/torch@")
    assert {"transformers", "safetensors", "sympy"} <= set(parts)  # sympy: by way of torch
    known = {part["bom-ref"] for part in found["components"]}
    needs = {each["ref"]: each["dependsOn"] for each in found["dependencies"]}
    assert set(needs) == known | {found["metadata"]["component"]["bom-ref"]}
    assert {one for each in needs.values() for one in each} <= set(needs)
    assert parts["sympy"]["bom-ref"] in needs[parts["torch"]["bom-ref"]]
    assert sum("licenses" in part for part in parts.values()) > 0.9 * len(parts)
    main(["doctor", "--bill"])
    assert capsys.readouterr().out == text
