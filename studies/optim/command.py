"""Do the optimizers do what the paper says? Parts (a)-(d), resumable, about an hour on one core.

python -m studies optim                       # all parts, then the report
python -m studies optim --parts streams valley  # half a minute
python -m studies optim --quick               # a few steps each, to see that it runs
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from studies.harness.store import Store
from studies.optim import report, streams, study, tasks, valley

PARTS = ("valley", "streams", "vit", "lm")
ROOT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--store", type=Path, default=ROOT / "runs" / "optim_quality")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument("--quick", action="store_true", help="4 steps, 2 seeds, own folders")
    options = parser.parse_args(arguments)
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
