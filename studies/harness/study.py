"""A study: arms by tasks by seeds, tuned alike, from jobs that are stored one by one.

A study is a value: what it compares, on what, how long, and how a job is done. Its jobs follow
from that: first the trials of every arm on a seed of their own, then, for the arms whose trials
are there, every seed at the setting that was best. So a study can be stopped anywhere, its jobs
can run in any number of processes, and its page can be made from whatever is there.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from studies.harness.page import Page
from studies.harness.store import Run, Store
from studies.harness.tuning import best, same_number

__all__ = ["Cell", "Job", "Setting", "Study", "by_protocol", "by_rate", "cells"]

Setting = Mapping[str, Any]


class Job(NamedTuple):
    """One run: an arm on a task with a setting and a seed; `trial`: it serves tuning only."""

    task: str
    arm: str
    setting: Setting
    seed: int
    trial: bool = False

    @property
    def key(self) -> str:
        """The name of its stored run."""
        if not self.trial:
            return f"run/{self.task}/{self.arm}/{self.seed}"
        return f"tune/{self.task}/{self.arm}/{_brief(self.setting)}"


class Context(NamedTuple):
    """The places a job may use: data, a scratch folder of its own, models to keep."""

    data: Path
    scratch: Path
    models: Path


@dataclass(frozen=True, kw_only=True)
class Study:
    """A comparison, and how it is made; `protocol` is the frozen dataclass that the page prints.

    arms: titles by name, in the order of the tables. settings: what tuning may choose from, as
    many for every arm; an arm it does not name has nothing to choose. borrowed: arms that take the
    setting of another arm, and so have no trials; given: arms whose models another study has tuned,
    and their settings; tuned_on: tasks that take those of another task. more_tasks: run only when
    asked for.
    make: does a job. judged: the number of a trial that decides; `lower`: a lower one is better.
    page: the page from all stored runs.
    """

    name: str
    protocol: Any
    tasks: Sequence[str]
    arms: Mapping[str, str]
    seeds: Sequence[int]
    tuning_seed: int
    make: Callable[[Job, Context], Run]
    judged: str
    page: Callable[[Study, Mapping[str, Run]], Page]
    page_name: str
    settings: Mapping[str, Sequence[Setting]] = field(default_factory=dict)
    lower: bool = False
    borrowed: Mapping[str, str] = field(default_factory=dict)
    given: Mapping[str, Setting] = field(default_factory=dict)
    needs: Sequence[str] = ("seconds",)
    more_tasks: Sequence[str] = ()
    tuned_on: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        others = self.borrowed.keys() | self.given.keys()
        same_number({arm: self.choices(arm) for arm in self.arms if arm not in others})
        if self.tuning_seed in self.seeds:
            raise ValueError(f"{self.name}: seed {self.tuning_seed} is for tuning; take another")

    def choices(self, arm: str) -> Sequence[Setting]:
        """The settings that tuning may choose from for an arm."""
        return self.settings.get(arm, ({},))

    def trials(self, task: str, arm: str) -> list[Job]:
        """The trials of an arm on a task; none where there is nothing to choose."""
        task, arm = self._tuned(task, arm)
        if arm in self.given or len(self.choices(arm)) == 1:
            return []
        return [Job(task, arm, s, self.tuning_seed, trial=True) for s in self.choices(arm)]

    def _tuned(self, task: str, arm: str) -> tuple[str, str]:
        return self.tuned_on.get(task, task), self.borrowed.get(arm, arm)

    def chosen(self, task: str, arm: str, store: Store) -> Setting:
        """The setting with the best trial, or the one that is given."""
        task, arm = self._tuned(task, arm)
        if arm in self.given:
            return self.given[arm]

        def score(setting: Setting) -> float:
            job = Job(task, arm, setting, self.tuning_seed, trial=True)
            return float(store.get(job.key)[self.judged])

        return best(self.choices(arm), score, lower=self.lower)

    def jobs(
        self,
        store: Store,
        *,
        tasks: Sequence[str] = (),
        arms: Sequence[str] = (),
        seeds: Sequence[int] = (),
    ) -> Iterator[Job]:
        """The jobs that can run now and are not stored, arm by arm: its trials, then its seeds.

        So a study that was stopped has whole rows, every one with all its seeds.
        """
        there = set(store.runs())
        asked: set[str] = set()
        for pair in ((t, a) for t in tasks or self.tasks for a in arms or self.arms):
            trials = [job for job in self.trials(*pair) if job.key not in there]
            yield from (job for job in trials if job.key not in asked)
            asked |= {job.key for job in trials}
            if trials:
                continue
            setting = self.chosen(*pair, store)
            jobs = (Job(*pair, setting, seed) for seed in seeds or self.seeds)
            yield from (job for job in jobs if job.key not in there)

    def total(self) -> int:
        """How many jobs the whole study has."""
        trials = {j.key for t in self.tasks for a in self.arms for j in self.trials(t, a)}
        return len(trials) + len(self.tasks) * len(self.arms) * len(self.seeds)

    def do(self, job: Job, store: Store, data: Path) -> Run:
        """Do one job and store it; a killed one goes on from its checkpoint."""
        root = store.folder.parent
        scratch = root / "work" / store.path(job.key).relative_to(store.folder).with_suffix("")
        context = Context(data, scratch, root / "models")
        run = store.get(
            job.key,
            lambda: {
                "task": job.task,
                "arm": job.arm,
                "seed": job.seed,
                "setting": dict(job.setting),
                **self.make(job, context),
            },
        )
        shutil.rmtree(context.scratch, ignore_errors=True)
        return run


def by_protocol(
    protocol: Any, arms: Mapping[str, str], make: Callable[[Job, Context, Any], Run], **own: Any
) -> Study:
    """A study with the seeds of its protocol; `make(job, context, protocol)` does a job."""
    return Study(
        protocol=protocol,
        arms=arms,
        seeds=protocol.seeds,
        tuning_seed=protocol.tuning_seed,
        make=lambda job, context: make(job, context, protocol),
        **own,
    )


def by_rate(
    protocol: Any, arms: Mapping[str, str], make: Callable[[Job, Context, Any], Run], **own: Any
) -> Study:
    """The same, whose arms choose among the protocol's rates; the lowest number judged is best."""
    rates = {arm: [{"rate": rate} for rate in protocol.rates] for arm in arms}
    return by_protocol(protocol, arms, make, **{"settings": rates, "lower": True, **own})


class Cell(NamedTuple):
    """The runs of an arm on a task by seed."""

    runs: dict[int, Run]

    def values(self, name: str) -> dict[int, float]:
        """One number of every seed's run."""
        return {seed: run[name] for seed, run in sorted(self.runs.items()) if name in run}


def cells(runs: Mapping[str, Run]) -> dict[tuple[str, str], Cell]:
    """The final runs by task and arm."""
    found: dict[tuple[str, str], Cell] = {}
    for key, run in runs.items():
        if key.startswith("run/"):
            found.setdefault((run["task"], run["arm"]), Cell({})).runs[run["seed"]] = run
    return found


def _brief(setting: Setting) -> str:
    said = (f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in setting.items())
    return ",".join(said).replace("/", "-") or "default"
