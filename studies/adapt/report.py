"""The results as pages in docs/results with their pictures, generated from the stored runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nestling.files import write_atomic
from studies.adapt import report_chunks, report_frontier, report_loop, report_recall, report_smollm2
from studies.harness.store import Store

HEAD = (
    "Made by `{command}` from stored runs. Losses in nats per token, 95% confidence intervals over"
    " books or seeds (Student's t). Seeds are few and comparisons many; the intervals are not"
    " corrected for that. {other}"
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


PAGES = {
    "adapt.md": (
        "Pretrained models that keep learning: what was measured",
        "python -m studies adapt",
        "Settings were chosen on texts and seeds that appear in no table."
        " [The same frontier on SmolLM2-135M](adapt_smollm2.md).",
        ("frontier", "loop", "recall", "chunks"),
    ),
    "adapt_smollm2.md": (
        "A pretrained model of 135M parameters keeps learning: what was measured",
        "python -m studies adapt --parts smollm2 --smollm2 FILE",
        "[The studies on stories260K](adapt.md).",
        ("smollm2",),
    ),
}


def write(store: Store, docs: Path) -> str:
    """Write every page whose parts are all stored; returns them."""
    made = []
    for name, (title, command, other, parts) in PAGES.items():
        results = {part: result for part in parts for result in store.read(f"part_{part}")}
        if len(results) < len(parts):
            continue
        lines = [f"# {title}", "", HEAD.format(command=command, other=other), ""]
        for part, result in results.items():
            lines += _section(part, result, docs)
        page = "\n".join(lines)
        write_atomic(docs / name, page.encode())
        made.append(page)
    return "\n".join(made)


def _section(part: str, result: Any, docs: Path) -> list[str]:
    if part == "frontier":
        title, picture = "(i) Frontier, stories260K", docs / "adapt_frontier.png"
        return report_frontier.section(title, STORIES, result, picture)
    if part == "smollm2":
        return report_smollm2.section(result, docs / "adapt_smollm2.png")
    if part == "loop":
        return report_loop.section(result, docs / "adapt_loop.png")
    if part == "chunks":
        return report_chunks.section(result)
    return report_recall.section(result)
