"""`nestling continual`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

__all__ = ["parser", "run"]

STREAMS = ("clinc150", "banking77", "dbpedia70", "dbpedia14")

_EXAMPLES = """examples:
  nestling continual banking77 --data ../shared/data
  nestling continual all --data ../shared/data --seeds 5            the whole study, resumable
  nestling continual clinc150 --method cms-4 --method ewc --base hope --data DATA
  nestling continual banking77 --base SmolLM2-135M-Instruct.Q4_1.gguf --per-class 40 --data DATA
  nestling continual clinc150 --quick --data DATA                   a slice, about a minute
  nestling continual translate --data DATA                          new languages, one after another
  nestling continual page --out docs/results                        the results page only

Every run is one JSON file under --cache; start the same command again and it goes on. Settings are
chosen on a validation stream that the reported seeds never use."""


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    made = argparse.ArgumentParser(
        prog="nestling continual",
        description="Learn classes (or languages) one task after another; compare methods.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("stream", help=f"{', '.join(STREAMS)}, all, translate, or page")
    made.add_argument("--data", type=Path, help="folder of the data sets")
    made.add_argument("--base", default="transformer", help="transformer, hope, .gguf or folder")
    made.add_argument("--method", action="append", help="one or more methods (default: all)")
    made.add_argument("--seeds", type=int, default=5, help="class orders and seeds, from 0")
    made.add_argument("--readout", default="head", help="head, or label (text scored by the LM)")
    made.add_argument("--epochs", type=int, default=1, help="passes over each task")
    made.add_argument("--per-class", type=int, help="at most so many training examples of a class")
    made.add_argument("--manchu", type=Path, help="translate: a folder with the Manchu set")
    made.add_argument("--cache", type=Path, default=Path("runs/continual"), help="models, runs")
    made.add_argument("--out", type=Path, help="write the results page into this folder")
    made.add_argument("--no-tuning", action="store_true", help="default settings for every method")
    made.add_argument("--quick", action="store_true", help="a slice with a quick base model")
    return made


def run(arguments: argparse.Namespace) -> int:
    """Run what is missing, print a table, and write the page if asked."""
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
        if arguments.stream == "translate":
            _translate(arguments)
        else:
            _classify(arguments)
    if arguments.out is not None or arguments.stream == "page":
        from nestling.continual.page import write_page

        path = write_page(arguments.cache / "results", arguments.out or Path("docs/results"))
        print(f"page: {path}")
    return 0


def _classify(arguments: argparse.Namespace) -> None:
    from nestling.continual.base import load_base
    from nestling.continual.methods import METHODS
    from nestling.continual.page import summary
    from nestling.continual.streams import load, sliced
    from nestling.continual.study import Plan, Store, Study

    names = STREAMS[:3] if arguments.stream == "all" else (arguments.stream,)
    methods = arguments.method or list(METHODS)
    if unknown := [m for m in methods if m not in METHODS]:
        raise ValueError(f"unknown method {unknown[0]!r}; known: {', '.join(METHODS)}")
    base = load_base(arguments.base, arguments.data, arguments.cache, quick=arguments.quick)
    plan = Plan(
        readout=arguments.readout,
        epochs=arguments.epochs,
        tune=not (arguments.no_tuning or arguments.quick),
        prompt_sample=16 if arguments.quick else 64,
    )
    seeds = min(arguments.seeds, 2) if arguments.quick else arguments.seeds
    store = Store(arguments.cache / "results")
    for name in names:
        dataset = load(name, arguments.data)
        if arguments.quick:
            dataset = sliced(dataset, classes=12, tasks=3, per_class=20)
        elif arguments.per_class:
            dataset = sliced(
                dataset,
                classes=len(dataset.classes),
                tasks=dataset.tasks,
                per_class=arguments.per_class,
            )
        study = Study(base, dataset, arguments.cache, store, plan)
        found = []
        with _bar(f"{base.name} on {name}", seeds * len(methods)) as advance:
            for seed in range(seeds):  # seed by seed, so that a stopped study is balanced
                for method in methods:
                    advance(f"{method}, seed {seed}")
                    found.append(study.run(method, seed))
        print(summary(found))


def _translate(arguments: argparse.Namespace) -> None:
    from nestling.continual.study import Store
    from nestling.continual.translation_study import run_translation

    store = Store(arguments.cache / "results")
    with _bar("translation", None) as advance:
        table = run_translation(
            arguments.data,
            arguments.cache,
            store,
            seeds=min(arguments.seeds, 1) if arguments.quick else arguments.seeds,
            manchu=arguments.manchu,
            quick=arguments.quick,
            say=advance,
        )
    print(table)


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
