"""The study: tune on the validation stream, run every seed on the test stream, keep every run.

`stages` is what the whole study runs: bases, streams, readouts, slices, methods.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from studies.continual.base import Base
from studies.continual.features import Encoded, Progress, features_of
from studies.continual.methods import METHODS, Setting, Setup, build
from studies.continual.protocol import run_stream
from studies.continual.streams import STREAMS, Dataset, class_order
from studies.harness.store import Store, key_of
from studies.harness.tuning import ranked

__all__ = ["TUNING_SEED", "Plan", "Stage", "Study", "default_methods", "packed", "stages"]

TUNING_SEED = 1000
"""The class order that settings are chosen on; never one of the reported seeds."""
CORE = ("sequential", "ewc", "replay", "cms-1", "cms-4", "ncm", "lda", "joint")
READING = ("sequential", "ewc", "cms-1", "cms-4", "joint", "adapt-1", "adapt-3", "icl")
"""Methods that can answer with label texts."""


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

        def score(setting: Setting) -> float:
            return self._try(method, setting)

        some = ranked([{**default, **change} for change in first], score)[:2]
        more = [{**one, **change} for one in some for change in arm.second]
        return ranked([some[0], *more], score)[0]

    def _try(self, method: str, setting: Setting) -> float:
        """A setting on the whole training data, judged by the validation split."""
        facts = self._facts(method, setting, TUNING_SEED)
        stored = self.store.get(
            self._where(method, "tuning"),
            lambda: self._run(method, setting, TUNING_SEED, "valid"),
            facts,
        )
        return statistics.fmean(stored["matrix"][-1])

    def _where(self, method: str, name: str) -> str:
        return key_of(self.base.name, self.dataset.name, self.plan.readout, method, name)

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


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One base model on one stream; `per_class` takes a slice of the data.

    `tuned`: base and stream whose settings are used for every method, instead of trials of its own.
    """

    base: str
    stream: str
    methods: tuple[str, ...]
    readout: str = "head"
    per_class: int | None = None
    tuned: tuple[str, str] | None = None


def default_methods(readout: str) -> tuple[str, ...]:
    """The methods that make sense with a readout: `adapt` reads and answers with label texts."""
    if readout == "label":
        return READING
    return tuple(name for name, arm in METHODS.items() if arm.group != "adapt")


def stages(pretrained: str | None = None) -> Iterator[Stage]:
    """The whole study; a pretrained model, if there is one, on slices.

    Settings are chosen with the small Transformer on each stream; other base models use them, and
    DBpedia-14 uses those of DBpedia-70, for every method alike.
    """
    small, three = "transformer", tuple(STREAMS)[:3]
    for stream in three:
        yield Stage(base=small, stream=stream, methods=default_methods("head"))
    for stream in three:
        yield Stage(base="hope", stream=stream, methods=CORE, tuned=(small, stream))
    yield Stage(base=small, stream="dbpedia14", methods=CORE, tuned=(small, "dbpedia70"))
    yield Stage(base=small, stream="banking77", methods=READING[:5], readout="label")
    yield Stage(base=small, stream="banking77", methods=READING, readout="label", per_class=10)
    if pretrained is not None:
        for stream, count in zip(three, (20, 20, 10), strict=True):
            yield Stage(
                base=pretrained,
                stream=stream,
                methods=CORE,
                per_class=count,
                tuned=(small, stream),
            )
