"""The page of `lm.py`, from its stored runs: docs/results/lm.md and its picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from nestling.files import write_atomic
from nestling.models import presets
from nestling.report import Line, lines
from studies.harness.verdict import interval

NAMES = {
    "hope": "Hope",
    "transformer": "Transformer++",
    "titans": "Titans",
    "deltanet": "DeltaNet",
    "hope_parallel": "Hope, levels side by side (Eq. 74)",
    "hope_gated": "Hope, gated levels",
    "hope_parallel_gated": "Hope, gated levels side by side",
    "hope_printed": "Hope as printed (Eq. 83-88)",
}
Runs = dict[str, list[dict[str, Any]]]


def show(values: list[float], digits: int = 3, sign: str = "") -> str:
    mean, half = interval(values)
    return f"{mean:{sign}.{digits}f} ± {half:.{digits}f}"


def page(
    stored: dict[str, dict[str, Any]], path: Path, *, length: int, rows: int, size: presets.Size
) -> None:
    """Write the page and its picture."""
    runs: Runs = {}
    for key, result in sorted(stored.items()):
        if key.startswith("run/"):
            runs.setdefault(result["arm"], []).append(result)
    trials = [r for key, r in stored.items() if key.startswith("tune/")]
    runs = {arm: runs[arm] for arm in NAMES if arm in runs}
    if not runs:
        path.write_text("# Language modelling\n\nNo finished runs yet.\n")
        return
    first = next(iter(runs.values()))[0]
    text = [
        "# Language modelling: Hope beside its neighbours\n",
        f"Bytes of WikiText-2, {size.layers} layers of width {size.width}, about"
        f" {size.parameters:,} parameters each, {first['tokens']:,} tokens of training in windows"
        f" of {length}, {rows} at a time. Each arm's rate is the best of three, by the validation"
        " loss at half the steps on a seed that is not used again. Mean and 95% interval over"
        f" {min(len(r) for r in runs.values())} seeds; losses in nats per byte.\n",
        "| model | rate | validation loss | against Hope, seed by seed | training, CPU s |",
        "|---|---|---|---|---|",
        *(_row(arm, found, runs.get("hope")) for arm, found in runs.items()),
        "",
        "All rates tried (validation loss): "
        + "; ".join(_tried(arm, trials) for arm in runs)
        + ".",
        "",
        *_limit(runs),
        "## Beyond the trained length\n",
        f"Every model reads streams of {8 * length:,} bytes: the loss of each stretch of {length}"
        " bytes.\n",
        "| model | " + " | ".join(f"to {length * (i + 1):,}" for i in range(8)) + " |",
        "|---|" + "---|" * 8,
        *(_stretches(arm, found) for arm, found in runs.items()),
        "",
        f"![Loss against position]({path.stem}_positions.svg)\n",
        _reading(runs),
        "`python -m studies older.lm --data FOLDER` runs what is missing and writes this page.\n",
    ]
    write_atomic(path, "\n".join(text).encode())
    write_atomic(path.with_name(f"{path.stem}_positions.svg"), _picture(runs, length).encode())


def _row(arm: str, found: list[dict[str, Any]], hope: list[dict[str, Any]] | None) -> str:
    valid = [r["valid"] for r in found]
    gap = "-"
    if hope and arm != "hope":
        ours = {r["seed"]: r["valid"] for r in hope}
        pairs = [r["valid"] - ours[r["seed"]] for r in found if r["seed"] in ours]
        gap = show(pairs, sign="+") if pairs else "-"
    seconds = sum(r["seconds"] for r in found) / len(found)
    return f"| {NAMES[arm]} | {found[0]['rate']:g} | {show(valid)} | {gap} | {seconds:.0f} |"


def _tried(arm: str, trials: list[dict[str, Any]]) -> str:
    mine = sorted((r["rate"], r["valid"]) for r in trials if r["arm"] == arm)
    if not mine:
        return f"{NAMES[arm]} takes Hope's"
    return f"{NAMES[arm]} " + ", ".join(f"{rate:g}: {loss:.3f}" for rate, loss in mine)


def _limit(runs: Runs) -> list[str]:
    """What the levels in other forms say about the chain of plain ones."""
    said = []
    for arm in ("hope_parallel", "hope_gated", "hope_parallel_gated"):
        pairs = zip(runs.get("hope", []), runs.get(arm, []), strict=False)
        gaps = [plain["valid"] - other["valid"] for plain, other in pairs]
        if len(gaps) > 1:
            mean, half = interval(gaps)
            word = "costs" if mean > half else "does not cost significantly"
            other = NAMES[arm].removeprefix("Hope, ")
            said.append(f"- Hope's chain of narrow levels {word} {show(gaps)} nats against {other}")
    title = "What limits Hope at this size, with the same memory and parameters:"
    return [title, "", *said, ""] if said else []


def _stretches(arm: str, found: list[dict[str, Any]]) -> str:
    each = zip(*(r["positions"] for r in found), strict=True)
    return f"| {NAMES[arm]} | " + " | ".join(show(list(v), 2) for v in each) + " |"


def _rise(found: list[dict[str, Any]]) -> tuple[float, float]:
    """How much more the last four stretches cost than the first, mean and half interval."""
    return interval([sum(r["positions"][4:]) / 4 - r["positions"][0] for r in found])


def _reading(runs: Runs) -> str:
    """What the numbers say, in words made from the numbers."""
    said = []
    for arm, found in runs.items():
        mean, half = _rise(found)
        if math.isfinite(mean) and abs(mean) <= half:
            word = "does not change significantly"
        else:
            word = "rises" if mean > 0 else "falls"
        said.append(f"{NAMES[arm]}: {word} ({mean:+.3f} ± {half:.3f}).")
    listed = "\n".join(f"- {line}" for line in said)
    return f"From the first stretch to the mean of the last four the loss\n\n{listed}\n"


def _picture(runs: Runs, length: int) -> str:
    drawn = []
    for arm, found in runs.items():
        each = [interval(list(v)) for v in zip(*(r["positions"] for r in found), strict=True)]
        x = [length * (i + 0.5) for i in range(len(each))]
        mean = [m for m, _ in each]
        low, high = [m - h for m, h in each], [m + h for m, h in each]
        drawn.append(Line(NAMES[arm].split(" (")[0], x, mean, low, high))
    return lines(drawn, x="position (bytes)", y="loss (nats per byte)")
