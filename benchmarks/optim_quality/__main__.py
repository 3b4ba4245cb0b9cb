"""Do the optimizers do what the paper says? Parts (a)-(d), resumable, about an hour on one core.

python benchmarks/optim_quality                       # all parts, then the report
python benchmarks/optim_quality --parts streams valley  # half a minute
python benchmarks/optim_quality --quick               # a few steps each, to see that it runs
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import report
import streams
import study
import tasks
import torch
import valley

from nestling.report.store import Store

PARTS = ("valley", "streams", "vit", "lm")
ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--store", type=Path, default=ROOT / "out" / "optim_quality")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument("--quick", action="store_true", help="4 steps, 2 seeds, own folders")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    seeds, steps = None, {}
    if options.quick:
        seeds, steps = (0, 1), {"steps": 4}
        options.store, options.docs = options.store / "quick", options.store / "quick"
    store = Store(options.store, print)  # after a change to an optimizer, delete its files
    parts: dict[str, Any] = {}
    for part in options.parts:
        if part == "valley":
            parts[part] = store.get("valley", valley.compare)
        elif part == "streams":
            parts[part] = store.get("streams", streams.compare)
        else:
            parts[part] = study.study(getattr(tasks, part)(**steps), store, seeds)
        print(report.write(parts, options.docs), flush=True)


if __name__ == "__main__":
    main()
