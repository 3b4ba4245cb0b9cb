"""All studies of the round as one queue: jobs in processes of one thread, N at a time.

    python -m studies queue                     run everything that is left, two jobs at a time
    python -m studies queue --list              say what is left, and how long it may take
    python -m studies queue lm mad --jobs 1     only these studies, one at a time

Jobs are those of `QUEUE`, in this order; trials of an arm come before its seeds, and a study whose
jobs are all done gets its page. Every job is a process of its own (`python -m studies NAME --only
KEY`) with a log under runs/queue; a job that failed is named at the end and not tried again until
the next start. Stop it anywhere and start it again: stored runs stay, and a job that was killed
goes on from its checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import importlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from studies.harness.command import DATA, ROOT, RUNS, ready, store_of
from studies.harness.store import Store
from studies.harness.study import Job, Study

__all__ = ["QUEUE", "main"]

QUEUE = (
    *("lm", "levels", "kept", "formal", "recall", "mad", "ablations", "optimizers", "facts"),
    *("context", "babilong", "niah", "levels_chunks"),  # long contexts
)
"""The studies of the round, first things first: later ones use the models of the first."""


class Entry(NamedTuple):
    """A study in the queue, its runs, and the folders its jobs are told."""

    study: Study
    store: Store
    told: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.study.name


class Started(NamedTuple):
    """A job that runs."""

    entry: Entry
    job: Job
    process: subprocess.Popen[bytes]
    begin: float


def _entry(name: str, options: argparse.Namespace) -> Entry:
    folders = argparse.Namespace(
        quick=options.quick, runs=options.runs / name, out=options.out, data=options.data
    )
    ready(name, folders)
    study = importlib.import_module(f"studies.{name}").study(options.quick)
    told = ("--runs", str(folders.runs), "--data", str(options.data))
    told += ("--out", str(folders.out), *(("--quick",) if options.quick else ()))
    return Entry(study, store_of(study, folders), told)


def left(entry: Entry) -> int:
    """Jobs that are not done, those that wait for trials among them."""
    study, there = entry.study, set(entry.store.runs())
    trials = {j.key for t in study.tasks for a in study.arms for j in study.trials(t, a)}
    runs = {f"run/{t}/{a}/{s}" for t in study.tasks for a in study.arms for s in study.seeds}
    return len((trials | runs) - there)


def estimate(entries: Sequence[Entry], at_once: int) -> str:
    """How long what is left may take, from the median seconds of what is done."""
    hours, unknown = 0.0, []
    for entry in entries:
        found = [run["seconds"] for run in entry.store.runs().values()]
        if found:
            hours += left(entry) * statistics.median(found) / 3600 / at_once
        elif left(entry):
            unknown.append(entry.name)
    more = f", and {', '.join(unknown)} (nothing done yet)" if unknown else ""
    return f"about {hours:.1f} h{more}"


def _end_with_parent() -> None:
    """On Linux a job ends when the queue is killed, so that no job runs twice."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _logged(entry: Entry, job: Job, logs: Path) -> subprocess.Popen[bytes]:
    """Start a job in a process of one thread."""
    path = logs / entry.name / entry.store.path(job.key).relative_to(entry.store.folder)
    path = path.with_suffix(".log")
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "studies", entry.name, "--only", job.key, *entry.told]
    alone = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with open(path, "ab") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            preexec_fn=_end_with_parent,
            env={**os.environ, **alone, "PYTHONPATH": paths},
        )


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One queue for a folder at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise ValueError(f"{folder}: a queue runs here, process {file.read()}") from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _next(entries: Sequence[Entry], busy: set[tuple[str, str]]) -> tuple[Entry, Job] | None:
    for entry in entries:
        for job in entry.study.jobs(entry.store):
            if (entry.name, job.key) not in busy:
                return entry, job
    return None


def work(entries: Sequence[Entry], at_once: int, logs: Path) -> list[str]:
    """Run all jobs; returns the names of those that failed."""
    for entry in entries:  # finished, and stopped before the page
        if not left(entry):
            _page(entry)
    running: list[Started] = []
    tried: set[tuple[str, str]] = set()
    failed: list[str] = []
    try:
        while True:
            while len(running) < at_once and (found := _next(entries, tried)):
                entry, job = found
                tried.add((entry.name, job.key))
                running.append(Started(entry, job, _logged(entry, job, logs), time.monotonic()))
            if not running:
                return failed
            time.sleep(0.2)
            for one in [r for r in running if r.process.poll() is not None]:
                running.remove(one)
                name = f"{one.entry.name} {one.job.key}"
                good = one.process.returncode == 0 and one.job.key in one.entry.store
                failed += [] if good else [name]
                word = "done" if good else "FAILED"
                count = sum(map(left, entries))
                seconds = time.monotonic() - one.begin
                print(f"{word} {name}, {seconds:.0f} s; {count} left, {estimate(entries, at_once)}")
                sys.stdout.flush()
                if good and not left(one.entry):
                    _page(one.entry)
    finally:
        for one in running:
            one.process.terminate()
        for one in running:
            one.process.wait()


def _page(entry: Entry) -> None:
    assert entry.store.copy is not None
    page = entry.study.page(entry.study, entry.store.gather())
    print(f"page {page.write(entry.store.copy.parent, entry.study.page_name)}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(
        prog="python -m studies queue",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=f"of {', '.join(QUEUE)}")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="jobs at a time")
    parser.add_argument("--list", action="store_true", help="say what is left, and do nothing")
    parser.add_argument("--quick", action="store_true", help="the slices that CI runs")
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of all runs")
    parser.add_argument("--out", type=Path, help="folder of the pages (default: docs/results)")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the data sets")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.studies if name not in QUEUE]:
        raise ValueError(f"unknown study {unknown[0]!r}; the queue has {', '.join(QUEUE)}")
    if options.jobs < 1:
        raise ValueError(f"--jobs must be at least 1; got {options.jobs}")
    entries = [_entry(name, options) for name in options.studies or QUEUE]
    for entry in entries:
        print(f"{entry.name:<12} {left(entry):5} of {entry.study.total():5} jobs left")
    print(f"in all {sum(map(left, entries))}, {estimate(entries, options.jobs)}", flush=True)
    if options.list:
        return 0
    logs = options.runs / "queue"
    with _alone(logs):
        failed = work(entries, options.jobs, logs)
    for name in failed:
        print(f"failed: {name}; its log is under {logs}", file=sys.stderr)
    return 1 if failed else 0
