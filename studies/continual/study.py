"""The study: tune on the validation stream, run every seed on the test stream, keep every run.

One JSON file per run, so that a stopped study goes on where it was, and a results page can be made
at any time from what is there.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from studies.continual.base import Base
from studies.continual.features import Encoded, Progress, features_of
from studies.continual.methods import METHODS, Setting, Setup, build
from studies.continual.protocol import run_stream
from studies.continual.streams import Dataset, class_order
from studies.harness.store import Store

__all__ = ["FIRST_SEED", "TUNING_SEED", "Plan", "Store", "Study", "packed"]

TUNING_SEED = 1000
"""The class order that settings are chosen on; never one of the reported seeds."""
FIRST_SEED = 10
"""Reported seeds begin here; 0 to 9 were looked at while the methods were built."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is the same for every method of a study."""

    readout: str = "head"
    rows: int = 32
    prompt_sample: int = 64  # test texts that prompting methods are asked about
    tune: bool = True

    def __post_init__(self) -> None:
        if self.rows < 1 or self.prompt_sample < 1:
            raise ValueError(
                f"rows and prompt_sample must be at least 1; got {self.rows}, {self.prompt_sample}"
            )


class Study:
    """One base model on one stream; `tuned`: another study whose settings are used.

    progress: told how many texts the base model has read, while they are encoded.
    """

    def __init__(
        self,
        base: Base,
        dataset: Dataset,
        cache: Path,
        store: Store,
        plan: Plan | None = None,
        *,
        tuned: Study | None = None,
        progress: Progress = None,
    ) -> None:
        self.base, self.dataset, self.store, self.tuned = base, dataset, store, tuned
        self.plan = plan or Plan()
        self.features = features_of(base, dataset, cache, progress=progress)

    def run(self, method: str, seed: int) -> dict[str, Any]:
        """The result of a method for a seed: its class order, weights' and examples' order."""
        if seed == TUNING_SEED:
            raise ValueError(f"seed {seed} is the tuning seed; take another")
        setting = self.setting(method)
        facts = self._facts(method, setting, seed)
        run = self._where(method, f"seed{seed}")
        return self.store.get(run, lambda: self._run(method, setting, seed, "test"), facts)

    def setting(self, method: str) -> dict[str, Any]:
        """The settings with the best average accuracy on the validation stream."""
        if method not in METHODS:
            raise ValueError(f"unknown method {method!r}; known: {', '.join(METHODS)}")
        if self.tuned is not None:
            return self.tuned.setting(method)
        arm = METHODS[method]
        default = dict(arm.default)
        first = arm.label if arm.label and self.plan.readout == "label" else arm.first
        if not (self.plan.tune and first):
            return default

        def ranked(tried: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return sorted(tried, key=lambda s: self._try(method, s), reverse=True)

        best = ranked([{**default, **change} for change in first])[:2]
        return ranked([best[0], *({**one, **more} for one in best for more in arm.second)])[0]

    def _try(self, method: str, setting: Setting) -> float:
        """A setting on the whole training data, judged by the validation split."""
        facts = self._facts(method, setting, TUNING_SEED)
        stored = self.store.get(
            self._where(method, "tuning"),
            lambda: self._run(method, setting, TUNING_SEED, "valid"),
            facts,
        )
        return statistics.fmean(stored["matrix"][-1])

    def _where(self, method: str, name: str) -> tuple[str, ...]:
        return self.base.name, self.dataset.name, self.plan.readout, method, name

    def _run(self, method: str, setting: Setting, seed: int, split: str) -> dict[str, Any]:
        plan, train = self.plan, self.features.train
        test: Encoded = self.features.valid if split == "valid" else self.features.test
        if METHODS[method].group in ("prompt", "adapt"):
            test = _balanced(test, plan.prompt_sample, class_order(self.dataset, seed), seed)
        setup = Setup(
            base=self.base,
            features=replace(self.features, valid=test, test=test),
            classes=self.dataset.classes,
            readout=plan.readout,
            rows=plan.rows,
            seed=seed,
        )
        learner = build(method, setup, setting)
        return run_stream(learner, train, test, class_order(self.dataset, seed)).to_json()

    def _facts(self, method: str, setting: Setting, seed: int) -> dict[str, Any]:
        source = self.tuned or self
        return {
            "base": self.base.name,
            "stream": self.dataset.name,
            "classes": len(self.dataset.classes),
            "examples": len(self.dataset.train),
            "readout": self.plan.readout,
            "rows": self.plan.rows,
            "method": method,
            "setting": dict(setting),
            "tuned on": f"{source.base.name}, {source.dataset.name}",
            "seed": seed,
        }


def packed(run: dict[str, Any]) -> dict[str, Any] | None:
    """What the copy of the runs keeps of one on a stream: of a trial only what decides, the end."""
    facts = run["facts"]
    if facts.get("kind") == "translation" or facts["base"].endswith("-quick"):
        return None
    return run | {"matrix": run["matrix"][-1:]} if facts["seed"] == TUNING_SEED else run


def _balanced(data: Encoded, count: int, tasks: Sequence[Sequence[int]], seed: int) -> Encoded:
    """A sample that takes tasks in turn, and within a task its classes in turn."""
    generator = torch.Generator().manual_seed(seed)
    queues: list[list[int]] = []
    for task in tasks:
        own = [(data.y == label).nonzero().flatten().tolist() for label in task]
        mixed = [row for turn in zip_longest(*own) for row in turn if row is not None]
        first = mixed[: len(task)]
        order = torch.randperm(len(first), generator=generator).tolist()
        queues.append([first[i] for i in order] + mixed[len(task) :])
    picked = [row for turn in zip_longest(*queues) for row in turn if row is not None]
    return data.at(torch.tensor(picked[:count]))
