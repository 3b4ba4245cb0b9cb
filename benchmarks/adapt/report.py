"""The results as docs/results/adapt.md and its pictures, generated from the stored runs."""

from __future__ import annotations

import json
from pathlib import Path

import report_frontier
import report_loop
import report_recall
import report_smollm2

HEAD = (
    "# Pretrained models that keep learning: what was measured",
    "",
    "Made by `python benchmarks/adapt` from stored runs. Losses in nats per token, 95% confidence"
    " intervals over books or seeds (Student's t). Seeds are few and comparisons many; the"
    " intervals are not corrected for that. Settings were chosen on books and seeds that appear in"
    " no table.",
    "",
)
STORIES = (
    "The base model is stories260K, old text is TinyStories. Every arm reads each token once,"
    " forward and backward (about three forward passes; EWC and dynamic evaluation read 1,024"
    " old tokens more, and replay gives up some of the new ones), and has two variants and three"
    " rates; the variant with the least new + old loss at its best rate on a tuning book was taken."
    " EWC, replay and dynamic evaluation use old text; the memories do not. Of several"
    " levels only the fastest has a rate; the slower ones receive a quarter of the next faster one"
    " whenever they are due. (Slow levels that take steps of their own, at rates that grow with"
    " their chunks, were behind k=1 on the tuning book when measured just after such a step.) The"
    " best k=1 has chunks of 32, the fastest of several levels chunks of 64. Books were extended"
    " from three to eight, for all arms, after three had left 3 levels against k=1 open."
)


def write(stored: Path, docs: Path) -> str:
    """Write the page from whichever parts are there; returns it."""
    docs.mkdir(parents=True, exist_ok=True)
    parts = {}
    for name in ("frontier", "smollm2", "loop", "recall"):
        path = stored / f"part_{name}.json"
        if path.exists():
            parts[name] = json.loads(path.read_text())
    lines = list(HEAD)
    if "frontier" in parts:
        picture = docs / "adapt_frontier.png"
        title = "(i) Frontier, stories260K"
        lines += report_frontier.section(title, STORIES, parts["frontier"], picture)
    if "smollm2" in parts:
        lines += report_smollm2.section(parts["smollm2"], docs / "adapt_smollm2.png")
    if "loop" in parts:
        lines += report_loop.section(parts["loop"], docs / "adapt_loop.png")
    if "recall" in parts:
        lines += report_recall.section(parts["recall"])
    page = "\n".join(lines)
    (docs / "adapt.md").write_text(page, encoding="utf-8")
    return page
