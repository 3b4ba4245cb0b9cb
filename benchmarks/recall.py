"""In-context recall (MQAR): bind 64 keys to values, then answer for every key.

    python benchmarks/recall.py                     tune, run all seeds (resumable), write the page
    python benchmarks/recall.py --report            only write the page
    python benchmarks/recall.py --arms hope deltanet --seeds 0

All arms have the same width and parameters, and all but `hope_main` the same state. `hope_static`
has static projections (Eq. 76-78), `hope_values` makes its own values besides, and `hope` has all
five memories (Eq. 83-88), in 5 heads of d/5 channels against one of d. `hope_main` has the same
*main* memory as the rivals, so five times their state. `deltanet_levels` is DeltaNet with Hope's
channel, a chain of four gated levels.
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

from nestling.evaluate.recall import IGNORE, accuracy, mqar
from nestling.host import keep_memory
from nestling.models import presets

VOCABULARY = 128
SIZE = presets.Size(width=40, layers=1, heads=1, vocabulary=VOCABULARY, parameters=30_000)
EACH = {"conv_each": True}
HOPE = {**EACH, "conv": 3}  # a convolution more, so a tap less: no more state than the rivals
PLAIN = {**HOPE, "adaptive": (), "rates": (0.5, 0.5)}
LEVELS = {"channel": "cms", "activation": "swiglu"}
ARMS: dict[str, tuple[str, presets.Size, dict[str, Any], dict[str, Any]]] = {
    "hope_static": ("hope", SIZE, {**PLAIN, "own_values": False}, LEVELS),
    "hope_values": ("hope", SIZE, PLAIN, LEVELS),
    "hope": ("hope", replace(SIZE, heads=5), HOPE, LEVELS),
    "hope_main": ("hope", SIZE, HOPE, LEVELS),
    "deltanet": ("deltanet", SIZE, EACH, {}),
    "gated_delta": ("gated_delta", SIZE, EACH, {}),
    "linear": ("linear", SIZE, EACH, {}),
    "deltanet_levels": ("deltanet", SIZE, EACH, LEVELS),
}
STEPS, QUESTIONS = 2000, 512
STAGES = ((0.4, 8), (0.55, 16), (0.7, 32), (1.0, 64))
RATES = (2.5e-3, 5e-3)
TUNING_SEED, SEEDS, TESTS = 100, (10, 11, 12), (64, 48, 32)
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
        numbers[f"{pairs} pairs"] = accuracy(predict(model, test.tokens, 50), test.targets)
    return numbers


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
