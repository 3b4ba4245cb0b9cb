"""The README and the guides are true: Python blocks and commands run, the site builds strictly."""

from __future__ import annotations

import argparse
import contextlib
import gzip
import importlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.run
from transformers import LlamaConfig, LlamaForCausalLM

import nestling
import nestling.evaluate
from nestling.models import NestlingForCausalLM, byte_tokenizer, presets
from nestling.train.recipe import changed, get_recipe

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


GIVEN = re.compile(r"^<!-- given: ([\w, ]+) -->\n$", re.MULTILINE)
LEFT = re.compile(r"^<!-- not run: ([^\n]+) -->\n```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```(?:sh|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)
VALLEY = "On 12 May the valley lay in the sun, and Mira Lund paid 3 crowns for bread. " * 40


def tiny() -> NestlingForCausalLM:
    """A stand-in for the reader's own model: 26,000 parameters over bytes."""
    options = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return NestlingForCausalLM(presets.tiny(intermediate_size=32, **options)).eval()


def llama() -> LlamaForCausalLM:
    """A pretrained model of another family, which writes its own sample quickly."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=259, num_attention_heads=2, **sizes)).eval()


READERS_OWN = {"model": llama, "tokenizer": byte_tokenizer, "diary": lambda: VALLEY[:200]}
"""Names that a page does not define, because its reader has them: `<!-- given: ... -->`."""


def with_blocks(pattern: re.Pattern[str]) -> pytest.MarkDecorator:
    found = [page for page in PAGES if pattern.search(page.read_text())]
    return pytest.mark.parametrize("page", found, ids=[page.stem for page in found])


@with_blocks(BLOCK)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    text = page.read_text()
    namespace: dict[str, object] = {"__name__": "docs"}
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1))
        before = text.rfind("\n\n", 0, block.start()) + 2
        if given := GIVEN.match(text[before : block.start()]):
            namespace |= {name: READERS_OWN[name]() for name in given.group(1).split(", ")}
        exec(compile("\n" * line + block.group(1), str(page), "exec"), namespace)


def test_every_block_is_run_or_says_why_not() -> None:
    """Commands that are not run: they set up an environment, or fetch something first."""
    left = {page.stem: [b[0] for b in LEFT.findall(page.read_text())] for page in PAGES}
    assert {page: len(reasons) for page, reasons in left.items() if reasons} == {
        "README": 1, "adapt": 1, "install": 1, "security": 1,
    }  # fmt: skip
    kinds = {"python", "sh", "bash", "text", ""}
    for page in PAGES:
        blocks = re.findall(r"^```([^\n]*)\n.*?^```", page.read_text(), re.MULTILINE | re.DOTALL)
        assert set(blocks) <= kinds, page


def commands(page: Path) -> list[list[str]]:
    """The words of every command in a page's shell blocks, but for those it says are not run."""
    text = LEFT.sub("", page.read_text())
    blocks = "\n".join(block.group(1) for block in SHELL.finditer(text))
    words = [shlex.split(line, comments=True) for line in blocks.replace("\\\n", " ").splitlines()]
    return [line for line in words if line]


SMALL = ["run.steps=2", "run.rows=2", "data.length=32", "run.eval_every=2", "run.save_every=2"]
NARROW = ["model.fields.num_hidden_layers=1"]


def nestling_command(line: list[str]) -> None:
    """Run a command as it is printed, but for less training and shorter texts."""
    from nestling.cli import main

    name, *rest = line
    if name == "train":
        rest += [*SMALL, *NARROW] + (["data.tokenizer=bytes"] if rest[0] == "small" else [])
    if name == "tune":
        rest = [*rest, *SMALL, *NARROW, "--trials", "1", "--jobs", "1"]
    if name == "generate":
        rest += ["--tokens", "4"]
    if "--suite" in rest:
        rest += ["--lengths", "1k", "--limit", "1"]
        rest += [] if "--tasks" in rest else ["--tasks", "s1"]
    assert main([name, *rest]) == 0, line


class Parsed(Exception):
    """Raised in place of the work once a script has read its arguments."""


def script_reads(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A script takes its arguments: real parsers, real paths, no work."""
    read = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, *given: Any, **named: Any) -> None:
        read(self, *given, **named)
        raise Parsed

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        patch.chdir(ROOT)
        module = arguments[0] == "-m"
        patch.setattr(sys, "argv", arguments[1:] if module else arguments)
        patch.syspath_prepend(str(ROOT if module else (ROOT / arguments[0]).parent))
        run = runpy.run_module if module else runpy.run_path
        with pytest.raises(Parsed):
            run(sys.argv[0], run_name="__main__")


@with_blocks(SHELL)
@pytest.mark.filterwarnings("ignore")  # of other people's scripts
def test_the_commands_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their order, in one folder that has what the page speaks of."""
    monkeypatch.chdir(tmp_path)
    books = ("books/a.txt", "DATA/gutenberg_books/a.txt")
    for name in ("book.txt", "other.txt", "diary.txt", "more.txt", *books):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(VALLEY)
    with gzip.open(tmp_path / "book.txt.gz", "wt") as file:
        file.write(VALLEY)
    (tmp_path / "DATA" / "babi").mkdir()
    story = "\n".join(["1 Mary went to the hall.", "2 Where is Mary? \thall\t1"] * 60)
    for task in ("qa1", "qa2"):
        (tmp_path / "DATA" / "babi" / f"{task}_made-up_test.txt").write_text(story)
    tiny().save_pretrained(tmp_path / "MODEL")
    byte_tokenizer().save_pretrained(tmp_path / "MODEL")
    for line in commands(page):
        match line:
            case ["nestling", *rest]:
                nestling_command(rest)
            case ["python", *rest]:
                script_reads(rest, monkeypatch)
            case ["torchrun", *rest]:
                given = torch.distributed.run.get_args_parser().parse_args(rest)
                assert (given.module, given.training_script) == (True, "nestling.cli"), line
                name, *words = given.training_script_args
                parser = importlib.import_module(f"nestling.cli.{name}").parser()
                asked = parser.parse_args(words)
                changed(get_recipe(asked.recipe), asked.changes)
            case ["lm_eval", *rest]:
                pytest.importorskip("lm_eval")
                script_reads(["-m", "lm_eval", *rest], monkeypatch)
                tasks = rest[rest.index("--tasks") + 1]
                ours = Path(nestling.evaluate.__path__[0], "lm_eval_tasks")
                stock = Path(importlib.import_module("lm_eval").__path__[0], "tasks")
                found = [*ours.rglob("*.yaml"), *stock.glob("lambada/*.yaml")]
                assert any(f"task: {tasks}\n" in f.read_text() for f in found) or any(
                    f"- {tasks}\n" in f.read_text() for f in found
                ), tasks
            case [word, *_] if word.startswith("TASKS=$(python"):
                code = re.search(r'-c "(.*?)"', page.read_text())
                assert code
                with contextlib.redirect_stdout(io.StringIO()) as said:
                    exec(code.group(1), {})
                assert Path(said.getvalue().strip(), "lm_eval_tasks").is_dir()
            case _:
                pytest.fail(f"{page.stem}: nobody runs {shlex.join(line)}")
    if page.stem in ("README", "adapt"):
        assert (tmp_path / "timeline.html").stat().st_size > 1000
    if page.stem == "README":
        assert (tmp_path / "levels.html").stat().st_size > 1000


def test_scripts_and_targets_that_are_named_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        text = page.read_text()
        for target in re.findall(r"`make (\w+)`|^make (\w+)", text, re.MULTILINE):
            assert re.search(rf"^{''.join(target)}:", makefile, re.MULTILINE), (page, target)
        for script in re.findall(r"python ((?:benchmarks|examples)/\S+?\.py)", text):
            assert (ROOT / script).is_file(), (page, script)


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
        if path.suffix == ".py" and path.stem not in ("__init__", "__main__"):
            assert re.search(rf"\b{path.stem}\b", tree), path
        if path.is_dir() and (path / "__init__.py").exists():
            assert f"  {path.name}/" in tree, path
