"""(iv) The size of chunks, at the same rate per token, by plain gradient descent.

Three levels, each chunk four times the next faster one's, at a rate that grows with the fastest
chunk. What the first pass over a long text costs in loss (stream), what it leaves on the
text's continuation (new), and what it does to text of the base model's own kind (old).
"""

from __future__ import annotations

from typing import Any

import nestling
from studies.adapt.frontier import frozen
from studies.adapt.texts import Base
from studies.harness.store import key_of
from studies.harness.verdict import interval, show

CHUNKS = (32, 64, 128, 256, 512)
SIZE = (16385, 4096)


def run(base: Base, data: Any, chunk: int, which: int, size: tuple[int, int]) -> dict[str, float]:
    """One book in chunks of one size."""
    length, continued = size
    ids = base.text(base, data, which, length + continued)
    learner = nestling.adapt(base.model, [chunk, 4 * chunk, 16 * chunk], rate=chunk / 3200)
    stream = learner.learn(ids[:length]).loss
    return {"stream": stream, "new": learner.score(ids[length:]), "old": learner.score(base.old)}


def study(
    base: Base,
    data: Any,
    store: Any,
    seeds: tuple[int, ...],
    *,
    size: tuple[int, int] = SIZE,
    sizes: tuple[int, ...] = CHUNKS,
) -> dict[str, Any]:
    """Every size on every book, and the base model as it is."""
    found: dict[str, Any] = {
        "frozen": [
            store.get(
                key_of(f"chunks frozen book {seed}"), lambda s=seed: frozen(base, data, s, size)
            )
            for seed in seeds
        ]
    }
    for chunk in sizes:
        found[str(chunk)] = [
            store.get(
                key_of(f"chunks {chunk} book {s}"), lambda c=chunk, s=s: run(base, data, c, s, size)
            )
            for s in seeds
        ]
    return found


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
