"""Part (i) on SmolLM2: whether learning helps a real model, and what it costs in old loss."""

from __future__ import annotations

from typing import Any

from verdicts import show, verdict


def section(part: dict[str, Any]) -> list[str]:
    """Table and verdicts; one rate per arm, so no curve."""
    start = part["frozen"]
    lines = [
        "## (i) SmolLM2-135M",
        "",
        f'{part["size"][0]:,} tokens of "A grammar of Kalamang" (LaTeX), the MLPs of the last 10 of'
        f" 30 layers; new is the loss on the {part['size'][1]:,} tokens after them, old that on"
        f" WikiText-2. {len(start)} parts of the book, one rate per arm: it shows whether learning"
        " helps and what it does to the old loss, not the whole frontier.",
        "",
        "| | rate | new | old |",
        "|---|---|---|---|",
        f"| frozen | | {_column(start, 'new')} | {_column(start, 'old')} |",
    ]
    points = {
        arm: {seed: each[0] for seed, each in runs.items()} for arm, runs in part["arms"].items()
    }
    for arm, runs in points.items():
        rate = next(iter(runs.values()))["rate"]
        lines.append(f"| {arm} | {rate:g} | {_column(runs, 'new')} | {_column(runs, 'old')} |")
    lines.append("")
    for arm, runs in points.items():
        new, old = (
            [run[key] - start[seed][key] for seed, run in runs.items()] for key in ("new", "old")
        )
        lines.append(
            f"- {arm}: learning lowers the new loss: {verdict(new)}; the old loss moves by"
            f" {show(old, 4)}."
        )
    for arm, runs in points.items():
        if arm != "k=1":
            new, old = (
                [run[key] - points["k=1"][seed][key] for seed, run in runs.items()]
                for key in ("new", "old")
            )
            lines.append(f"- {arm} minus k=1: new {show(new, 4)}, old {show(old, 4)}.")
    same = "equal, bit for bit" if part["rate 0"]["same"] else "NOT equal"
    count = part["rate 0"]["tokens"]
    lines.append(f"- rate 0, three levels: the logits of {count} tokens are {same}.")
    return [*lines, ""]


def _column(runs: dict[str, Any], key: str) -> str:
    return show([run[key] for run in runs.values()])
