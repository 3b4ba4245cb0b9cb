"""The study: tune on the validation stream, run every seed on the test stream, keep every run.

One JSON file per run, so that a stopped study goes on where it was, and a results page can be made
at any time from what is there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from nestling.continual import metrics
from nestling.continual.base import Base
from nestling.continual.features import Encoded, Features, features_of
from nestling.continual.methods import METHODS, Setting, Setup, build
from nestling.continual.protocol import run_stream
from nestling.continual.streams import Dataset, class_order
from nestling.files import write_atomic

__all__ = ["TUNING_SEED", "Plan", "Store", "Study"]

TUNING_SEED = 1000
"""The class order that settings are chosen on; never one of the reported seeds."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is the same for every method of a study."""

    readout: str = "head"
    epochs: int = 1
    rows: int = 16
    tuning_share: float = 0.25  # of the training data, when settings are tried
    prompt_sample: int = 64  # test texts that prompting methods are asked about
    tune: bool = True

    def __post_init__(self) -> None:
        if not 0.0 < self.tuning_share <= 1.0:
            raise ValueError(f"tuning_share must be in (0, 1]; got {self.tuning_share}")


class Store:
    """Results by key, one file each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, parts: Sequence[str], facts: Any, run: Callable[[], Any]) -> dict[str, Any]:
        """The stored result for these facts, or `run()` and keep it."""
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:10]
        path = self.folder.joinpath(*parts[:-1]) / f"{parts[-1]}-{digest}.json"
        if path.is_file():
            stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return stored
        result = {"facts": facts, **run()}
        write_atomic(path, (json.dumps(result) + "\n").encode())
        return result

    def read(self) -> Iterator[dict[str, Any]]:
        """All final results."""
        for path in sorted(self.folder.rglob("seed*.json")):
            yield json.loads(path.read_text(encoding="utf-8"))


class Study:
    """One base model on one stream."""

    def __init__(
        self, base: Base, dataset: Dataset, cache: Path, store: Store, plan: Plan | None = None
    ) -> None:
        self.base, self.dataset, self.store = base, dataset, store
        self.plan = plan or Plan()
        self.features = features_of(base, dataset, cache)

    def run(self, method: str, seed: int) -> dict[str, Any]:
        """The result of a method for a seed: its class order, weights' and examples' order."""
        if seed == TUNING_SEED:
            raise ValueError(f"seed {seed} is the tuning seed; take another")
        setting = self.setting(method)
        facts = self._facts(method, setting, seed)
        where = (self.base.name, self.dataset.name, self.plan.readout, method, f"seed{seed}")
        return self.store.get(where, facts, lambda: self._run(method, setting, seed, "test"))

    def setting(self, method: str) -> dict[str, Any]:
        """The settings with the best average accuracy on the validation stream."""
        if method not in METHODS:
            raise ValueError(f"unknown method {method!r}; known: {', '.join(METHODS)}")
        arm = METHODS[method]
        best = dict(arm.default)
        if not self.plan.tune:
            return best
        for changes in (arm.first, arm.second):
            tried = [best] if changes is arm.second else []
            tried += [{**best, **change} for change in changes]
            if len(tried) > 1:
                best = max(tried, key=lambda s: self._try(method, s))
        return best

    def _try(self, method: str, setting: Setting) -> float:
        facts = self._facts(method, setting, TUNING_SEED)
        where = (self.base.name, self.dataset.name, self.plan.readout, method, "tuning")
        stored = self.store.get(
            where, facts, lambda: self._run(method, setting, TUNING_SEED, "valid")
        )
        return metrics.average_accuracy(stored["matrix"])

    def _run(self, method: str, setting: Setting, seed: int, split: str) -> dict[str, Any]:
        plan, tuning = self.plan, split == "valid"
        train = self.features.train
        test: Encoded = self.features.valid if tuning else self.features.test
        if tuning and plan.tuning_share < 1.0:
            train = _share(train, plan.tuning_share)
        if METHODS[method].group == "prompt":
            test = _balanced(test, plan.prompt_sample, class_order(self.dataset, seed), seed)
        setup = Setup(
            base=self.base,
            features=Features(train=train, valid=test, test=test, labels=self.features.labels),
            classes=self.dataset.classes,
            readout=plan.readout,
            epochs=plan.epochs,
            rows=plan.rows,
            seed=seed,
        )
        learner = build(method, setup, setting)
        return run_stream(learner, train, test, class_order(self.dataset, seed)).to_json()

    def _facts(self, method: str, setting: Setting, seed: int) -> dict[str, Any]:
        plan = self.plan
        return {
            "base": self.base.name,
            "stream": self.dataset.name,
            "classes": len(self.dataset.classes),
            "examples": len(self.dataset.train),
            "readout": plan.readout,
            "epochs": plan.epochs,
            "rows": plan.rows,
            "method": method,
            "setting": dict(setting),
            "seed": seed,
            **({"share": plan.tuning_share} if seed == TUNING_SEED else {}),
        }


def _share(data: Encoded, share: float) -> Encoded:
    """The first examples of every class."""
    kept = []
    for label in data.y.unique():
        own = (data.y == label).nonzero().flatten()
        kept.append(own[: max(1, int(len(own) * share))])
    return data.at(torch.cat(kept).sort().values)


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
