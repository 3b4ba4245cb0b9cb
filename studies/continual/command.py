"""`python -m studies continual`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

__all__ = ["main", "parser", "run"]

STREAMS = ("clinc150", "banking77", "dbpedia70", "dbpedia14")

_EXAMPLES = """examples:
  python -m studies continual banking77 --data ../shared/data
  python -m studies continual all --data ../shared/data --seeds 5      the whole study, resumable
  python -m studies continual clinc150 --method cms-4 --method ewc --base hope --data DATA
  python -m studies continual banking77 --base SmolLM2-135M.gguf --per-class 40 --data DATA
  python -m studies continual clinc150 --quick --data DATA             a slice, about a minute
  python -m studies continual translate --data DATA                    new languages in sequence
  python -m studies continual page --out docs/results                  the results page only

Every run is one JSON file under --cache; start the same command again and it goes on. With --out a
copy of all runs lies beside the page and stands in for a cache that is gone. Settings are chosen on
a validation stream that the reported seeds never use."""


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    made = argparse.ArgumentParser(
        prog="python -m studies continual",
        description="Learn classes (or languages) one task after another; compare methods.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("stream", help=f"{', '.join(STREAMS)}, all, translate, or page")
    made.add_argument("--data", type=Path, help="folder of the data sets")
    made.add_argument("--base", default="transformer", help="transformer, hope, .gguf or folder")
    made.add_argument("--pretrained", help="all: a pretrained model to study on slices as well")
    made.add_argument("--method", action="append", help="one or more methods (default: all)")
    made.add_argument("--seeds", type=int, default=5, help="how many class orders and seeds")
    made.add_argument("--first-seed", type=int, default=10, help="the first of them")
    made.add_argument("--readout", default="head", help="head, or label (text scored by the LM)")
    made.add_argument("--per-class", type=int, help="at most so many examples of a class")
    made.add_argument("--manchu", type=Path, help="translate: a folder with the Manchu set")
    made.add_argument("--cache", type=Path, default=Path("runs/continual"), help="models, runs")
    made.add_argument("--out", type=Path, help="folder of the results pages and their runs")
    made.add_argument("--no-tuning", action="store_true", help="default settings for every method")
    made.add_argument("--quick", action="store_true", help="a slice with a quick base model")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse and run."""
    return run(parser().parse_args(arguments))


def run(arguments: argparse.Namespace) -> int:
    """Run what is missing, print tables, and write the page if asked."""
    known = (*STREAMS, "all", "translate", "page")
    if arguments.stream not in known:
        raise ValueError(f"unknown stream {arguments.stream!r}; known: {', '.join(known)}")
    if arguments.seeds < 1:
        raise ValueError(f"--seeds must be at least 1; got {arguments.seeds}")
    if arguments.stream != "page":
        if arguments.data is None:
            raise ValueError("--data must name the folder of the data sets")
        from nestling.host import keep_memory

        keep_memory()
        if arguments.stream != "translate":
            for stage in _stages(arguments):
                _classify(arguments, stage)
        if arguments.stream in ("translate", "all"):
            _translate(arguments)
    if arguments.stream == "page" and arguments.out is None:
        arguments.out = Path("docs/results")
    if arguments.out is not None:
        _write(arguments)
    return 0


def _store(arguments: argparse.Namespace, page: str) -> Any:
    """The runs; those of a page that lies in --out stand in for what the cache lacks."""
    from studies.harness.store import Store

    kept = arguments.out is not None and not arguments.quick
    return Store(arguments.cache / "study", copy=arguments.out / f"{page}.json" if kept else None)


def _write(arguments: argparse.Namespace) -> None:
    """The pages of what was asked for, and a copy of the runs beside each."""
    from studies.continual import page, study, translation_page, translation_study

    made = []
    for name, without, write, packed in (
        ("continual", ("translate",), page.write_page, study.packed),
        ("languages", STREAMS, translation_page.write_languages, translation_study.packed),
    ):
        store = _store(arguments, name)
        if arguments.stream in without:
            continue
        path = write(store, arguments.out, quick=arguments.quick)
        if path is not None and store.copy is not None:
            store.gather(packed)
        made += [path] if path is not None else []
    if not made:
        raise ValueError(
            f"{arguments.cache}: no results yet; run `python -m studies continual STREAM`"
        )
    print("\n".join(f"page: {path}" for path in made))


def _stages(arguments: argparse.Namespace) -> list[Any]:
    """What to run: the whole study, or one stream as the options say."""
    from studies.continual.methods import METHODS
    from studies.continual.stages import Stage, default_methods, stages

    methods = tuple(arguments.method or ())
    if unknown := [m for m in methods if m not in METHODS]:
        raise ValueError(f"unknown method {unknown[0]!r}; known: {', '.join(METHODS)}")
    if arguments.stream == "all":
        planned = stages(arguments.pretrained)
        return [replace(s, methods=tuple(m for m in s.methods if not methods or m in methods))
                for s in planned]  # fmt: skip
    return [
        Stage(
            base=arguments.base,
            stream=arguments.stream,
            methods=methods or default_methods(arguments.readout),
            readout=arguments.readout,
            per_class=arguments.per_class,
        )
    ]


def _classify(arguments: argparse.Namespace, stage: Any) -> None:
    from nestling.train.progress import preparing
    from studies.continual.base import load_base
    from studies.continual.page import summary
    from studies.continual.streams import load, sliced
    from studies.continual.study import Plan, Study

    quick = arguments.quick
    base = load_base(stage.base, arguments.data, arguments.cache, quick=quick)
    dataset = load(stage.stream, arguments.data)
    if quick:
        dataset = sliced(dataset, classes=12, tasks=3, per_class=20)
    elif stage.per_class:
        count = len(dataset.classes)
        dataset = sliced(dataset, classes=count, tasks=dataset.tasks, per_class=stage.per_class)
    plan = Plan(
        readout=stage.readout,
        tune=not (arguments.no_tuning or quick),
        prompt_sample=16 if quick else 64,
    )
    store = _store(arguments, "continual")
    tuned = None
    if stage.tuned is not None and plan.tune:
        other = load_base(stage.tuned[0], arguments.data, arguments.cache)
        stream = load(stage.tuned[1], arguments.data)
        tuned = Study(other, stream, arguments.cache, store, plan)
    with preparing(f"the texts of {dataset.name} with {base.name}") as seen:
        study = Study(base, dataset, arguments.cache, store, plan, tuned=tuned, progress=seen)
    seeds = min(arguments.seeds, 2) if quick else arguments.seeds
    found = []
    what = f"{base.name} on {stage.stream}, {stage.readout}"
    with _bar(what, seeds * len(stage.methods)) as advance:
        for seed in range(arguments.first_seed, arguments.first_seed + seeds):
            for method in stage.methods:  # seed by seed, so that a stopped study is balanced
                advance(f"{method}, seed {seed}")
                found.append(study.run(method, seed))
    print(f"{what}\n{summary(found)}")


def _translate(arguments: argparse.Namespace) -> None:
    from studies.continual.translation_page import translation_part
    from studies.continual.translation_study import run_translation

    store = _store(arguments, "languages")
    with _bar("translation", None) as advance:
        run_translation(
            arguments.data,
            arguments.cache,
            store,
            seeds=min(arguments.seeds, 1) if arguments.quick else arguments.seeds,
            first=arguments.first_seed,
            manchu=arguments.manchu,
            quick=arguments.quick,
            say=advance,
        )
    print("\n".join(translation_part(store, quick=arguments.quick)))


class _bar:
    """A bar in a terminal, one line per run elsewhere."""

    def __init__(self, what: str, total: int | None) -> None:
        self.what, self.total, self.done = what, total, 0
        self.bar: Any = None

    def __enter__(self) -> Any:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self.bar = Progress(console=Console(stderr=True))
            self.bar.__enter__()
            self.task = self.bar.add_task(self.what, total=self.total)
        return self.advance

    def advance(self, note: str) -> None:
        """One more run begins."""
        if self.bar is not None:
            self.bar.update(self.task, completed=self.done, description=f"{self.what}: {note}")
        else:
            of = f"/{self.total}" if self.total else ""
            print(f"{self.what}: {note} ({self.done + 1}{of})", file=sys.stderr, flush=True)
        self.done += 1

    def __exit__(self, *error: Any) -> None:
        if self.bar is not None:
            self.bar.__exit__(*error)
