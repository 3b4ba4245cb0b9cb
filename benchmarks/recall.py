"""In-context recall (MQAR): bind 64 keys to values, then answer for every key.

    python benchmarks/recall.py                     tune, run all seeds (resumable), write the page
    python benchmarks/recall.py --report            only write the page
    python benchmarks/recall.py --arms hope deltanet --seeds 0

All arms have the same width, about the same parameters and the same state. In `hope_values` all of
it is one memory that makes its own values (Eq. 86-88) from static projections; `hope_static` is
given its values (Eq. 76-78); `hope` has all five memories (Eq. 83-88), in 5 heads of d/5 channels
against one of d. `deltanet_levels` is DeltaNet with Hope's channel, a chain of four gated levels.
`hope_small` and `deltanet_small` start from small embeddings, with a head of their own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import common  # noqa: F401  (sets the CPU's instruction set before torch)
import torch
from recall_report import page
from synthetic import Batch, Store, arm_of, parameters, predict, state_size, train, watched
from torch import Tensor

from nestling.evaluate.recall import IGNORE, accuracy, mqar
from nestling.host import keep_memory
from nestling.models import presets

VOCABULARY = 128
SIZE = presets.Size(width=40, layers=1, heads=1, vocabulary=VOCABULARY, parameters=30_000)
EACH = {"conv_each": True}
HOPE = {**EACH, "conv": 3}  # a convolution more, so a tap less: no more state than the rivals
ONE = {**HOPE, "adaptive": (), "rates": (0.5, 0.5)}
APART = {"tie_word_embeddings": True, "initializer_range": 0.5}  # tokens that stay apart
LEVELS = {**APART, "channel": "cms", "activation": "swiglu"}
SMALL = {"tie_word_embeddings": False, "initializer_range": 0.02}
ARMS: dict[str, tuple[str, presets.Size, dict[str, Any], dict[str, Any]]] = {
    "hope_values": ("hope", SIZE, ONE, LEVELS),
    "hope_static": ("hope", SIZE, {**ONE, "own_values": False}, LEVELS),
    "deltanet": ("deltanet", SIZE, EACH, APART),
    "linear": ("linear", SIZE, EACH, APART),
    "hope": ("hope", replace(SIZE, heads=5), HOPE, LEVELS),
    "deltanet_levels": ("deltanet", SIZE, EACH, LEVELS),
    "hope_small": ("hope", SIZE, ONE, {**LEVELS, **SMALL}),
    "deltanet_small": ("deltanet", SIZE, EACH, {**APART, **SMALL}),
}
STEPS, QUESTIONS = 2000, 512
STAGES = ((0.4, 8), (0.55, 16), (0.7, 32), (1.0, 64))
RATES = (2.5e-3, 5e-3, 1e-2)
TUNING_SEED, SEEDS, TESTS = 100, (20, 21, 22, 23, 24), (64, 48, 32)
ROOT = Path(__file__).resolve().parents[1]


def batches(seed: int) -> Callable[[int], Batch]:
    """Fresh sequences at every step: more pairs, and fewer sequences, as training goes on."""

    def draw(step: int) -> Batch:
        pairs = next(pairs for end, pairs in STAGES if step < end * STEPS)
        task = mqar(
            QUESTIONS // pairs,
            pairs=pairs,
            vocabulary=VOCABULARY,
            seed=1_000_000 * (seed + 1) + step,
        )
        return task.tokens, task.targets, (task.targets != IGNORE).float()

    return draw


def run(arm: str, rate: float, seed: int) -> dict[str, Any]:
    """Train one model and ask it for 200 sequences it has not seen."""
    torch.manual_seed(seed)
    name, size, options, fields = ARMS[arm]
    model = arm_of(name, size, options, **fields)
    begin = time.process_time()
    losses = train(model, batches(seed), steps=STEPS, rate=rate)
    numbers = {
        "rate": rate,
        "loss": sum(losses[-50:]) / 50,
        "parameters": parameters(model),
        "state": state_size(model),
        "seconds": round(time.process_time() - begin, 1),
    }
    for pairs in TESTS:
        test = mqar(200, pairs=pairs, vocabulary=VOCABULARY, seed=seed)
        said = predict(model, test.tokens, 50)
        numbers[f"{pairs} pairs"] = accuracy(said, test.targets)
        if pairs == TESTS[0]:
            numbers["values lost"] = lost(said, test.targets)
    return numbers


def lost(said: Tensor, targets: Tensor) -> int:
    """How many values are hardly ever recalled (below 30%)."""
    shares = [
        (said[targets == value] == value).float().mean().item()
        for value in range(VOCABULARY // 2, VOCABULARY)
    ]
    return sum(share < 0.3 for share in shares)


def work(keys: list[tuple[str, float, int]], store: Store) -> None:
    """Run what is not stored yet."""
    left = [(f"{arm}/{rate:g}/{seed}", (arm, rate, seed)) for arm, rate, seed in keys]
    for key, job in watched([item for item in left if item[0] not in store], lambda item: item[0]):
        numbers = run(*job)
        store.add(key, numbers)
        print(key, numbers, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--runs", type=Path, default=ROOT / "out" / "recall")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "results" / "recall.md")
    parser.add_argument("--report", action="store_true", help="only write the page")
    options = parser.parse_args()
    keep_memory()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    store = Store(options.runs, options.page.with_suffix(".json"))
    if not options.report:
        work([(arm, rate, TUNING_SEED) for arm in options.arms for rate in RATES], store)
        rates = {
            arm: min(RATES, key=lambda r: store.get(f"{arm}/{r:g}/{TUNING_SEED}")["loss"])
            for arm in options.arms
        }
        work([(arm, rates[arm], seed) for seed in options.seeds for arm in options.arms], store)
    print(page(store.gather(), options.page, SIZE, STEPS, TUNING_SEED, SEEDS))


if __name__ == "__main__":
    main()
