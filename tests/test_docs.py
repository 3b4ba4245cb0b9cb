"""The README and the guides are true: Python blocks and commands run, the site builds strictly."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "page", [p for p in PAGES if BLOCK.search(p.read_text())], ids=lambda p: p.stem
)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    text = page.read_text()
    namespace: dict[str, object] = {"__name__": "docs"}
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block.group(1), str(page), "exec"), namespace)


SHELL = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands(page: Path, program: str) -> list[list[str]]:
    """The arguments of every call of a program in a page's shell blocks."""
    blocks = "\n".join(block.group(1) for block in SHELL.finditer(page.read_text()))
    lines = blocks.replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [line[1:] for line in words if line and line[0] == program]


EVERY = [(page.stem, line) for page in PAGES for line in commands(page, "nestling")]


@pytest.mark.parametrize(("page", "line"), EVERY, ids=lambda x: x if isinstance(x, str) else x[0])
def test_every_command_is_one_the_parser_takes(page: str, line: list[str]) -> None:
    name, *rest = line
    parser: argparse.ArgumentParser = importlib.import_module(f"nestling.cli.{name}").parser()
    given = parser.parse_args(rest)
    if name == "train":
        from nestling.train.recipe import changed, get_recipe

        changed(get_recipe(given.recipe), given.changes)


def test_scripts_and_targets_that_are_named_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        text = page.read_text()
        for target in re.findall(r"`make (\w+)`|^make (\w+)", text, re.MULTILINE):
            assert re.search(rf"^{''.join(target)}:", makefile, re.MULTILINE), (page, target)
        for script in re.findall(r"python ((?:benchmarks|examples)/\S+?\.py)", text):
            assert (ROOT / script).is_file(), (page, script)


SMALL = ["run.steps=2", "run.rows=2", "data.length=32", "run.eval_every=2", "run.save_every=2"]


def test_the_commands_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order, in one folder, with less training and shorter texts than a reader would."""
    from nestling.cli import main

    monkeypatch.chdir(tmp_path)
    text = "The valley lay in the sun, and nobody knew what the day would bring. " * 40
    for name in ("book.txt", "other.txt", "diary.txt"):
        (tmp_path / name).write_text(text)
    ran = []
    for name, *rest in commands(ROOT / "README.md", "nestling"):
        rest = ["runs/tiny/model" if word == "MODEL" else word for word in rest]
        if name == "train":
            rest += SMALL + ([] if rest[0] == "tiny" else ["data.tokenizer=bytes"])
        if name == "generate":
            rest += ["--tokens", "4"]
        if "--suite" in rest:
            rest += ["--lengths", "1k", "--limit", "1", "--tasks", "s1"]
        assert main([name, *rest]) == 0, (name, rest)
        ran.append(name)
    assert set(ran) == {"train", "generate", "eval", "learn", "describe"}
    assert (tmp_path / "timeline.html").stat().st_size > 1000
    assert (tmp_path / "levels.html").stat().st_size > 1000


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 120


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    """Every link and every name of the reference is found; each public name has its entry."""
    pytest.importorskip("mkdocs")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "-d", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    import nestling
    import nestling.optim

    pages = tmp_path / "site" / "reference"
    for name in nestling.optim.__all__:
        assert f'id="nestling.optim.{name}"' in (pages / "optim" / "index.html").read_text(), name
    found = "".join(page.read_text() for page in pages.rglob("*.html"))
    for name in set(nestling.__all__) - {"__version__"}:
        if isinstance(getattr(nestling, name), ModuleType):
            assert (pages / name / "index.html").is_file(), name
        else:
            assert re.search(rf'id="nestling\.[a-z_.]*\.{name}"', found), name


def test_the_map_shows_every_room() -> None:
    tree = (ROOT / "CONTRIBUTING.md").read_text()
    for path in (ROOT / "src/nestling").iterdir():
        if path.suffix == ".py" and path.stem != "__init__":
            assert re.search(rf"\b{path.stem}\b", tree), path
        if path.is_dir() and (path / "__init__.py").exists():
            assert f"  {path.name}/" in tree, path
