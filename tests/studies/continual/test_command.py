"""`python -m studies continual` on a slice, as CI runs it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from studies.__main__ import main
from studies.continual.base import load_base, recipe


def test_the_quick_slice(shared_data, tmp_path, capsys):
    command = ["continual", "clinc150", "--quick", "--data", str(shared_data), "--seeds", "1"]
    command += ["--cache", str(tmp_path), "--method", "cms-4", "--method", "lda"]
    assert main(command) == 0
    first = capsys.readouterr().out
    assert "cms-4" in first
    assert main([*command, "--readout", "label", "--method", "sequential"]) == 0
    assert main(command) == 0  # all runs are stored: the same table
    assert first in capsys.readouterr().out


def test_the_whole_study_in_quick_and_its_page(shared_data, tmp_path):
    command = ["continual", "all", "--quick", "--data", str(shared_data), "--seeds", "1"]
    command += ["--cache", str(tmp_path), "--out", str(tmp_path / "docs")]
    command += ["--method", "sequential", "--method", "cms-4", "--method", "icl"]
    assert main(command) == 0
    page = (tmp_path / "docs" / "continual_quick.md").read_text()
    assert "not what is better" in page
    for stream in ("clinc150", "banking77", "dbpedia70", "dbpedia14"):
        assert f"## {stream}, transformer-quick, head readout" in page
    for told in ("## banking77, transformer-quick, label", "## clinc150, hope-quick"):
        assert told in page
    assert "| hope-3 |" in (tmp_path / "docs" / "languages_quick.md").read_text()
    command = ["continual", "page", "--cache", str(tmp_path), "--out", str(tmp_path / "docs")]
    assert main(command) == 2  # quick runs are no results
    assert not list((tmp_path / "docs").glob("*.json"))


def test_a_half_trained_base_goes_on_however_its_data_is_spelled(
    shared_data, tmp_path, monkeypatch
):
    monkeypatch.chdir(shared_data.parent)
    plain = recipe("hope", Path(shared_data.name), tmp_path)
    assert plain == recipe("hope", shared_data.resolve(), tmp_path)


def test_a_base_killed_while_it_was_exported_is_made_whole(shared_data, tmp_path):
    """Whatever an export left behind, the next start ends with the same model."""
    made = load_base("transformer", shared_data, tmp_path, quick=True).model
    first = [weight.detach().clone() for weight in made.parameters()]
    del made  # its weights are read from the file that is harmed below
    folder = tmp_path / "bases" / "transformer-quick" / "model"
    wanted = {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "kept.json"}
    weights = next(folder.glob("*.safetensors"))
    for harm in ("cut", "gone", "unsealed"):
        if harm in ("cut", "gone"):
            begin = weights.read_bytes()[:100]
            weights.unlink()
            if harm == "cut":
                weights.write_bytes(begin)
        else:
            (folder / "kept.json").unlink()
        again = load_base("transformer", shared_data, tmp_path, quick=True)
        assert {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "kept.json"} == wanted
        for one, other in zip(first, again.model.parameters(), strict=True):
            assert torch.equal(one, other), harm


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["clinc"], "unknown stream 'clinc'"),
        (["clinc150"], "--data must name"),
        (["clinc150", "--seeds", "0"], "--seeds must be at least 1"),
        (["clinc150", "--data", ".", "--method", "x"], "unknown method 'x'"),
        (["page", "--cache", "nowhere", "--out", "nowhere"], "no results yet"),
    ],
)
def test_mistakes_end_in_one_line(words, said, capsys):
    assert main(["continual", *words]) == 2
    assert said in capsys.readouterr().err
