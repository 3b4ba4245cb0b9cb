"""Part (iii) of the page: how many levels, on a stream of many keys."""

from __future__ import annotations

import statistics
from typing import Any

from studies.adapt.recall import RATES
from studies.adapt.verdicts import show, verdict


def section(part: dict[str, Any]) -> list[str]:
    """Table, kinds of keys, and verdicts."""
    control = part.pop("1x32")
    slowest = sorted({int(name.split("x")[1]) for name in part})
    levels = sorted({int(name.split("x")[0]) for name in part})
    seeds = len(next(iter(part.values()))["runs"])
    lines = [
        "## (iii) More levels, on a stream of many keys",
        "",
        "Recall (accuracy, mean over lasting, early and passing keys) of 48 keys from the fast"
        f" weights alone, after 3,072 tokens; {seeds} seeds, every cell at the best of the same"
        f" {len(RATES)} rates on another seed. One level has the slowest chunk; more levels start"
        " at 32.",
        "",
        "| levels | " + " | ".join(f"slowest {chunk}" for chunk in slowest) + " |",
        "|---|" + "---|" * len(slowest),
    ]
    for count in levels:
        cells = [
            show([run["recall"] for run in part[f"{count}x{chunk}"]["runs"]]) for chunk in slowest
        ]
        lines.append(f"| {count} | {' | '.join(cells)} |")
    alone = show([run["recall"] for run in control["runs"]])
    lines += ["", f"Control, the fastest level alone (one level, chunk 32): {alone}.", ""]
    for kind in ("lasting", "early", "passing"):
        cells = []
        for count in levels:
            runs = [run for chunk in slowest for run in part[f"{count}x{chunk}"]["runs"]]
            cells.append(f"{count} levels {show([run[kind] for run in runs])}")
        lines.append(f"- {kind} keys, over all slowest chunks: {', '.join(cells)}.")
    lines += [
        "",
        "Claim (Fig. 7): more levels are better, at every slowest chunk. One level with a slow"
        " chunk takes few steps (2 of chunk 1,536), so only a gain over the control, the fastest"
        " level alone, speaks for levels. Seeds were extended from three to six, for all cells,"
        " after three had left most comparisons open.",
        "",
        f"Best rates of {', '.join(f'{rate:g}' for rate in RATES)}:"
        f" {', '.join(_best(name, entry) for name, entry in part.items())}.",
        "",
    ]
    for count in levels[1:]:
        gaps = [
            statistics.fmean(
                part[f"{count}x{chunk}"]["runs"][seed]["recall"]
                - part[f"{count - 1}x{chunk}"]["runs"][seed]["recall"]
                for chunk in slowest
            )
            for seed in range(seeds)
        ]
        said = verdict(gaps, better_below=False)
        lines.append(f"- all slowest chunks together, {count} levels over {count - 1}: {said}.")
    for count in levels[1:]:
        gaps = [
            statistics.fmean(part[f"{count}x{chunk}"]["runs"][s]["recall"] for chunk in slowest)
            - control["runs"][s]["recall"]
            for s in range(seeds)
        ]
        said = verdict(gaps, better_below=False)
        lines.append(f"- all together, {count} levels over the fastest level alone: {said}.")
    for chunk in slowest:
        for count in levels[1:]:
            less, more = part[f"{count - 1}x{chunk}"], part[f"{count}x{chunk}"]
            gaps = [b["recall"] - a["recall"] for a, b in zip(less["runs"], more["runs"])]
            said = verdict(gaps, better_below=False)
            lines.append(f"- slowest {chunk}, {count} levels over {count - 1}: {said}.")
        most = part[f"{levels[-1]}x{chunk}"]["runs"]
        gaps = [b["recall"] - a["recall"] for a, b in zip(control["runs"], most)]
        said = verdict(gaps, better_below=False)
        lines.append(f"- slowest {chunk}, {levels[-1]} levels over the fastest alone: {said}.")
    return [*lines, ""]


def _best(name: str, entry: dict[str, Any]) -> str:
    levels, slowest = name.split("x")
    return f"{levels} up to {slowest} {entry['rate']:g}"
