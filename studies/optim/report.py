"""The results as docs/results/optim.md and its plots, generated from the stored runs."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from nestling.files import write_atomic
from studies.harness.page import kept
from studies.harness.verdict import PLACE, difference, interval, show, verdict

TITLES = {
    "vit": "(a) Small ViT on MNIST",
    "lm": "(b) Causal language model on tiny Shakespeare (characters)",
}
STREAMS = "(c) DGD and gradient descent on streams"
VALLEY = "(d) Delta momentum and momentum on Eq. 53"
COLOURS = ["#8c8c8c", "#edae49", "#8d6a9f", "#00798c", "#d1495b"]


def against(name: str, ours: list[float], theirs: list[float]) -> str:
    """`ahead of <name>: difference ± half width`, paired by seed; lower is better."""
    gap = difference(ours, theirs)
    word = verdict(gap, higher=False, words=PLACE)
    return f"{word} {name}: {gap.mean:+.4f} ± {gap.half:.4f}"


def compared(name: str, results: dict[str, Any], key: str) -> str:
    """M3 against another arm, seed by seed."""
    ours, theirs = ([run[key] for run in results[arm]["runs"]] for arm in ("M3", name))
    return f"{key} loss: M3 is {against(name, ours, theirs)}."


def training_part(task: str, results: dict[str, Any]) -> list[str]:
    """Table and verdicts of part (a) or (b)."""
    first = results["AdamW"]["runs"][0]
    lines = [
        f"{first['parameters']:,} parameters, {len(results['AdamW']['runs'])} seeds,"
        f" {len(results['AdamW']['trials'])} rates tried for each on another seed.",
        "",
        "| | rate | train loss | test loss | test accuracy | processor s | of that, optimizer |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm, entry in results.items():
        runs = entry["runs"]
        columns = {key: [run[key] for run in runs] for key in ("train", "test", "accuracy")}
        seconds = statistics.fmean(run["seconds"] for run in runs)
        step = statistics.fmean(run["step_seconds"] for run in runs)
        lines.append(
            f"| {arm} | {entry['rate']:g} | {show(columns['train'], 4)} |"
            f" {show(columns['test'], 4)} | {show(columns['accuracy'], 3)} |"
            f" {seconds:.1f} | {1000 * step:.1f} ms a step |"
        )
    verdicts = [
        compared(n, results, k) for n in ("AdamW", "Muon", "AdaMuon") for k in ("train", "test")
    ]
    edges = [
        a
        for a, e in results.items()
        if e["rate"] in (min(e["trials"], key=float), max(e["trials"], key=float))
    ]
    if edges:
        verdicts.append(
            f"Best rate at the edge of the grid (may do better beyond): {', '.join(edges)}."
        )
    return [*lines, "", *[f"- {line}" for line in verdicts], "", f"![curves](optim_{task}.png)"]


def stream_part(results: dict[str, Any]) -> list[str]:
    """Table of part (c)."""
    lines = [
        "A linear layer on a noisy linear target, 30 seeds, the same 24 rates tried for each rule"
        " on ten other seeds. *online* is the loss on each pair before it is learned. *DGD* keeps"
        " the loss's fixed points (`erase=0`, the default); *as printed* (Eq. 57) erases twice on a"
        " squared error and settles at half the target.",
        "",
        "| stream | rule | rate | final loss | online loss | forgetting |",
        "|---|---|---|---|---|---|",
    ]
    for stream, rules in results.items():
        for name, entry in rules.items():
            lost = show(entry["forgetting"], 4) if stream == "orthogonal" else "-"
            lines.append(
                f"| {stream} | {name} | {entry['rate']:.3g} | {show(entry['final'], 4)} |"
                f" {show(entry['online'], 3)} | {lost} |"
            )
    lines.append("")
    for stream, rules in results.items():
        for key in ("final", "online"):
            word = against("gradient descent", rules["DGD"][key], rules["gradient descent"][key])
            lines.append(f"- {stream}, {key}: DGD is {word}.")
    return lines


def valley_part(results: dict[str, Any]) -> list[str]:
    """Table of part (d)."""
    lines = [
        "Steps until the loss stays below 0.001 (301: not within 300), 100 random starts and the"
        " paper's; both rules try the same 45 settings on 50 other starts. The paper gives no"
        " constants, so several steepnesses k of the walls.",
        "",
        "| surface | rule | decay | rate | paper's start | 100 starts | arrived |",
        "|---|---|---|---|---|---|---|",
    ]
    for surface, rules in results.items():
        for name, entry in rules.items():
            arrived = sum(steps <= 300 for steps in entry["steps"])
            lines.append(
                f"| {surface} | {name} | {entry['decay']} | {entry['rate']:.3g} |"
                f" {entry['paper']:.0f} | {show(entry['steps'], 1)} | {arrived} |"
            )
    return lines


def plot(task: str, results: dict[str, Any], path: Path) -> None:
    """Training curves, the mean over seeds, and the test losses as points."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    shown = {arm: entry for arm, entry in results.items() if arm != "M3 literal"}
    for colour, (arm, entry) in zip(COLOURS, shown.items(), strict=False):
        curves = [run["curve"] for run in entry["runs"]]
        mean = [statistics.fmean(values) for values in zip(*curves, strict=False)]
        left.plot(
            [100 * (i + 1) / len(mean) for i in range(len(mean))], mean, color=colour, label=arm
        )
    tail = [run["curve"] for entry in shown.values() for run in entry["runs"]]
    low = min(min(curve) for curve in tail)
    high = max(curve[len(curve) // 5] for curve in tail)
    left.set(xlabel="% of training", ylabel="train loss", ylim=(0.95 * low, 1.05 * high))
    left.set_title(TITLES[task])
    left.legend(frameon=False)
    for at, (colour, entry) in enumerate(zip(COLOURS, shown.values(), strict=False)):
        values = [run["test"] for run in entry["runs"]]
        found = interval(values)
        right.errorbar(at, found.mean, found.half, fmt="o", color=colour, capsize=5, ms=7)
        right.plot([at + 0.18] * len(values), values, ".", color=colour, alpha=0.6)
    right.set_xticks(range(len(shown)), list(shown))
    right.set(ylabel="test loss")
    right.set_title("Mean, 95% interval, and every seed")
    figure.savefig(path, dpi=130)
    plt.close(figure)


HEAD = """# Optimizers: what was measured

Generated by `python -m studies optim` from its stored runs. For a given seed all arms share
weights, batches, schedule, clipping and weight decay; all try the same number of learning rates.
Times are processor time of one thread. "±" is a 95% confidence interval. M3's defaults were chosen
in pilots on a smaller language model and other seeds, and settled before the seeds of (a) were run;
AdamW, Muon and AdaMuon run with their usual ones. (b) was extended from 5 to 10 seeds, for all
arms, because one bad run of Muon's had left it and M3 inseparable. Delta momentum's own rate (0.2)
was chosen on these surfaces from other starts.
"""


def write(parts: dict[str, Any], folder: Path) -> Path:
    """Write the page and its plots; a part that has no runs keeps what the page says of it."""
    path = folder / "optim.md"
    found: dict[str, list[str] | None] = {}
    for task, title in TITLES.items():
        found[title] = training_part(task, parts[task]) if task in parts else None
        if task in parts:
            plot(task, parts[task], folder / f"optim_{task}.png")
    found[STREAMS] = stream_part(parts["streams"]) if "streams" in parts else None
    found[VALLEY] = valley_part(parts["valley"]) if "valley" in parts else None
    old = path.read_text(encoding="utf-8") if path.is_file() else ""
    write_atomic(path, ("\n".join([HEAD, *kept(found, old)]).rstrip() + "\n").encode())
    return path
