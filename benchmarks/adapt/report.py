"""The results as docs/results/adapt.md and its pictures, generated from the stored runs."""

from __future__ import annotations

import json
from pathlib import Path

import report_frontier
import report_loop
import report_recall

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
    " whenever they are due."
)
SMOLLM2 = (
    'The base model is SmolLM2-135M-Instruct, the book "A grammar of Kalamang" in LaTeX, of which'
    " each seed is another part, old text WikiText-2. The last 10 of 30 layers learn (memories and"
    " LoRA: their MLPs), every arm at two rates, without further tuning."
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
        part, picture = parts["smollm2"], docs / "adapt_smollm2.png"
        lines += report_frontier.section("(i) SmolLM2-135M", SMOLLM2, part, picture)
        lines += report_frontier.learning(part)
        same = "the same, bit for bit" if part["rate 0"]["same"] else "NOT the same"
        count = part["rate 0"]["tokens"]
        lines += [f"Rate 0: logits of {count} tokens after learning are {same}.", ""]
    if "loop" in parts:
        lines += report_loop.section(parts["loop"], docs / "adapt_loop.png")
    if "recall" in parts:
        lines += report_recall.section(parts["recall"])
    page = "\n".join(lines)
    (docs / "adapt.md").write_text(page, encoding="utf-8")
    return page
