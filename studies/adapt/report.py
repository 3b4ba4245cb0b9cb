"""The results as pages in docs/results with their pictures, generated from the stored runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nestling.files import write_atomic
from studies.adapt import chunks, frontier, loop, recall
from studies.harness.store import Store
from studies.harness.verdict import judged, show

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
        results = {part: result for part in parts for result in store.named(f"part_{part}")}
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
        return frontier.section(title, STORIES, result, picture)
    if part == "smollm2":
        return smollm2(result, docs / "adapt_smollm2.png")
    if part == "loop":
        return loop.section(result, docs / "adapt_loop.png")
    if part == "chunks":
        return chunks.section(result)
    return recall.section(result)


SAID = (
    'The text is "A grammar of Kalamang" (LaTeX), another part of it for each seed. Old text is the'
    " model's own: conversations sampled from it at temperature 1, so no loss on them can be"
    " lower on average than the model's as it is, and the rise says what was forgotten, whatever"
    " was learned. (On WikiText-2 the old loss of all arms had fallen in an earlier round, as a"
    " grammar is nearer to articles than to what an assistant is asked.) What learns are MLPs of"
    " the last 10 of 30 layers (fine-tuning: those layers, LoRA: their MLPs). Every arm has one"
    " variant, from pilots on this grammar of which no record is left, so that they may have seen"
    " some of these parts; k=1 and the levels have four rates, the others three. k=1 and"
    " 3 levels were extended from five parts to eight after five had left them apart by"
    " -0.0087 ± 0.0088 at 90% of the gain; 4 levels have five, the others three."
    " All memories learn by Adam (`rule='adam'`). EWC, replay and dynamic"
    " evaluation see other conversations of the model; the memories see none."
)


def smollm2(part: dict[str, Any], picture: Path) -> list[str]:
    """The frontier, then every arm at its middle rate against the frozen model."""
    title = "Frontier, SmolLM2-135M"
    lines = frontier.section(title, SAID, part, picture, "part")
    lines += ["At its middle rate, against the frozen model:", ""]
    start = part["frozen"]
    for arm, seeds in part["arms"].items():
        middle = {seed: points[len(points) // 2] for seed, points in seeds.items()}
        new, old = (
            [point[key] - start[seed][key] for seed, point in middle.items()]
            for key in ("new", "old")
        )
        rate = next(iter(middle.values()))["rate"]
        lines.append(
            f"- {arm}, rate {rate:g}: learning lowers the new loss:"
            f" {judged(new, higher=False)}; the old loss moves by {show(old, 4)}."
        )
    same = "equal, bit for bit" if part["rate 0"]["same"] else "NOT equal"
    count = part["rate 0"]["tokens"]
    lines.append(f"- rate 0, three levels: the logits of {count} tokens are {same}.")
    return [*lines, ""]
