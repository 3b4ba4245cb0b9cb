"""State tracking, Table 5: six formal languages, trained on lengths up to 50, tested to 100.

    python -m studies older.formal               tune, run all seeds (resumable), write the page
    python -m studies older.formal --report            only write the page
    python -m studies older.formal --arms hope --seeds 30 31 32 33 34      more seeds of one model

A string counts only if every position is right. bin0: lengths as in training; bin1: 51-100. No
positional encoding; the last weights are tested, whatever they are. Every arm has the same two
trials of its learning rate per language, judged on a seed of their own by training on lengths up to
25 and testing on both these and 26-50: how well a rate carries over to greater lengths is seen
without a look at bin1.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nestling.host import keep_memory
from nestling.models import presets
from studies.harness.small import Batch, Store, arm_of, parameters, predict, train_all, watched
from studies.older.formal_report import page
from studies.tasks.formal import BIN0, BIN1, LANGUAGES, Strings, merge, score, strings

SIZE = presets.Size(width=32, layers=1, heads=2, vocabulary=8, parameters=24_000)
STEPS, LONGER, BATCH = 600, {"shuffle-2": 2400}, 16
TUNING_SEED, SEEDS, FRESH = 100, (10, 11, 12, 13, 14), {"shuffle-2": (15, 16, 17, 18, 19)}
SHORT, LONG = (2, 25), (26, 50)

# Rates up to twice the retention let a write flip a sign. One head starts with slow writes, one
# with writes that replace. Chunk 1 without the residual form is Eq. 83-88 to the letter.
PRINTED = {
    "chunk": 1,
    "chunk_others": 1,
    "negative": True,
    "rates": (0.01, 1.0),
    "residual": False,
}
# The slow heads add and forget nothing, so that they count; memories make rates and retentions.
TWO = PRINTED | {
    "residual": True,
    "adaptive": ("eta", "alpha"),
    "adding": 1,
    "retain": 0.99995,
    "retain_max": 0.99999,
}
HOPE = TWO | {"heads": 4, "adding": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "hope": ("hope", HOPE),
    "hope_two": ("hope", TWO),
    "hope_erasing": ("hope", TWO | {"adding": 0}),
    "hope_forgetting": ("hope", TWO | {"retain": 0.9985, "retain_max": 0.9999}),
    "hope_printed": ("hope", PRINTED),
    "transformer": ("transformer", {"rope": 0.0, "conv": 4}),
    "linear": ("linear", {}),
    "deltanet": ("deltanet", {}),
    "deltanet_negative": ("deltanet", {"negative": True}),
    "linear_four": ("linear", {"heads": 4}),
    "deltanet_four": ("deltanet", {"negative": True, "heads": 4}),
    "lstm": ("lstm", {}),
}
RATES = (3e-3, 1e-2)
"""Trials of the learning rate, the same for every arm."""

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: a model, a language, settings and a seed; lengths to train on and to test on."""

    arm: str
    language: str
    rate: float
    seed: int
    lengths: tuple[int, int]
    bins: tuple[tuple[str, tuple[int, int]], ...]

    @property
    def key(self) -> str:
        if self.lengths == SHORT:
            return f"tune/{self.arm}/{self.language}/{self.rate:g}"
        return f"{self.arm}/{self.language}/{self.seed}"

    def build(self) -> torch.nn.Module:
        """The untrained model."""
        name, options = MODELS[self.arm]
        heads = options.get("heads", SIZE.heads)
        options = {key: value for key, value in options.items() if key != "heads"}
        torch.manual_seed(self.seed)
        return arm_of(name, replace(SIZE, heads=heads), options)

    def batches(self) -> Callable[[int], Batch]:
        """Random batches of strings, merged."""
        data = strings(LANGUAGES[self.language], 10_000, self.lengths, seed=1000 + self.seed)
        random = torch.Generator().manual_seed(self.seed)

        def draw(_: int) -> Batch:
            rows = torch.randint(len(data), (BATCH,), generator=random)
            some = merge(Strings(tokens=data.tokens[rows], targets=data.targets[rows]))
            return some.tokens, some.targets, some.weight

        return draw

    def test(self, model: torch.nn.Module, losses: list[float]) -> dict[str, Any]:
        """The numbers of a trained model."""
        numbers = {"loss": sum(losses[-20:]) / 20, "parameters": parameters(model)}
        for i, (name, window) in enumerate(self.bins):
            test = strings(LANGUAGES[self.language], 2_000, window, seed=10_000 * i + self.seed)
            few = merge(test)
            said = predict(model, few.tokens)[few.row]
            wanted = test.targets[:, : said.shape[1]]
            numbers[name], numbers[f"{name}_tokens"] = score(said, wanted)
        return numbers | {"rate": self.rate}


def run(jobs: list[Job]) -> list[dict[str, Any]]:
    """Train and test; several jobs (of Hope) go in lockstep."""
    models = [job.build() for job in jobs]
    draws = [job.batches() for job in jobs]
    steps = LONGER.get(jobs[0].language, STEPS)
    losses = train_all(models, draws, steps=steps, rates=[job.rate for job in jobs])
    return [job.test(*rest) for job, *rest in zip(jobs, models, losses, strict=True)]


def groups(jobs: list[Job], store: Store) -> list[list[Job]]:
    """Jobs that are still to do; Hope's of one language go five at a time, in lockstep."""
    left = [job for job in jobs if job.key not in store]
    cells: dict[tuple[str, str], list[Job]] = {}
    for job in left:
        cells.setdefault((job.arm, job.language), []).append(job)
    parts = []
    for (arm, _), same in cells.items():
        size = 5 if MODELS[arm][0] == "hope" else 1
        parts += [same[i : i + size] for i in range(0, len(same), size)]
    return parts


def work(jobs: list[Job], store: Store) -> None:
    """Run what is not stored yet."""
    for group in watched(groups(jobs, store), lambda g: ", ".join(job.key for job in g)):
        begin = time.process_time()
        found = run(group)
        seconds = round((time.process_time() - begin) / len(group), 1)
        for job, numbers in zip(group, found, strict=True):
            store.add(job.key, numbers | {"seconds": seconds})
            print(job.key, numbers, flush=True)


def trials(arm: str, language: str) -> list[Job]:
    """Every learning rate, trained on lengths up to 25 and tested on these and on 26-50."""
    bins = (("short", SHORT), ("long", LONG))
    return [
        Job(arm=arm, language=language, rate=rate, seed=TUNING_SEED, lengths=SHORT, bins=bins)
        for rate in RATES
    ]


def chosen(arm: str, language: str, store: Store) -> float:
    """The rate with the most strings right at both lengths, then the most positions at 26-50, then
    the smaller one."""
    found = [store.get(job.key) for job in trials(arm, language)]
    return -max((f["short"] + f["long"], f["long_tokens"], -f["rate"]) for f in found)[-1]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--languages", nargs="+", default=list(LANGUAGES), choices=LANGUAGES)
    parser.add_argument("--seeds", nargs="+", type=int, help="default: five per language")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "formal")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "results" / "formal.md")
    parser.add_argument("--report", action="store_true", help="only write the page")
    options = parser.parse_args(arguments)
    keep_memory()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    store = Store(options.runs, options.page.with_suffix(".json"))
    if not options.report:
        pairs = [(arm, name) for name in options.languages for arm in options.arms]
        work([job for pair in pairs for job in trials(*pair)], store)
        bins = (("bin0", BIN0), ("bin1", BIN1))
        picked = {pair: chosen(*pair, store) for pair in pairs}
        jobs = [
            Job(arm=arm, language=name, rate=rate, seed=seed, lengths=BIN0, bins=bins)
            for (arm, name), rate in picked.items()
            for seed in options.seeds or FRESH.get(name, SEEDS)
        ]
        work(jobs, store)
    print(page(store.gather(), options.page, SIZE, STEPS, LONGER, BATCH))
