"""The package as a user meets it: quick to import, typed, light, and free of clutter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import nestling

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["nestling", "nestling.optim", "nestling.scan"])
def test_importing_parts_does_not_import_transformers(module):
    code = f"import {module}, sys; print('transformers' in sys.modules)"
    assert python(code) == "False"


def test_the_language_model_is_found_lazily():
    code = "import nestling as n; print(n.NestlingForCausalLM.config_class is n.NestlingConfig)"
    assert python(code) == "True"


def test_unknown_names_say_so():
    with pytest.raises(AttributeError, match="has no attribute 'Hop'"):
        _ = nestling.Hop


def test_core_dependencies_stay_light():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=!~\[]", d)[0] for d in project["dependencies"]}
    assert names == {"torch", "numpy", "safetensors"}
    assert {"lm", "eval", "report", "dev", "all"} <= set(project["optional-dependencies"])
    assert (ROOT / "src/nestling/py.typed").exists()


def test_studies_are_beside_the_package_not_in_it():
    import tomllib

    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert build["targets"] == {"wheel": {"packages": ["src/nestling"]}}
    for path in SOURCES:
        assert not re.search(r"^\s*(import|from) studies", path.read_text(), re.MULTILINE), path


def test_the_project_links_what_its_readme_links():
    """On an index the page of a project shows these; no address is made up."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert urls["Paper"].startswith("https://arxiv.org/abs/")
    assert all(url in (ROOT / "README.md").read_text() for url in urls.values())


def test_constraints_pin_the_torch_that_ci_tests():
    pins = (ROOT / "constraints.txt").read_text().split()
    assert "torch==2.13.0" in pins
    assert not [p for p in pins if p.startswith("nvidia")]
    assert "triton==3.7.1" in pins  # (that torch's own; without its GPU libraries)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT / "src")))
def test_no_pickle(path):
    text = path.read_text()
    assert not re.search(
        r"^\s*(import|from) pickle|(?<!safetensors\.)torch\.load\(", text, re.MULTILINE
    )


@pytest.mark.parametrize("room", ["rules", "scan", "memories", "continuum", "models"])
def test_math_and_models_are_free_of_distribution_code(room):
    for path in (ROOT / "src/nestling" / room).rglob("*.py"):
        assert "torch.distributed" not in path.read_text(), path


TYPED = """
import nestling
reveal_type(nestling.adapt)
reveal_type(nestling.NestlingForCausalLM)
reveal_type(nestling.describe)
reveal_type(nestling.Level(name="fast", chunk=8).chunk)
"""


def test_public_names_have_types(tmp_path):
    """A user's mypy sees signatures, not Any (torch and transformers are left out: seconds)."""
    (tmp_path / "user.py").write_text(TYPED)
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nfollow_imports = silent\n"
        + "".join(
            f"[mypy-{name}.*]\nfollow_imports = skip\nignore_missing_imports = True\n"
            for name in ("torch", "transformers", "numpy", "huggingface_hub", "safetensors")
        )
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "user.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "MYPYPATH": str(ROOT / "src")},
    )
    adapt, model, describe, chunk = re.findall(r'Revealed type is "(.*)"', done.stdout)
    assert "chunks" in adapt
    assert "nestling.adaptation.learner.Learner" in adapt
    assert "nestling.models.modeling.NestlingForCausalLM" in model
    assert "nestling.description" in describe
    assert chunk != "Any"


def test_every_pin_has_hashes():
    done = subprocess.run(
        [sys.executable, ROOT / ".ci" / "hashes.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert re.fullmatch(r"\d+ pins, \d+ hashes, 0 wrong\n", done.stdout)
