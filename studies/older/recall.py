"""In-context recall (MQAR): bind 64 keys to values, then answer for every key.

    python -m studies older.recall               tune, run all seeds (resumable), write the page
    python -m studies older.recall --report            only write the page
    python -m studies older.recall --task noise --arms hope_steered deltanet --seeds 20

Questions come one after another (`bare`) or scattered among random tokens (`noise`; `longer` is the
same with twice the steps, on other seeds).

All arms have the same width, about the same parameters and the same state. In `hope_values` all of
it is one memory that makes its own values (Eq. 86-88) from static projections; `hope_static` is
given its values (Eq. 76-78); in `hope_steered` rates and retentions are moved by one small memory
beside it; `hope` has all five memories (Eq. 83-88), in 5 heads of d/5 channels
against one of d. `deltanet_levels` is DeltaNet with Hope's channel, a chain of four gated levels.
`hope_small` and `deltanet_small` start from small embeddings, with a head of their own.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nestling.host import keep_memory
from nestling.models import presets
from studies.harness.small import (
    Batch,
    Store,
    arm_of,
    parameters,
    predict,
    state_size,
    train,
    watched,
)
from studies.older.recall_report import page
from studies.tasks.recall import IGNORE, accuracy, mqar


@dataclass(frozen=True, kw_only=True)
class Task:
    """A form of the task, and how every arm is trained on it.

    stages: until which share of the steps, how many pairs, in how many tokens (None: no noise).
    rates: the learning rates each arm may choose from, by its loss on the tuning seed.
    """

    prefix: str
    vocabulary: int
    arms: tuple[str, ...]
    steps: int
    stages: tuple[tuple[float, int, int | None], ...]
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    spread: float  # of the embeddings at first, for all arms but those with small ones
    tests: tuple[tuple[int, int | None], ...]

    @property
    def size(self) -> presets.Size:
        """One layer of width 40; the embeddings come on top of what 128 words need."""
        more = (self.vocabulary - 128) * 40
        return presets.Size(
            width=40, layers=1, heads=1, vocabulary=self.vocabulary, parameters=30_000 + more
        )


BARE = Task(
    prefix="",
    vocabulary=128,
    arms=("hope_values", "hope_static", "deltanet", "linear", "hope", "deltanet_levels",
          "hope_small", "deltanet_small"),
    steps=2000,
    stages=((0.4, 8, None), (0.55, 16, None), (0.7, 32, None), (1.0, 64, None)),
    rates=(2.5e-3, 5e-3, 1e-2),
    seeds=(20, 21, 22, 23, 24),
    spread=0.5,
    tests=((64, None), (48, None), (32, None)),
)  # fmt: skip
NOISE = Task(
    prefix="noise/",
    vocabulary=256,
    arms=("hope_steered", "deltanet", "linear", "hope_values"),
    steps=2000,
    stages=((0.25, 4, 16), (0.35, 8, 32), (0.45, 16, 64), (0.55, 32, 256), (1.0, 64, 1024)),
    rates=(7e-3, 1e-2, 1.4e-2),
    seeds=(20, 21, 22, 23, 24),
    spread=1.0,
    tests=((64, 1024), (64, 512), (32, 1024)),
)
LONGER = replace(
    NOISE,
    prefix="longer/",
    arms=("hope_steered", "deltanet", "linear"),
    steps=2 * NOISE.steps,
    seeds=(30, 31, 32),
)
TASKS = {"bare": BARE, "noise": NOISE, "longer": LONGER}

EACH = {"conv_each": True}
HOPE = {**EACH, "conv": 3}  # a convolution more, so a tap less: no more state than the rivals
ONE = {**HOPE, "adaptive": (), "rates": (0.5, 0.5)}
APART = {"tie_word_embeddings": True}
LEVELS = {**APART, "channel": "cms", "activation": "swiglu"}
SMALL = {"tie_word_embeddings": False, "initializer_range": 0.02}
ARMS: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {  # with how many heads
    "hope_values": ("hope", 1, ONE, LEVELS),
    "hope_static": ("hope", 1, {**ONE, "own_values": False}, LEVELS),
    "hope_steered": ("hope", 1, {**ONE, "adaptive": ("eta", "alpha"), "steering": 6}, LEVELS),
    "deltanet": ("deltanet", 1, EACH, APART),
    "linear": ("linear", 1, EACH, APART),
    "hope": ("hope", 5, HOPE, LEVELS),
    "deltanet_levels": ("deltanet", 1, EACH, LEVELS),
    "hope_small": ("hope", 1, ONE, {**LEVELS, **SMALL}),
    "deltanet_small": ("deltanet", 1, EACH, {**APART, **SMALL}),
}
QUESTIONS, TUNING_SEED = 512, 100
ROOT = Path(__file__).resolve().parents[2]


def batches(task: Task, seed: int) -> Callable[[int], Batch]:
    """Fresh sequences at every step: more pairs, and fewer sequences, as training goes on."""

    def draw(step: int) -> Batch:
        pairs, length = next(rest for end, *rest in task.stages if step < end * task.steps)
        made = mqar(
            QUESTIONS // pairs,
            pairs=pairs,
            vocabulary=task.vocabulary,
            seed=1_000_000 * (seed + 1) + step,
            length=length,
        )
        return made.tokens, made.targets, (made.targets != IGNORE).float()

    return draw


def run(task: Task, arm: str, rate: float, seed: int) -> dict[str, Any]:
    """Train one model and ask it for 200 sequences it has not seen."""
    torch.manual_seed(seed)
    name, heads, options, fields = ARMS[arm]
    fields = {"initializer_range": task.spread, **fields}  # tokens that stay apart
    model = arm_of(name, replace(task.size, heads=heads), options, **fields)
    begin = time.process_time()
    losses = train(model, batches(task, seed), steps=task.steps, rate=rate)
    numbers: dict[str, Any] = {
        "rate": rate,
        "loss": sum(losses[-50:]) / 50,
        "parameters": parameters(model),
        "state": state_size(model),
        "seconds": round(time.process_time() - begin, 1),
    }
    for number, (pairs, length) in enumerate(task.tests):
        test = mqar(200, pairs=pairs, vocabulary=task.vocabulary, seed=seed, length=length)
        said = predict(model, test.tokens, 50)
        among = "" if length is None else f" in {length} tokens"
        numbers[f"{pairs} pairs{among}"] = accuracy(said, test.targets)
        if number == 0:
            numbers["values lost"] = lost(said, test.targets, task.vocabulary)
            if arm == "hope_steered":
                numbers["write rates"] = write_rates(model, test.tokens[:50], pairs)
    return numbers


@torch.no_grad()
def write_rates(model: Any, tokens: Tensor, pairs: int) -> dict[str, float]:
    """How strongly Hope writes at value tokens: while keys are bound, and later among the noise."""
    mixer, seen = model.model.model.layers[0].mixer, []
    inner = mixer._inputs
    mixer._inputs = lambda *given: seen.append(inner(*given)) or seen[-1]
    model(tokens)
    del mixer._inputs
    inputs, rule = seen[0], mixer.rule
    raw = inputs.x @ inputs.readout.mT + inputs.bias.unsqueeze(1) + inputs.gates  # [b, T, 2]
    rate = rule.gates(raw).rate
    vocabulary, end = model.model.config.vocab_size, 2 * pairs
    value = tokens >= vocabulary // 2
    cuts = (0, pairs, end, 2 * end, 4 * end, tokens.shape[1])
    return {
        f"{a + 1}-{b}": rate[:, a:b][value[:, a:b]].mean().item()
        for a, b in itertools.pairwise(cuts)
        if a < b
    }


def lost(said: Tensor, targets: Tensor, vocabulary: int) -> int:
    """How many values are hardly ever recalled (below 30%)."""
    shares = [
        (said[targets == value] == value).float().mean().item()
        for value in range(vocabulary // 2, vocabulary)
    ]
    return sum(share < 0.3 for share in shares)


def work(task: Task, keys: list[tuple[str, float, int]], store: Store) -> None:
    """Run what is not stored yet."""
    left = [(name(task, *job), job) for job in keys]
    for key, job in watched([item for item in left if item[0] not in store], lambda item: item[0]):
        numbers = run(task, *job)
        store.add(key, numbers)
        print(key, numbers, flush=True)


def name(task: Task, arm: str, rate: float, seed: int) -> str:
    """The key of a run."""
    return f"{task.prefix}{arm}/{rate:g}/{seed}"


def study(task: Task, arms: list[str], seeds: list[int], store: Store) -> None:
    """Choose each arm's rate on the tuning seed, then run the seeds."""
    work(task, [(arm, rate, TUNING_SEED) for arm in arms for rate in task.rates], store)
    rates = {
        arm: min(task.rates, key=lambda r: store.get(name(task, arm, r, TUNING_SEED))["loss"])
        for arm in arms
    }
    work(task, [(arm, rates[arm], seed) for seed in seeds for arm in arms], store)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), help="default: the task's")
    parser.add_argument("--seeds", nargs="+", type=int, help="default: the task's")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "recall")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "results" / "recall.md")
    parser.add_argument("--report", action="store_true", help="only write the page")
    options = parser.parse_args(arguments)
    keep_memory()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    store = Store(options.runs, options.page.with_suffix(".json"))
    for task in [] if options.report else [TASKS[each] for each in options.task]:
        arms = [arm for arm in options.arms or task.arms if arm in task.arms]
        study(task, arms, list(options.seeds or task.seeds), store)
    print(page(store.gather(), options.page, TASKS, TUNING_SEED))
