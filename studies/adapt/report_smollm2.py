"""Part (i) on SmolLM2: the frontier of a real model, and whether learning helps it at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from studies.adapt import report_frontier
from studies.adapt.verdicts import show, verdict

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


def section(part: dict[str, Any], picture: Path) -> list[str]:
    """The frontier, then every arm at its middle rate against the frozen model."""
    title = "Frontier, SmolLM2-135M"
    lines = report_frontier.section(title, SAID, part, picture, "part")
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
            f"- {arm}, rate {rate:g}: learning lowers the new loss: {verdict(new)}; the old loss"
            f" moves by {show(old, 4)}."
        )
    same = "equal, bit for bit" if part["rate 0"]["same"] else "NOT equal"
    count = part["rate 0"]["tokens"]
    lines.append(f"- rate 0, three levels: the logits of {count} tokens are {same}.")
    return [*lines, ""]
