"""Learn classes (or languages) one task after another; compare methods.

examples:
  python -m studies continual banking77 --data ../shared/data
  python -m studies continual all --data ../shared/data --seeds 5      the whole study, resumable
  python -m studies continual clinc150 --method cms-4 --method ewc --base hope --data DATA
  python -m studies continual banking77 --base SmolLM2-135M.gguf --per-class 40 --data DATA
  python -m studies continual clinc150 --quick --data DATA             a slice, about a minute
  python -m studies continual translate --data DATA                    new languages in sequence
  python -m studies continual page --out docs/results                  the results page only

Every run is one JSON file under --cache; start the same command again and it goes on. With --out a
copy of all runs lies beside the page and stands in for a cache that is gone. Settings are chosen on
a validation stream that the reported seeds never use.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nestling.host import keep_memory
from nestling.train.progress import preparing
from studies.continual import languages, page, study
from studies.continual.base import load_base
from studies.continual.methods import METHODS
from studies.continual.streams import STREAMS, load, sliced
from studies.continual.study import Plan, Stage, Study, default_methods, stages
from studies.harness.command import watched
from studies.harness.store import Store

__all__ = ["main"]


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    about, _, examples = (__doc__ or "").partition("\n\n")
    made = argparse.ArgumentParser(
        prog="python -m studies continual",
        description=about,
        epilog=examples,
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
    """Run what is missing, print tables, and write the pages if asked."""
    given = parser().parse_args(arguments)
    known = (*STREAMS, "all", "translate", "page")
    if given.stream not in known:
        raise ValueError(f"unknown stream {given.stream!r}; known: {', '.join(known)}")
    if given.seeds < 1:
        raise ValueError(f"--seeds must be at least 1; got {given.seeds}")
    if given.stream == "page":
        given.out = given.out or Path("docs/results")
    else:
        if given.data is None:
            raise ValueError("--data must name the folder of the data sets")
        keep_memory()
        if given.stream != "translate":
            for stage in _stages(given):
                _classify(given, stage)
        if given.stream in ("translate", "all"):
            _translate(given)
    if given.out is not None:
        _write(given)
    return 0


def _store(given: argparse.Namespace, name: str) -> Store:
    """The runs; those of a page that lies in --out stand in for what the cache lacks."""
    kept = given.out is not None and not given.quick
    copy = given.out / f"{name}.json" if kept else None
    return Store(given.cache / name, study=name, copy=copy, needs=("facts",))


def _write(given: argparse.Namespace) -> None:
    """The pages of what was asked for, and a copy of the runs beside each."""
    made = []
    for name, without, write, packed in (
        ("continual", ("translate",), page.write_page, study.packed),
        ("languages", tuple(STREAMS), languages.write_page, languages.packed),
    ):
        store = _store(given, name)
        if given.stream in without:
            continue
        path = write(store, given.out, quick=given.quick)
        if path is not None and store.copy is not None:
            store.gather(packed)
        made += [path] if path is not None else []
    if not made:
        raise ValueError(f"{given.cache}: no results yet; run `python -m studies continual STREAM`")
    print("\n".join(f"page: {path}" for path in made))


def _stages(given: argparse.Namespace) -> list[Stage]:
    """What to run: the whole study, or one stream as the options say."""
    methods = tuple(given.method or ())
    if unknown := [m for m in methods if m not in METHODS]:
        raise ValueError(f"unknown method {unknown[0]!r}; known: {', '.join(METHODS)}")
    if given.stream == "all":
        return [
            replace(stage, methods=tuple(m for m in stage.methods if not methods or m in methods))
            for stage in stages(given.pretrained)
        ]
    return [
        Stage(
            base=given.base,
            stream=given.stream,
            methods=methods or default_methods(given.readout),
            readout=given.readout,
            per_class=given.per_class,
        )
    ]


def _classify(given: argparse.Namespace, stage: Stage) -> None:
    quick = given.quick
    base = load_base(stage.base, given.data, given.cache, quick=quick)
    dataset = load(stage.stream, given.data)
    if quick:
        dataset = sliced(dataset, classes=12, tasks=3, per_class=20)
    elif stage.per_class:
        count = len(dataset.classes)
        dataset = sliced(dataset, classes=count, tasks=dataset.tasks, per_class=stage.per_class)
    plan = Plan(
        readout=stage.readout,
        tune=not (given.no_tuning or quick),
        prompt_sample=16 if quick else 64,
    )
    store, tuned = _store(given, "continual"), None
    if stage.tuned is not None and plan.tune:
        other = load_base(stage.tuned[0], given.data, given.cache)
        tuned = Study(other, load(stage.tuned[1], given.data), given.cache, store, plan)
    with preparing(f"the texts of {dataset.name} with {base.name}") as seen:
        made = Study(base, dataset, given.cache, store, plan, tuned=tuned, progress=seen)
    count = min(given.seeds, 2) if quick else given.seeds
    seeds = range(given.first_seed, given.first_seed + count)
    jobs = [(method, seed) for seed in seeds for method in stage.methods]  # balanced when stopped
    what = f"{base.name} on {stage.stream}, {stage.readout}"
    found = [
        made.run(*job) for job in watched(jobs, lambda job: f"{what}: {job[0]}, seed {job[1]}")
    ]
    print(f"{what}\n{page.summary(found)}")


def _translate(given: argparse.Namespace) -> None:
    store = _store(given, "languages")
    languages.run_all(
        given.data,
        given.cache,
        store,
        seeds=min(given.seeds, 1) if given.quick else given.seeds,
        first=given.first_seed,
        manchu_folder=given.manchu,
        quick=given.quick,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print("\n".join(languages.tables(store, quick=given.quick)))
