"""The page of the recall study: the table and the verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from synthetic import percent

from nestling.files import write_atomic
from nestling.models import presets
from nestling.report.intervals import difference, verdict

NAMES = {
    "hope_static": "Hope, static projections",
    "hope_values": "Hope, static projections, own values",
    "hope": "Hope, five memories",
    "hope_main": "Hope, five memories, five times the state",
    "deltanet": "DeltaNet",
    "gated_delta": "gated delta",
    "linear": "linear attention",
    "deltanet_levels": "DeltaNet with Hope's chain of levels",
}
NO_VERDICT = "Only the trials were run, on one seed: no verdict.\n"
Runs = dict[str, dict[str, Any]]


def seeds(runs: Runs, arm: str) -> list[dict[str, Any]]:
    """The runs of one arm."""
    return [run for key, run in runs.items() if key.split("/")[0] == arm]


def table(runs: Runs) -> str:
    """Accuracy by number of pairs, with the state of each arm."""
    columns = sorted({k for run in runs.values() for k in run if k.endswith("pairs")})
    rows = ["| model | state | parameters | " + " | ".join(columns) + " | seeds | rate |"]
    rows.append("|---|---|---|" + "---|" * (len(columns) + 2))
    for arm, title in NAMES.items():
        if found := seeds(runs, arm):
            cells = [percent([run[c] for run in found]) for c in columns]
            ends = f"{found[0]['state']:,} | {found[0]['parameters']:,}"
            rows.append(
                f"| {title} | {ends} | {' | '.join(cells)} | {len(found)} | {found[0]['rate']:g} |"
            )
    return "\n".join(rows) + "\n"


def trials(runs: Runs) -> str:
    """What each learning rate gave on the seed used for choosing it."""
    rows = ["| model | rate | state | final loss | 64 pairs |", "|---|---|---|---|---|"]
    for arm, title in NAMES.items():
        for run in seeds(runs, arm):
            ends = f"{run['loss']:.2f} | {100 * run['64 pairs']:.1f}"
            rows.append(f"| {title} | {run['rate']:g} | {run['state']:,} | {ends} |")
    return "\n".join(rows) + "\n"


def single(runs: Runs, column: str) -> str:
    """Every seed of every arm."""
    rows = []
    for arm, title in NAMES.items():
        if found := [f"{100 * run[column]:.1f}" for run in seeds(runs, arm)]:
            rows.append(f"- {title}: {', '.join(found)}")
    return "\n".join(rows) + "\n"


def compared(runs: Runs, ours: str, theirs: str, column: str) -> str:
    """Who is above, seed by seed?"""
    both = [{k.split("/")[-1]: run[column] for k, run in runs.items() if k.split("/")[0] == arm}
            for arm in (ours, theirs)]  # fmt: skip
    same = sorted(both[0].keys() & both[1].keys())
    if len(same) < 3:
        return f"{NAMES[ours]} against {NAMES[theirs]}: too few seeds."
    gap = difference([both[0][seed] for seed in same], [both[1][seed] for seed in same])
    word = {"shown": "above", "refuted": "below"}.get(verdict(gap), "inconclusive")
    return f"{NAMES[ours]} against {NAMES[theirs]}: **{word}**, {gap} ({len(same)} seeds)."


def page(
    runs: Runs, path: Path, size: presets.Size, steps: int, tuning_seed: int, used: Sequence[int]
) -> str:
    """Write the page; returns verdicts and table."""
    tried = {k: run for k, run in runs.items() if k.split("/")[-1] == str(tuning_seed)}
    runs = {k: run for k, run in runs.items() if int(k.split("/")[-1]) in used}
    hopes = ("hope_static", "hope_values", "hope", "hope_main")
    rivals = ("deltanet", "gated_delta", "linear", "deltanet_levels")
    run = {key.split("/")[0] for key in runs}
    pairs = [(one, other) for one in hopes for other in rivals if {one, other} <= run]
    listed = "\n".join(f"- {compared(runs, *pair, '64 pairs')}" for pair in pairs) + "\n"
    text = f"""# In-context recall (MQAR)

A sequence binds keys to values, then asks for every key once more; share of questions answered
rightly, in percent, mean and 95% interval over seeds. {size.layers} layer, width {size.width},
about {size.parameters:,} parameters, vocabulary {size.vocabulary} (half keys, half values),
{steps} steps of 512 questions, with 8 pairs at first and 64 at the end. Every model had two trials
of its learning rate on a seed of its own. Written by `python benchmarks/recall.py`.

State counts what a model carries per sequence, convolutions' tails included (Hope's is the smaller
one). Every projection has a convolution of its own: with one shared convolution keys, values and
queries would divide its channels between the last token and this one.
Static projections are Eq. 76-78, with values of length one; with all five memories (main, k, v,
rate, retention) only the main one is read, a fifth of the state. Hope's channel is a chain of four
gated levels; DeltaNet was run with it too, to tell memory and channel apart.

Hope with static projections either learns the task better than its rivals or stays where linear
attention is: look at the single seeds. Why is not known yet.

{listed + chr(10) if runs else ""}{table(runs) if runs else NO_VERDICT}
Single seeds, 64 pairs:

{single(runs, "64 pairs")}
## Trials

{trials(tried)}"""
    write_atomic(path, text.encode())
    return listed + "\n" + table(runs) + "\n" + trials(tried)
