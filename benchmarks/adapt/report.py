"""The results as docs/results/adapt.md and its pictures, generated from the stored runs."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

from frontier import old_at

T975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262, 29: 2.045}
COLOURS = ("#8c8c8c", "#d1495b", "#00798c", "#edae49", "#8d6a9f", "#4d7c0f", "#0369a1", "#9d174d")
MEMORIES = ("k=1", "3 levels", "4 levels")


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half width of its 95% confidence interval (Student's t)."""
    if len(values) < 2:
        return statistics.fmean(values), math.nan
    known = max(f for f in T975 if f <= len(values) - 1)
    return statistics.fmean(values), T975[known] * statistics.stdev(values) / len(values) ** 0.5


def show(values: list[float], digits: int = 3) -> str:
    """`mean ± half width`."""
    if not values:
        return "-"
    mean, half = interval(values)
    return f"{mean:.{digits}f}" + (f" ± {half:.{digits}f}" if math.isfinite(half) else "")


def verdict(differences: list[float], *, better_below: bool = True) -> str:
    """Shown, refuted or inconclusive, by whether the interval of the differences excludes zero."""
    if len(differences) < 2:
        return "inconclusive (too few seeds)"
    mean, half = interval(differences)
    if abs(mean) <= half:
        return f"inconclusive ({mean:+.4f} ± {half:.4f})"
    word = "shown" if (mean < 0) == better_below else "refuted"
    return f"{word} ({mean:+.4f} ± {half:.4f})"


def write(stored: Path, docs: Path) -> str:
    """Write the page from whichever parts are there; returns it."""
    docs.mkdir(parents=True, exist_ok=True)
    parts = {}
    for name in ("frontier", "smollm2", "loop", "recall"):
        path = stored / f"part_{name}.json"
        if path.exists():
            parts[name] = json.loads(path.read_text())
    lines = [
        "# Pretrained models that keep learning: what was measured",
        "",
        "Made by `python benchmarks/adapt` from stored runs. Losses in nats per token, 95%"
        " confidence intervals over seeds (Student's t); a seed is another book.",
        "",
    ]
    if "frontier" in parts:
        lines += _frontier(parts["frontier"], docs)
    if "smollm2" in parts:
        lines += _smollm2(parts["smollm2"])
    else:
        lines += ["## (i) SmolLM2-135M", "", "Not run to the end yet: `--parts smollm2`.", ""]
    if "loop" in parts:
        lines += _loop(parts["loop"], docs)
    if "recall" in parts:
        lines += _recall(parts["recall"])
    page = "\n".join(lines)
    (docs / "adapt.md").write_text(page, encoding="utf-8")
    return page


def levels_of_new(part: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Per seed the new losses at which arms are compared: shares of what k=1 gains at its best."""
    found: dict[str, dict[str, float]] = {}
    for seed, start in part["frozen"].items():
        best = min(point["new"] for point in part["arms"]["k=1"][seed])
        gain = start["new"] - best
        found[seed] = {f"{share:.0%}": start["new"] - share * gain for share in (0.75, 0.9, 0.95)}
    return found


def _frontier(part: dict[str, Any], docs: Path) -> list[str]:
    """Part (i), stories260K: curves over all rates."""
    targets = levels_of_new(part)
    shares = list(next(iter(targets.values())))
    lines = [
        "## (i) Frontier, stories260K",
        "",
        f"{part['size'][0]:,} tokens of a book are learned in one pass; *new* is the loss on the"
        f" {part['size'][1]:,} tokens after them, *old* the loss on held-out text of the base"
        f" model's own kind. {len(part['frozen'])} seeds. Frozen model: new"
        f" {show([s['new'] for s in part['frozen'].values()])}, old"
        f" {show([s['old'] for s in part['frozen'].values()])}. The table gives the rise of the"
        " old loss where an arm's curve over its rates reaches 75%, 90% and 95% of the best gain"
        " on the new text that k=1 has at any rate, and the best new loss of the arm (-: never"
        " reached, or already passed at the lowest rate; a mean over fewer seeds where some are"
        " so). Seeds are few and comparisons many; the intervals are not corrected for that."
        " The levels' retention was chosen among nine settings on a book that is not a seed, EWC's"
        " penalty among three; the other arms were tuned by their rates only. Dynamic"
        " evaluation, EWC and replay use old text; the memories do not. Fine-tuning and its"
        " kin pay up to twice the compute here.",
        "",
        "![Frontier](adapt_frontier.png)",
        "",
        "| | " + " | ".join(f"old rises at {s} of the gain" for s in shares) + " | best new |",
        "|---|" + "---|" * (len(shares) + 1),
    ]
    rises: dict[str, dict[str, dict[str, float]]] = {}
    for arm, seeds in part["arms"].items():
        rises[arm] = {share: {} for share in shares}
        for seed, points in seeds.items():
            start = part["frozen"][seed]
            for share in shares:
                old = old_at(points, targets[seed][share])
                if old is not None:
                    rises[arm][share][seed] = old - start["old"]
        best = [min(point["new"] for point in points) for points in seeds.values()]
        cells = [show(list(rises[arm][share].values())) for share in shares]
        lines.append(f"| {arm} | {' | '.join(cells)} | {show(best)} |")
    lines += ["", "Claim: at the same new loss the old loss rises less with 3 or 4 levels.", ""]
    for arm in rises:
        if arm not in MEMORIES[1:]:
            continue
        for other in rises:
            if other in MEMORIES[1:]:
                continue
            lines.append(f"- {arm} against {other}: " + _compare(rises, arm, other, shares))
    _plot(part, docs / "adapt_frontier.png")
    return [*lines, ""]


def _smollm2(part: dict[str, Any]) -> list[str]:
    """Part (i), SmolLM2: one rate per arm, so only what learning does, not a curve."""
    seeds = part["frozen"]
    lines = [
        "## (i) SmolLM2-135M",
        "",
        f"{part['size'][0]:,} tokens of a book, the MLPs of the last 10 of 30 layers; new is the"
        f" loss on the {part['size'][1]:,} tokens after them, old that on WikiText-2. {len(seeds)}"
        " seeds, one rate per arm: it shows whether learning helps, not the frontier.",
        "",
        "| | rate | new | old |",
        "|---|---|---|---|",
        f"| frozen | | {show([s['new'] for s in seeds.values()])}"
        f" | {show([s['old'] for s in seeds.values()])} |",
    ]
    verdicts = []
    for arm, runs in part["arms"].items():
        points = {seed: each[0] for seed, each in runs.items()}
        new, old = ([point[key] for point in points.values()] for key in ("new", "old"))
        rate = next(iter(points.values()))["rate"]
        lines.append(f"| {arm} | {rate:g} | {show(new)} | {show(old)} |")
        gains, rises = (
            [point[key] - seeds[seed][key] for seed, point in points.items()]
            for key in ("new", "old")
        )
        verdicts.append(
            f"- {arm}: learning lowers the new loss: {verdict(gains)}; the old loss moves by"
            f" {show(rises, 4)}."
        )
    return [*lines, "", *verdicts, ""]


def _compare(rises: Any, arm: str, other: str, shares: list[str]) -> str:
    said = []
    for share in shares:
        mine, its = rises[arm][share], rises[other][share]
        both = [seed for seed in mine if seed in its]
        if len(both) > 1:
            said.append(f"at {share} {verdict([mine[s] - its[s] for s in both])}")
    return ("; ".join(said) or "no common new loss in two seeds") + "."


def _plot(part: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 5))
    start = {k: statistics.fmean(s[k] for s in part["frozen"].values()) for k in ("new", "old")}
    for number, (arm, seeds) in enumerate(part["arms"].items()):
        count = min(len(points) for points in seeds.values())
        xs, ys = [start["new"]], [start["old"]]
        for i in range(count):
            xs.append(statistics.fmean(points[i]["new"] for points in seeds.values()))
            ys.append(statistics.fmean(points[i]["old"] for points in seeds.values()))
        memory = arm in MEMORIES
        axis.plot(
            xs,
            ys,
            marker="o" if memory else "x",
            linestyle="-" if memory else "--",
            linewidth=2 if memory else 1,
            color=COLOURS[number % len(COLOURS)],
            label=arm,
        )
    axis.set_xlim(right=start["new"] + 0.1)
    axis.set_ylim(top=start["old"] + 2.0)
    axis.set_xlabel("new: loss on the continuation of what was learned")
    axis.set_ylabel("old: loss on what the base model knew")
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _loop(part: dict[str, Any], docs: Path) -> list[str]:
    seeds = len(next(iter(part.values()))["runs"])
    lines = [
        "## (ii) Memory loop A, B, A'",
        "",
        "stories260K learns a book A, then WikiText-2 as B (4,096 tokens each), then a little of"
        f" the continuation A'. Loss on a later part of A; {seeds} seeds. *Lesioned*: all but the"
        " fastest level are emptied after B. *Naive*: the same, but A was never learned.",
        "",
        "| | start | after A | after B | A' 128 | A' 256 | A' 512 | naive A' 512"
        " | lesioned, A' 512 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for arm, entry in part.items():
        runs = entry["runs"]
        keys = ["start", "after A", "after B", "A'128", "A'256", "A'512", "naive A'512"]
        cells = [show([run[key] for run in runs]) for key in keys]
        lesion = [run["lesioned A'512"] for run in runs if "lesioned A'512" in run]
        lines.append(f"| {arm} | {' | '.join(cells)} | {show(lesion) if lesion else ''} |")
    lines += [
        "",
        "Savings are the loss with A before B, minus without (below 0: A helps): each arm against"
        " its own naive run, so an arm that learns B and A' badly without A can have large savings"
        " and still end higher. That A returns *faster* needs the loss itself, or the share of the"
        " rise by B that is undone, to be better too. Rates differ between the arms and were not"
        " tuned for this task. A lesion takes away the levels that hold most of what was learned"
        " (the fastest keeps 90% per update), so its effect alone proves little about savings.",
        "",
    ]
    for arm, entry in part.items():
        runs = entry["runs"]
        saved = [run["A'512"] - run["naive A'512"] for run in runs]
        lines.append(f"- {arm}: savings after 512 tokens of A' {verdict(saved)}.")
        if arm != "k=1" and "k=1" in part:
            plain = [run["A'512"] - run["naive A'512"] for run in part["k=1"]["runs"]]
            more = [a - b for a, b in zip(saved, plain)]
            lines.append(f"- {arm}: more savings than k=1: {verdict(more)}.")
            gap = [a["A'512"] - b["A'512"] for a, b in zip(runs, part["k=1"]["runs"])]
            lines.append(f"- {arm}: a lower loss than k=1 after 512 tokens of A': {verdict(gap)}.")
            share = [_returned(a) - _returned(b) for a, b in zip(runs, part["k=1"]["runs"])]
            said = verdict(share, better_below=False)
            lines.append(f"- {arm}: more of what B undid has returned than with k=1: {said}.")
        if "lesioned A'512" in runs[0]:
            left = [run["lesioned A'512"] - run["naive A'512"] for run in runs]
            gone = [a - b for a, b in zip(saved, left)]
            lines.append(f"- {arm}: the slow levels carry savings: {verdict(gone)}.")
    return [*lines, ""]


def _returned(run: dict[str, float]) -> float:
    """The share of the rise by B that 512 tokens of A' undo."""
    return (run["after B"] - run["A'512"]) / (run["after B"] - run["after A"])


def _recall(part: dict[str, Any]) -> list[str]:
    control = part.pop("1x32")
    slowest = sorted({int(name.split("x")[1]) for name in part})
    levels = sorted({int(name.split("x")[0]) for name in part})
    seeds = len(next(iter(part.values()))["runs"])
    lines = [
        "## (iii) More levels, on a stream of many keys",
        "",
        "Recall (accuracy, mean over lasting, early and passing keys) of 48 keys from the fast"
        f" weights alone, after 3,072 tokens; {seeds} seeds, each cell at its best of three rates"
        " on another seed. One level has the slowest chunk; more levels start at 32.",
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
        " level alone, speaks for levels. The best rates often lie at an edge of the three tried.",
        "",
    ]
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
