"""Do the optimizers do what the paper says? Parts (a)-(d), resumable, about an hour on one core.

python -m studies optim                         # all parts, then the page
python -m studies optim --parts streams valley  # half a minute
python -m studies optim --quick                 # a few steps each, to see that it runs
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from studies.harness.command import common, ready
from studies.harness.store import Store
from studies.optim import report, streams, study, tasks, valley

PARTS = ("valley", "streams", "vit", "lm")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse and run."""
    parser = common("optim", __doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seeds", type=int, nargs="+", help="of (a) and (b)")
    options = parser.parse_args(arguments)
    ready("optim", options)
    seeds, steps = (options.seeds, {}) if not options.quick else ((0,), {"steps": 4})
    store = Store(options.runs, study="optim", copy=options.out / "optim.json", say=print)
    for part in () if options.report else options.parts:
        if part == "valley":
            walls = valley.STEEPNESS[: 1 if options.quick else None]
            store.get("valley", lambda walls=walls: valley.compare(walls))
        elif part == "streams":
            rates = streams.RATES[:: 12 if options.quick else 1]
            store.get("streams", lambda rates=rates: streams.compare(rates))
        else:
            task = getattr(tasks, part)(options.data, **steps)
            store.put(f"part_{part}", study.study(task, store, seeds, 1 if options.quick else None))
        print(report.write(_parts(store.gather()), options.out), flush=True)
    if options.report:
        print(report.write(_parts(store.gather()), options.out))
    return 0


def _parts(runs: dict[str, Any]) -> dict[str, Any]:
    return {part: runs[key] for part in PARTS for key in (part, f"part_{part}") if key in runs}
