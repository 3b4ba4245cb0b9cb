"""The command line that every study of `harness.study` has."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from nestling.machine import keep_memory
from studies.harness.store import Store
from studies.harness.study import Study

__all__ = ["DATA", "PAGES", "ROOT", "RUNS", "common", "ready", "run_study", "store_of", "watched"]

ROOT = Path(__file__).resolve().parents[2]
PAGES, RUNS = ROOT / "docs" / "results", ROOT / "runs"
DATA = ROOT.parent / "shared" / "data"
T = TypeVar("T")


def common(name: str, about: str) -> argparse.ArgumentParser:
    """A parser with what every study takes."""
    parser = argparse.ArgumentParser(
        prog=f"python -m studies {name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a slice that shows that it runs")
    parser.add_argument("--report", action="store_true", help="only write the page")
    parser.add_argument("--out", type=Path, help="folder of the pages (default: docs/results)")
    parser.add_argument("--runs", type=Path, help=f"folder of the runs (default: runs/{name})")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the data sets")
    return parser


def ready(name: str, options: argparse.Namespace) -> None:
    """Fill in folders; quick runs have their own, so that they never mix with results."""
    options.runs = options.runs or (RUNS / "quick" if options.quick else RUNS) / name
    if options.quick and options.out is None:
        options.out = options.runs / "pages"
    options.out = options.out or PAGES
    keep_memory()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)


def store_of(study: Study, options: argparse.Namespace) -> Store:
    """The runs of a study; the copy beside its page stands in for what the folder lacks.

    Beside `stored` lie the checkpoints of jobs (`work`) and the models they keep (`models`).
    """
    copy = options.out / f"{study.page_name}.json"
    name = f"{study.name}, quick" if options.quick else study.name
    return Store(options.runs / "stored", study=name, copy=copy, needs=study.needs)


def run_study(
    make: Callable[[bool], Study], about: str, arguments: Sequence[str] | None = None
) -> int:
    """Run what is missing of a study, in this process, and write its page."""
    name = make(True).name
    parser = common(name, about)
    parser.add_argument("--seeds", type=int, nargs="+", help="default: the protocol's")
    parser.add_argument("--arms", nargs="+", help="only these arms")
    parser.add_argument("--tasks", nargs="+", help="only these tasks")
    parser.add_argument("--only", metavar="KEY", help="one job, by the key of its run; no page")
    parser.add_argument("--list", action="store_true", help="say what is left, and do nothing")
    options = parser.parse_args(arguments)
    ready(name, options)
    study = make(options.quick)
    _known("--arms", options.arms, study.arms)
    _known("--tasks", options.tasks, (*study.tasks, *study.more_tasks))
    store = store_of(study, options)
    chosen = {key: getattr(options, key) or () for key in ("tasks", "arms", "seeds")}
    if options.list:
        print("\n".join(job.key for job in study.jobs(store, **chosen)))
        return 0
    if options.only is not None:
        found = {job.key: job for job in study.jobs(store)}
        if options.only in found:
            study.do(found[options.only], store, options.data)
        elif options.only not in store:
            raise ValueError(f"--only {options.only}: no such job can run now; --list shows them")
        return 0
    while not options.report and (jobs := list(study.jobs(store, **chosen))):
        for job in watched(jobs, lambda job: f"{name}: {job.key}"):
            study.do(job, store, options.data)
    runs = store.gather()
    if not any(key.startswith("run/") for key in runs):
        raise ValueError(f"{options.runs}: no finished runs yet, so there is no page")
    print(study.page(study, runs).write(options.out, study.page_name))
    return 0


def _known(name: str, given: Sequence[str] | None, known: Sequence[str] | dict) -> None:
    if unknown := [each for each in given or () if each not in known]:
        raise ValueError(f"{name}: unknown {unknown[0]!r}; known: {', '.join(known)}")


def watched(items: Sequence[T], title: Callable[[T], str]) -> Iterator[T]:
    """The items, with a bar in a terminal and a line each elsewhere."""
    if sys.stderr.isatty():
        from rich.progress import Progress

        with Progress(transient=True) as bar:
            task = bar.add_task("", total=len(items))
            for item in items:
                bar.update(task, description=title(item)[:60])
                yield item
                bar.advance(task)
        return
    for i, item in enumerate(items):
        print(f"[{i + 1}/{len(items)}] {title(item)}", file=sys.stderr, flush=True)
        yield item
