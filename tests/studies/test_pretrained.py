"""The small Hope of the package: trained, packed and found by name; here one of two steps."""

from __future__ import annotations

import gzip
import zipfile
from pathlib import Path

import pytest
import torch

from nestling import pretrained as shipped
from nestling.adaptation import load_pretrained
from nestling.cli import main
from nestling.models import pretrained
from studies import pretrained as study
from studies.default import FREE
from studies.tasks.text import HELD_OUT

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of shipped models with one that two steps on two books made."""
    here = tmp_path_factory.mktemp("pretrained")
    books = here / "data" / "gutenberg_books"
    books.mkdir(parents=True)
    for name in ("moby_dick", *HELD_OUT):
        text = f"{name}: the ship went down, and the sea rolled on as it had before. " * 400
        (books / f"{name}.txt.gz").write_bytes(gzip.compress(text.encode()))
    given = ["--quick", "--data", str(here / "data"), "--runs", str(here / "run")]
    cache = f"data.cache={here / 'cache'}"
    assert study.main([*given, "--out", str(here / "models"), cache]) == 0
    return here


@pytest.fixture
def shipping(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shipped, "HOME", home / "models")
    return home / "models" / "small"


def test_what_is_packed_is_small_complete_and_says_its_licence(shipping: Path) -> None:
    names = {path.name for path in shipping.iterdir()}
    assert {"config.json", "model.safetensors", "README.md", "tokenizer.json"} <= names
    assert not [name for name in names if name.endswith(".py")]
    card = (shipping / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert "moby dick" in card
    assert "public domain" in card
    assert str(shipping.parents[1]) not in card  # nobody's paths
    assert "learn while it reads" in card


def test_it_is_the_trained_model_rounded(home: Path, shipping: Path) -> None:
    trained, _ = load_pretrained(home / "run" / "model")
    model, tokenizer = pretrained("small")
    assert model.dtype == torch.float32
    assert model.learns
    assert not model.training
    for (name, a), b in zip(trained.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.bfloat16().float(), b, msg=name)
    assert tokenizer("abc").input_ids == [97, 98, 99]


def test_commands_take_it_by_name(shipping: Path, tmp_path: Path, capsys) -> None:
    assert shipped.names() == ["nestling:small"]
    assert main(["generate", "nestling:small", "--prompt", "The sea", "--tokens", "4"]) == 0
    assert "The sea" in capsys.readouterr().out
    diary = tmp_path / "diary.txt"
    diary.write_text("The nestling flew for the first time today. " * 8)
    memory = str(tmp_path / "memory")
    assert main(["learn", "nestling:small", "--from", str(diary), "--memory", memory]) == 0
    assert main(["eval", "nestling:small", str(diary)]) == 0


def test_a_name_that_is_not_there_is_answered_with_those_that_are(
    shipping: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    assert main(["generate", "nestling:large", "--tokens", "4"]) == 2
    assert "there are: nestling:small" in capsys.readouterr().err
    monkeypatch.setattr(shipped, "HOME", tmp_path)
    with pytest.raises(ValueError, match="studies pretrained"):
        pretrained()


def test_too_large_or_spoiled_by_rounding_is_not_packed(
    home: Path, tmp_path: Path, monkeypatch
) -> None:
    ids = torch.arange(64) % 7 + 97
    monkeypatch.setattr(study, "LARGEST", 1000)
    with pytest.raises(ValueError, match="more than 1,000"):
        study.pack(home / "run" / "model", tmp_path / "small", "", ids)
    monkeypatch.setattr(study, "ROUNDING", -1.0)
    with pytest.raises(ValueError, match="bfloat16 costs"):
        study.pack(home / "run" / "model", tmp_path / "small", "", ids)
    assert list(tmp_path.iterdir()) == []


def test_the_recipe_is_the_default_hope(home: Path) -> None:
    made = study.recipe(home / "data")
    assert set(made.model.fields) <= FREE
    assert len(made.data.valid) == len(HELD_OUT)
    assert not set(made.data.train) & set(made.data.valid)
    from nestling.models import presets

    size = presets.parameter_count(presets.small("hope", **made.model.fields))
    assert 2 * size < study.LARGEST


def test_shipped_models_are_within_the_limit_and_packaged() -> None:
    for path in (ROOT / "src/nestling/pretrained").glob("*/"):
        if (path / "config.json").is_file():
            assert sum(f.stat().st_size for f in path.iterdir()) <= study.LARGEST
            assert "license: " in (path / "README.md").read_text()


def test_the_wheel_carries_the_weights(home: Path, tmp_path: Path) -> None:
    """Files that are not Python go into the wheel too."""
    import shutil
    import subprocess
    import sys

    pytest.importorskip("hatchling")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src", source / "src", ignore=ignore)
    shutil.copytree(home / "models" / "small", source / "src/nestling/pretrained/stand_in")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "nestling/pretrained/stand_in/model.safetensors" in names
    assert "nestling/pretrained/stand_in/README.md" in names
