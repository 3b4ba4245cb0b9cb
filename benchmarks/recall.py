"""In-context recall (MQAR): bind 64 keys to values, then answer for every key.

    python benchmarks/recall.py --arms hope deltanet linear --seeds 0 1 2
    python benchmarks/recall.py --table                     only write the table

All arms have the same width, depth and parameters. `hope` also has the same state as DeltaNet and
linear attention, all five memories counted (5 heads of 16 against one of 80 channels); `hope_wide`
has the same *main* memory as they do, so five times their state.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import common  # noqa: F401  (sets the CPU's instruction set before torch)
import torch
from synthetic import Results, arm_of, mean_and_interval, predict, train

from nestling.evaluate.recall import accuracy, mqar
from nestling.host import keep_memory
from nestling.models import presets

VOCABULARY = 512
SIZE = presets.Size(width=80, layers=2, heads=1, vocabulary=VOCABULARY, parameters=300_000)
ARMS = {
    "hope": ("hope", replace(SIZE, heads=5)),
    "hope_wide": ("hope", SIZE),
    "deltanet": ("deltanet", SIZE),
    "gated_delta": ("gated_delta", SIZE),
    "linear": ("linear", SIZE),
    "transformer": ("transformer", SIZE),
}
OPTIONS = {"transformer": {"conv": 4}}
ROOT = Path(__file__).resolve().parents[1] / "docs" / "results"


def run(arm: str, pairs: int, seed: int, steps: int, batch: int = 32) -> dict[str, float]:
    """Train one model on fresh sequences and test it on 500 others."""
    torch.manual_seed(seed)
    name, size = ARMS[arm]
    model = arm_of(name, size, OPTIONS)

    def batches(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        task = mqar(batch, pairs=pairs, vocabulary=VOCABULARY, seed=1_000_000 * (seed + 1) + step)
        return task.tokens, task.targets

    losses = train(model, batches, steps=steps)
    test = mqar(500, pairs=pairs, vocabulary=VOCABULARY, seed=seed)
    return {
        "accuracy": accuracy(predict(model, test.tokens), test.targets),
        "loss": sum(losses[-50:]) / 50,
        "steps": float(steps),
        "parameters": float(sum(p.numel() for p in model.parameters())),
    }


def table(results: Results) -> str:
    pairs = sorted({int(key.split("/")[1]) for key in results.runs})
    rows = ["| model | " + " | ".join(f"{p} pairs" for p in pairs) + " |"]
    rows.append("|---|" + "---|" * len(pairs))
    for arm in ARMS:
        cells = []
        for count in pairs:
            found = [r for k, r in results.runs.items() if k.startswith(f"{arm}/{count}/")]
            mean = mean_and_interval([r["accuracy"] for r in found]) if found else "-"
            cells.append(f"{mean} (n={len(found)})")
        rows.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--pairs", nargs="+", type=int, default=[64])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--results", type=Path, default=ROOT / "recall.json")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    keep_memory()
    torch.set_flush_denormal(True)
    results = Results(options.results)
    keys = [(s, p, a) for s in options.seeds for p in options.pairs for a in options.arms]
    for seed, pairs, arm in [] if options.table else keys:
        key = f"{arm}/{pairs}/{seed}"
        if key not in results:
            print(key, flush=True)
            results.add(key, run(arm, pairs, seed, options.steps))
            print(key, results.runs[key], flush=True)
    text = (
        "# In-context recall (MQAR)\n\nShare of questions answered rightly, in percent, mean and"
        f" 95% interval over seeds. {SIZE.layers} layers, width {SIZE.width}, about"
        f" {SIZE.parameters:,} parameters, vocabulary {VOCABULARY}; `python benchmarks/recall.py`"
        " says what each arm is.\n\n"
    )
    options.results.with_suffix(".md").write_text(text + table(results))
    print(table(results))


if __name__ == "__main__":
    main()
