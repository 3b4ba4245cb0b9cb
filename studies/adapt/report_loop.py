"""Part (ii) of the page: learn A, then B, then a little of A again."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

from studies.adapt.loop import LITTLE
from studies.adapt.verdicts import show, verdict

POINTS = ("0", *map(str, LITTLE))
READ = "read A'"
COLOURS = ("#8c8c8c", "#57534e", "#d1495b", "#00798c", "#edae49")


def section(part: dict[str, Any], picture: Path) -> list[str]:
    """What was done, table, verdicts and picture."""
    plain = part["k=1"]["runs"]
    lines = [
        "## (ii) Memory loop A, B, A'",
        "",
        "stories260K learns a book A, then WikiText-2 as B (4,097 tokens each), then a little of"
        f" the book's continuation A'. {len(plain)} books. Every arm was tuned with six settings"
        " on two other books, by the mean loss of A, B and A' as they are read, so that no arm can"
        " keep A by not learning B. In the arms with levels the slower ones have rate 0 and only"
        " receive a share of the next faster one whenever they are due (`transfer='move'`);"
        " the fastest level lets go of what it holds, by retention, or where texts are told"
        " apart because it begins anew with every text. *Lesioned*: all but the fastest level are"
        " emptied after B.",
        "",
        f"![Return]({picture.name})",
        "",
        "| | settings chosen | A as read | B as read | after A | after B | A' 128 | A' 256 | A' 512"
        " | A' 1,024 | A' as read | lesioned, A' 128 | lesioned, A' 512 |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    keys = ["read A", "read B", "after A", "0", "128", "256", "512", "1024", READ]
    for arm, entry in part.items():
        runs = entry["runs"]
        cells = [show([run[key] for run in runs]) for key in keys]
        lesioned = [
            show([run[key] for run in runs]) if key in runs[0] else ""
            for key in ("lesioned 128", "lesioned 512")
        ]
        lines.append(
            f"| {arm} | {_said(entry['setting'])} | {' | '.join(cells)} | {' | '.join(lesioned)} |"
        )
    lower = part["k=1"]["lower"]
    cells = [show([run[key] for run in lower]) for key in keys]
    lines += [
        f"| k=1, half the rate | not chosen | {' | '.join(cells)} | | |",
        "",
        "The loss is that of a later part of A which is never learned (*as read*: of the text"
        " itself, each token before it is learned; of A' the first 512 tokens). Claim: with levels"
        " A returns faster than without, and the slow levels are why. After 512 tokens k=1 has"
        " relearned A, and nobody is ahead. A lesion takes away whatever the slow levels hold, not"
        " only A. Half the rate keeps A as well for k=1, but then it learns A and B less well.",
        "",
    ]
    for arm, entry in part.items():
        if arm != "k=1":
            lines += _verdicts(arm, entry["runs"], plain, lower)
    _plot(part, picture)
    return [*lines, ""]


def _verdicts(arm: str, runs: Any, plain: Any, lower: Any) -> list[str]:
    def against(other: Any, key: str, name: str = "") -> str:
        return verdict([a[name + key] - b[key] for a, b in zip(runs, other)])

    lines = [
        f"- {arm}: lower loss on A than k=1 after B {against(plain, '0')}; after 128 tokens of A'"
        f" {against(plain, '128')}; 256 {against(plain, '256')}; 512 {against(plain, '512')}; A'"
        f" as read {against(plain, READ)}.",
        f"- {arm}, against k=1 at half its rate: after 128 {against(lower, '128')}; 512"
        f" {against(lower, '512')}; loss of B as read {against(lower, 'read B')}.",
        f"- {arm}: tokens of A' until A's loss is where k=1 has it after 256:"
        f" {show([_tokens(a, b['256']) for a, b in zip(runs, plain)], 0)}.",
    ]
    if "lesioned 0" in runs[0]:
        worse = [a["lesioned 128"] - a["128"] for a in runs]
        lines.append(
            f"- {arm}: without its slow levels the loss on A after 128 tokens is higher:"
            f" {verdict(worse, better_below=False)}, and no longer below that of k=1:"
            f" {show([a['lesioned 128'] - b['128'] for a, b in zip(runs, plain)])} above it."
        )
    return lines


def _tokens(run: dict[str, float], loss: float) -> float:
    """Tokens of A' after which the loss on A is at most this, by linear interpolation."""
    for one, two in itertools.pairwise(POINTS):
        if run[one] <= loss:
            return float(one)
        if run[two] <= loss:
            share = (run[one] - loss) / (run[one] - run[two])
            return float(one) + share * (float(two) - float(one))
    return float(POINTS[-1])


def _said(setting: dict[str, Any]) -> str:
    said = f"chunks {'/'.join(map(str, setting['chunks']))}, rate {setting['rate']:g}"
    if setting["retain"] != 1.0:
        said += f", retain {setting['retain']:g}"
    return said + (f", share {setting['share']:g}" if setting["share"] is not None else "")


def _plot(part: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def mean(runs: Any, name: str = "") -> list[float]:
        return [statistics.fmean(run[name + point] for run in runs) for point in POINTS]

    figure, axis = pyplot.subplots(figsize=(8, 4.5))
    xs = [int(point) for point in POINTS]
    for (arm, entry), colour in zip(part.items(), COLOURS, strict=False):
        axis.plot(xs, mean(entry["runs"]), marker="o", color=colour, label=arm)
        if arm == "2 levels":
            dashed = {"linestyle": "--", "marker": "x", "color": colour}
            axis.plot(xs, mean(entry["runs"], "lesioned "), label=f"{arm}, lesioned", **dashed)
    after = statistics.fmean(run["after A"] for run in part["k=1"]["runs"])
    axis.axhline(after, color="#8c8c8c", linewidth=1, linestyle=":")
    axis.text(0, after, "k=1 after A", va="bottom", fontsize=8)
    axis.set_xlabel("tokens of A' learned after B")
    axis.set_ylabel("loss on a later part of A")
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
