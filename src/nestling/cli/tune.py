"""`nestling tune`."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nestling.cli import Parser
from nestling.cli.options import number, whole

if TYPE_CHECKING:
    from nestling.train.recipe import Recipe
    from nestling.train.search import Axis


_EXAMPLES = """examples:
  nestling tune tiny run.steps=100                              optim.lr alone, 8 trials
  nestling tune hope optim.lr=1e-3..1e-2 level.fast.rate=0.1..2 level.slow.chunk=256|512
  nestling tune small data.train=book.txt data.valid=other.txt 'optim.name=adamw|m3' \\
      optim.lr=5e-4..2e-2 --trials 24 --jobs 2 --minutes 120 --sampler tpe

A range is low..high (whole numbers between whole ends; logarithmic where the ends are three times
apart or more), choices are a|b|c, anything else is a fixed change as for `nestling train`. Levels
have keys of their own: level.NAME.rate, level.NAME.chunk, level.NAME.retain.

Every trial is a training run in a folder of its own, judged by its best validation loss. Stop it
anywhere and start the same command again: finished trials stay, unfinished ones go on."""


class Trial(NamedTuple):
    """A trial that runs."""

    number: int
    point: Mapping[str, str]
    process: subprocess.Popen[bytes]


def parser() -> Parser:
    """The command's arguments."""
    made = Parser(
        "tune",
        description="Search the settings of a recipe under a budget.",
        epilog=_EXAMPLES,
    )
    made.add_argument("recipe", help="name of a recipe (`nestling train --help` lists them)")
    made.add_argument(
        "settings", nargs="*", metavar="key=values", help="what to search, and fixed changes"
    )
    made.add_argument("--trials", type=whole(), default=8, help="how many (default: 8)")
    made.add_argument(
        "--minutes",
        type=number(lambda value: value > 0, "above 0"),
        help="start no trial after so many minutes",
    )
    made.add_argument("--jobs", type=whole(), default=1, help="trials at a time (default: 1)")
    made.add_argument(
        "--sampler",
        choices=("halton", "tpe"),
        default="halton",
        help="halton covers the space evenly; tpe learns from finished trials (needs Optuna)",
    )
    made.add_argument("--out", type=Path, help="folder of the search (default: runs/tune-RECIPE)")
    return made


def run(arguments: argparse.Namespace) -> int:
    """Search; 0 when all trials are done, 1 when none of them succeeded."""
    from nestling.files import locked
    from nestling.train.parts import check
    from nestling.train.recipe import changed, get_recipe
    from nestling.train.search import at_point, is_axis, read_space

    fixed = [s for s in arguments.settings if not is_axis(s)]
    recipe = changed(get_recipe(arguments.recipe), fixed)
    usual = f"optim.lr={recipe.optim.lr / 3:.3g}..{recipe.optim.lr * 3:.3g}"
    space = read_space([s for s in arguments.settings if is_axis(s)] or [usual])
    check(recipe)
    most = max(2, *(len(axis.choices) for axis in space)) - 1
    for place in range(most + 1):  # both ends and every choice, before any work
        point = {axis.key: axis.at(place / most * (1 - 1e-9)) for axis in space}
        check(at_point(recipe, point, _levels(recipe)))
    if arguments.sampler == "tpe":
        _propose(space, "tpe", 0, {})
    folder = arguments.out or Path("runs") / f"tune-{arguments.recipe}"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        _same_search(folder, arguments.recipe, fixed, space)
        results = _search(arguments, recipe, space, folder)
    return _tell(arguments.recipe, fixed, space, results, recipe)


def _levels(recipe: Recipe) -> list[dict[str, Any]]:
    """The levels of a recipe's model, as its configuration has them."""
    from nestling.train.parts import configuration

    return configuration(recipe).levels or []


def _same_search(folder: Path, name: str, fixed: Sequence[str], space: Sequence[Axis]) -> None:
    """Refuse to go on with another search than the one that began in this folder."""
    from nestling.files import read_json, write_atomic

    asked = {"recipe": name, "fixed": list(fixed), "space": [repr(axis) for axis in space]}
    path = folder / "search.json"
    if not path.exists():
        write_atomic(path, json.dumps(asked, indent=1).encode())
        return
    found, _ = read_json(path)
    for key, value in asked.items():
        old = found.get(key) if isinstance(found, dict) else None
        if old != value:
            raise ValueError(
                f"{folder} holds another search ({key}: {old!r}, not {value!r}); give this one its"
                " own folder (--out)"
            )


def _search(
    arguments: argparse.Namespace, recipe: Recipe, space: Sequence[Axis], folder: Path
) -> dict[int, tuple[dict[str, str], float]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    begin, running = time.monotonic(), list[Trial]()
    done = _finished(folder, arguments.trials, space)
    left = [n for n in range(arguments.trials) if n not in done]
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    )
    with bar:
        task = bar.add_task("trials", total=arguments.trials, completed=len(done))
        try:
            while left or running:
                late = arguments.minutes and time.monotonic() - begin > 60 * arguments.minutes
                while left and len(running) < arguments.jobs and not late:
                    running.append(_start(left.pop(0), recipe, space, arguments, folder, done))
                if not running:
                    break
                time.sleep(0.1)
                for trial in [t for t in running if t.process.poll() is not None]:
                    running.remove(trial)
                    done[trial.number] = _finish(trial, folder)
                    says = ", ".join(f"{k}={v}" for k, v in trial.point.items())
                    bar.console.print(
                        f"trial {trial.number}: {done[trial.number][1]:.4f}  {says}", markup=False
                    )
                    bar.update(task, completed=len(done))
        finally:
            for trial in running:
                trial.process.terminate()  # it saves, and goes on with the next start
            for trial in running:
                trial.process.wait()
    return done


def _start(
    number: int,
    recipe: Recipe,
    space: Sequence[Axis],
    arguments: argparse.Namespace,
    folder: Path,
    done: Mapping[int, tuple[dict[str, str], float]],
) -> Trial:
    """Begin a trial, or go on with one that was stopped."""
    from nestling.files import write_atomic
    from nestling.train.search import at_point

    place = folder / f"trial-{number:03d}"
    place.mkdir(exist_ok=True)
    settings = place / "point.json"
    if settings.exists():
        point = _point(settings, space)
    else:
        point = _propose(space, arguments.sampler, number, done)
        write_atomic(settings, json.dumps(point).encode())
    told = at_point(recipe, point, _levels(recipe)).lines()
    threads = str(max(1, (os.cpu_count() or 1) // arguments.jobs))
    command = [sys.executable, "-m", "nestling.cli", "train", arguments.recipe, *told]
    with open(place / "log.txt", "ab") as log:
        process = subprocess.Popen(
            [*command, "--out", str(place / "run")],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={"OMP_NUM_THREADS": threads, **os.environ},
        )
    return Trial(number, point, process)


def _propose(
    space: Sequence[Axis],
    sampler: str,
    number: int,
    done: Mapping[int, tuple[dict[str, str], float]],
) -> dict[str, str]:
    from nestling.train.search import halton, tpe

    return tpe(space, number, list(done.values())) if sampler == "tpe" else halton(space, number)


def _finish(trial: Trial, folder: Path) -> tuple[dict[str, str], float]:
    """The outcome of a trial that has ended, kept in its folder; infinity if it failed."""
    from nestling.files import write_atomic

    place = folder / f"trial-{trial.number:03d}"
    loss = _best(place / "run" / "metrics.jsonl") if trial.process.returncode == 0 else math.inf
    told = {"loss": loss if math.isfinite(loss) else None, "code": trial.process.returncode}
    write_atomic(place / "result.json", json.dumps(told).encode())
    return dict(trial.point), loss


def _best(path: Path) -> float:
    """The lowest validation loss of a run."""
    best = math.inf
    if path.exists():
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # a line that a full disk cut
                best = min(best, json.loads(line).get("validation_loss", math.inf))
    return best


def _point(path: Path, space: Sequence[Axis]) -> dict[str, str]:
    """The settings a trial was given."""
    from nestling.files import expect, read_json

    found: dict[str, str] = expect(read_json(path)[0], {axis.key: str for axis in space}, path)
    return found


def _finished(
    folder: Path, trials: int, space: Sequence[Axis]
) -> dict[int, tuple[dict[str, str], float]]:
    """Points and losses of the trials that are done."""
    from nestling.files import expect, read_json

    done = {}
    for trial in range(trials):
        place = folder / f"trial-{trial:03d}"
        if (place / "result.json").exists():
            path = place / "result.json"
            loss = expect(read_json(path)[0], {"loss": object, "code": object}, path)["loss"]
            loss = math.inf if loss is None else expect(loss, float, f"{path}: loss")
            done[trial] = _point(place / "point.json", space), loss
    return done


def _tell(
    name: str,
    fixed: Sequence[str],
    space: Sequence[Axis],
    results: Mapping[int, tuple[dict[str, str], float]],
    recipe: Recipe,
) -> int:
    """A table, the best first, and the command that trains with the best settings."""
    from rich.console import Console
    from rich.table import Table

    from nestling.train.search import at_point

    ranked = sorted(results.items(), key=lambda item: (item[1][1], item[0]))
    table = Table("trial", "validation loss", *(axis.key for axis in space))
    for trial, (point, loss) in ranked:
        shown = f"{loss:.4f}" if math.isfinite(loss) else "failed"
        table.add_row(str(trial), shown, *(point[axis.key] for axis in space))
    console = Console()
    console.print(table, markup=False)
    if not ranked or not math.isfinite(ranked[0][1][1]):
        print("nestling tune: no trial succeeded; their logs are in the folder", file=sys.stderr)
        return 1
    point = ranked[0][1][0]
    best = at_point(recipe, point, _levels(recipe))
    told = [*fixed, *(f"{k}={v}" for k, v in point.items() if not k.startswith("level."))]
    if any(key.startswith("level.") for key in point):
        told.append(f"model.fields.levels='{json.dumps(best.model.fields['levels'])}'")
    print(f"best: nestling train {name} {' '.join(told)}")
    return 0
