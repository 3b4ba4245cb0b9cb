"""State tracking, Table 5: six formal languages, trained on lengths up to 50, tested to 100.

    python benchmarks/formal.py --arms hope transformer --languages parity --seeds 0 1 2
    python benchmarks/formal.py --table                     only write the table

A string counts only if every position is right. bin0: lengths as in training; bin1: 51-100. No
positional encoding; nothing is selected on bin1 (the last weights are tested, whatever they are).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import common  # noqa: F401  (sets the CPU's instruction set before torch)
import torch
from synthetic import Results, arm_of, mean_and_interval, predict, train

from nestling.evaluate.formal import BIN0, BIN1, LANGUAGES, Language, score, strings
from nestling.host import keep_memory
from nestling.models import presets

ARMS = ("hope", "transformer", "linear", "deltanet", "lstm")
SIZE = presets.Size(width=64, layers=2, heads=2, vocabulary=8, parameters=120_000)
OPTIONS = {
    # state tracking needs eigenvalues below zero; the chunk only says when projections are renewed
    "hope": {"chunk": 16, "chunk_others": 16, "negative": True, "retain_max": 0.99999},
    "hope_attention": {"rope": 0.0, "conv": 4},
    "transformer": {"rope": 0.0, "conv": 4},
}
ROOT = Path(__file__).resolve().parents[1] / "docs" / "results"


def run(arm: str, language: Language, seed: int, steps: int, batch: int = 64) -> dict[str, float]:
    """Train one model on one language and test it on both bins."""
    data = strings(language, 10_000, BIN0, seed=1000 + seed)
    order = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = arm_of(arm, SIZE, OPTIONS)

    def batches(_: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.randint(len(data), (batch,), generator=order)
        longest = int((data.targets[rows] >= 0).sum(1).max())
        return data.tokens[rows, :longest], data.targets[rows, :longest]

    losses = train(model, batches, steps=steps)
    numbers = {"loss": sum(losses[-50:]) / 50, "steps": float(steps)}
    numbers["parameters"] = float(sum(p.numel() for p in model.parameters()))
    for name, lengths, which in (("bin0", BIN0, 1), ("bin1", BIN1, 2)):
        test = strings(language, 2_000, lengths, seed=10_000 * which + seed)
        numbers[name], numbers[f"{name}_tokens"] = score(predict(model, test.tokens), test.targets)
    return numbers


def table(results: Results) -> str:
    """bin0 / bin1 for every arm and language, with intervals where there are several seeds."""
    head = "| model | " + " | ".join(LANGUAGES) + " |\n|---|" + "---|" * len(LANGUAGES)
    rows = [head]
    for arm in ARMS:
        cells = []
        for language in LANGUAGES:
            found = [r for k, r in results.runs.items() if k.startswith(f"{arm}/{language}/")]
            bins = (mean_and_interval([r[b] for r in found]) for b in ("bin0", "bin1") if found)
            cells.append(" / ".join(bins) + f" (n={len(found)})" if found else "-")
        rows.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--languages", nargs="+", default=list(LANGUAGES), choices=list(LANGUAGES))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--results", type=Path, default=ROOT / "formal.json")
    parser.add_argument("--chunk", type=int, default=16, help="of Hope's memories")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    OPTIONS["hope"] |= {"chunk": options.chunk, "chunk_others": options.chunk}
    keep_memory()
    torch.set_flush_denormal(True)
    results = Results(options.results)
    keys = [(s, n, a) for s in options.seeds for n in options.languages for a in options.arms]
    for seed, name, arm in [] if options.table else keys:
        key = f"{arm}/{name}/{seed}"
        if key not in results:
            print(key, flush=True)
            results.add(key, run(arm, LANGUAGES[name], seed, options.steps))
            print(key, results.runs[key], flush=True)
    text = (
        "# State tracking (Table 5)\n\nShare of strings with every position right, in percent:"
        " bin0 (lengths up to 50) / bin1 (51-100), mean and 95% interval over seeds."
        f" {SIZE.layers} layers, width {SIZE.width}, about {SIZE.parameters:,} parameters, 10,000"
        " training strings; `python benchmarks/formal.py`.\n\n"
    )
    options.results.with_suffix(".md").write_text(text + table(results))
    print(table(results))


if __name__ == "__main__":
    main()
