"""State tracking, Table 5: six formal languages, trained on lengths up to 50, tested to 100.

    python benchmarks/formal.py                     tune, run all seeds (resumable), write the page
    python benchmarks/formal.py --report            only write the page
    python benchmarks/formal.py --arms hope --languages parity --seeds 0

A string counts only if every position is right. bin0: lengths as in training; bin1: 51-100. No
positional encoding; the last weights are tested, whatever they are. Every arm has the same four
trials per language, judged on a seed of their own by training on lengths up to 25 and testing on
26-50: how well a setting carries over to greater lengths is seen without a look at bin1.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import common  # noqa: F401  (sets the CPU's instruction set before torch)
import torch
from formal_report import page
from synthetic import Batch, Store, arm_of, parameters, predict, train, watched

from nestling.evaluate.formal import BIN0, BIN1, LANGUAGES, Strings, merge, score, strings
from nestling.host import keep_memory
from nestling.models import presets

SIZE = presets.Size(width=32, layers=1, heads=2, vocabulary=8, parameters=24_000)
STEPS, BATCH, POOL = 400, 32, 8
TUNING_SEED, SEEDS = 100, (0, 1, 2, 3, 4)
SHORT, LONG = (2, 25), (26, 50)

# Chunk 1 is Eq. 83-88 to the letter; rates up to twice the retention let a write flip a sign.
HOPE = {"chunk": 1, "chunk_others": 1, "negative": True, "retain_max": 0.9999}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "hope": ("hope", HOPE),
    "transformer": ("transformer", {"rope": 0.0, "conv": 4}),
    "linear": ("linear", {}),
    "deltanet": ("deltanet", {}),
    "deltanet_negative": ("deltanet", {"negative": True}),
    "lstm": ("lstm", {}),
}
Trial = dict[str, Any]
DEPTHS: list[Trial] = [{"rate": r, "layers": n} for r in (3e-3, 1e-2) for n in (1, 2)]
STARTS: list[Trial] = [
    {"rate": 1e-2, "layers": 1, "rate_start": rate, "retain_start": retain}
    for rate in (0.5, 1.0)
    for retain in (0.9, 0.9985)
]
TRIALS: dict[str, list[Trial]] = {arm: STARTS if arm == "hope" else DEPTHS for arm in MODELS}
"""Four for each arm: learning rate and depth, or for Hope where its gates start."""

ROOT = Path(__file__).resolve().parents[1]


def batches(data: Strings, seed: int) -> Any:
    """Random batches of strings of like length, merged: [step] -> tokens, targets, weights."""
    random = torch.Generator().manual_seed(seed)
    sizes = (data.targets >= 0).sum(1)
    pool: list[torch.Tensor] = []

    def draw(_: int) -> Batch:
        if not pool:
            rows = torch.randint(len(data), (POOL * BATCH,), generator=random)
            parts = rows[sizes[rows].argsort()].split(BATCH)
            pool.extend(parts[i] for i in torch.randperm(POOL, generator=random).tolist())
        rows = pool.pop()
        some = merge(Strings(tokens=data.tokens[rows], targets=data.targets[rows]))
        return some.tokens, some.targets, some.weight

    return draw


def build(arm: str, trial: Trial) -> torch.nn.Module:
    """The model of one arm with the settings of a trial."""
    name, options = MODELS[arm]
    starts = {k: v for k, v in trial.items() if k.endswith("_start")}
    return arm_of(name, replace(SIZE, layers=trial["layers"]), options | starts)


def run(
    arm: str,
    name: str,
    trial: Trial,
    seed: int,
    lengths: tuple[int, int],
    bins: dict[str, tuple[int, int]],
) -> dict[str, Any]:
    """Train one model on one language and test it on strings of other lengths."""
    language = LANGUAGES[name]
    data = strings(language, 10_000, lengths, seed=1000 + seed)
    torch.manual_seed(seed)
    model = build(arm, trial)
    losses = train(model, batches(data, seed), steps=STEPS, rate=trial["rate"])
    numbers = {"loss": sum(losses[-20:]) / 20, "parameters": parameters(model), "trial": trial}
    for i, (bin_, window) in enumerate(bins.items()):
        test = strings(language, 2_000, window, seed=10_000 * (i + 1) + seed)
        few = merge(test)
        said = predict(model, few.tokens)[few.row]
        wanted = test.targets[:, : said.shape[1]]
        numbers[bin_], numbers[f"{bin_}_tokens"] = score(said, wanted)
    return numbers


def tune(arm: str, name: str, store: Store) -> Trial:
    """The trial that carries over best from lengths up to 25 to 26-50, on a seed of its own."""
    found = []
    for i, trial in enumerate(TRIALS[arm]):
        go = partial(run, arm, name, trial, TUNING_SEED, SHORT, {"short": SHORT, "long": LONG})
        numbers = store.get(f"tune/{arm}/{name}/{i}", go)
        # more strings right, then more positions right, then the smaller loss
        found.append((numbers["long"], numbers["long_tokens"], -numbers["loss"], i))
    return TRIALS[arm][max(found)[-1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--languages", nargs="+", default=list(LANGUAGES), choices=LANGUAGES)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--runs", type=Path, default=ROOT / "out" / "formal")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "results" / "formal.md")
    parser.add_argument("--tune", action="store_true", help="only the trials")
    parser.add_argument("--report", action="store_true", help="only write the page")
    options = parser.parse_args()
    keep_memory()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    store = Store(options.runs, options.page.with_suffix(".json"))
    keys = [f"{s}/{n}/{a}" for s in options.seeds for n in options.languages for a in options.arms]
    for key in [] if options.report else watched(keys):
        seed, name, arm = key.split("/")
        trial = tune(arm, name, store)
        if options.tune:
            continue

        def go(
            seed: int = int(seed), name: str = name, arm: str = arm, trial: Trial = trial
        ) -> Any:
            return run(arm, LANGUAGES[name], trial, seed, BIN0, {"bin0": BIN0, "bin1": BIN1})

        numbers = store.get(f"{arm}/{name}/{seed}", go)
        print(key, {k: numbers[k] for k in ("loss", "bin0", "bin1", "seconds")}, flush=True)
    print(page(store.gather(), options.page, SIZE, STEPS, BATCH))


if __name__ == "__main__":
    main()
