"""Part (iv) of the page: the size of chunks."""

from __future__ import annotations

from typing import Any

from studies.adapt.chunks import SIZE
from studies.adapt.verdicts import show
from studies.harness.verdict import interval

SMALL = "64"


def section(part: dict[str, Any]) -> list[str]:
    """Table, and every size against chunks of 64."""
    frozen = part.pop("frozen")
    lines = [
        "## (iv) The size of chunks, at one rate per token",
        "",
        f"Three levels with the defaults of `nestling.adapt` on {SIZE[0] - 1:,} tokens of each of"
        f" {len(frozen)} books; the rate is the fastest chunk / 3200. *Stream* is the loss of every"
        " token before it was learned. The rate per token is that of the earlier default (64 at"
        " 0.02); 256 was made the default after it had looked alike on the tuning books. What it"
        " gives up against 64 stands below, what it saves in [the guide](../cms.md#cost).",
        "",
        "| fastest chunk | rate | stream | new | old |",
        "|---|---|---|---|---|",
        f"| base model | | | {_show(frozen, 'new')} | {_show(frozen, 'old')} |",
    ]
    for chunk, runs in part.items():
        cells = " | ".join(_show(runs, kind) for kind in ("stream", "new", "old"))
        lines.append(f"| {chunk} | {int(chunk) / 3200:g} | {cells} |")
    lines.append("")
    for chunk, runs in part.items():
        if chunk != SMALL:
            said = [f"{kind} {_against(runs, part[SMALL], kind)}" for kind in ("new", "old")]
            lines.append(f"- chunks of {chunk} against chunks of {SMALL}: {', '.join(said)}.")
    return [*lines, ""]


def _show(runs: list[dict[str, float]], kind: str) -> str:
    return show([run[kind] for run in runs])


def _against(ours: list[dict[str, float]], theirs: list[dict[str, float]], kind: str) -> str:
    mean, half = interval([a[kind] - b[kind] for a, b in zip(ours, theirs, strict=True)])
    return f"{mean:+.3f} ± {half:.3f}"
