"""The part of the results page about languages (CTNL, Fig. 8): tables, and a verdict per claim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nestling.continual import metrics
from nestling.continual.translation_study import LEARNERS, translations
from nestling.report.store import Store

__all__ = ["translation_part"]

Run = dict[str, Any]
COLUMNS = ("first alone", "first at the end", "second alone", "second at the end")

HEAD = """
## New languages, one after another (CTNL)

chrF (0 to 100, by sacrebleu) of two languages into English. *alone*: right after that language was
learned from the base model; *at the end*: after the first, then the second. *enciphered* is an
analogue that a small model can learn, two invented languages over a base that has learned a third;
it says how learners forget, not how well anyone translates. *real* is Kalamang, then Indonesian
from the same dictionary (or the user's Manchu set), by the 1M-parameter Hope base. Each learner's
rate was chosen among the same ones, on other invented languages or on held-out sentences.
"""


def _both(run: Run) -> float:
    return float(run["first at the end"] + run["second at the end"]) / 2


def _kept(run: Run) -> float:
    return float(run["first at the end"])


def _recovered(run: Run) -> float:
    """Both at the end over both alone, beyond nine tenths; in chrF's scale."""
    alone = run["first alone"] + run["second alone"]
    return 100 * (2 * _both(run) / max(alone, 1e-9) - 0.9)


CLAIMS: tuple[tuple[str, Callable[[Run], float], str, str | None], ...] = (
    ("Hope-3 keeps more of the first language than Hope-1", _kept, "hope-3", "hope-1"),
    ("Hope-2 keeps more of the first language than Hope-1", _kept, "hope-2", "hope-1"),
    ("Hope-3 is ahead of Hope-1 on both languages at the end", _both, "hope-3", "hope-1"),
    ("Hope-3 nearly recovers learning alone (over 90%)", _recovered, "hope-3", None),
    ("Hope-1 nearly recovers learning alone (over 90%)", _recovered, "hope-1", None),
    ("Hope-3 is ahead of in-context learning at the end", _both, "hope-3", "icl"),
)


def translation_part(store: Store, *, quick: bool = False) -> list[str]:
    """Tables and verdicts from the stored runs; nothing where there are none."""
    found: dict[tuple[str, str], dict[str, dict[int, Run]]] = {}
    for run in translations(store, quick=quick):
        facts = run["facts"]
        key = facts["problem"], facts["order"]
        found.setdefault(key, {}).setdefault(facts["learner"], {})[facts["seed"]] = run
    if not found:
        return []
    lines = [HEAD, f"| problem | learner | {' | '.join(COLUMNS)} | rate | seeds |"]
    lines += ["|" + "---|" * (len(COLUMNS) + 4)]
    for (problem, order), learners in sorted(found.items()):
        for name in (each for each in LEARNERS if each in learners):
            runs = learners[name]
            cells = [_shown([run[c] for run in runs.values()]) for c in COLUMNS]
            rate = "-" if name == "icl" else next(iter(runs.values()))["facts"]["rate"]
            where = f"{problem}: {order}"
            lines.append(f"| {where} | {name} | {' | '.join(cells)} | {rate} | {len(runs)} |")
    lines += ["", "| claim | problem | verdict | difference |", "|---|---|---|---|"]
    for claim, measure, ours, theirs in CLAIMS:
        for (problem, _), learners in sorted(found.items()):
            gap = _gap(learners, measure, ours, theirs)
            if gap is not None:
                lines.append(
                    f"| {claim} | {problem} | **{metrics.verdict(gap)}** |"
                    f" {gap.mean:+.1f} ± {gap.half:.1f} |"
                )
    return lines


def _gap(
    learners: dict[str, dict[int, Run]],
    measure: Callable[[Run], float],
    ours: str,
    theirs: str | None,
) -> metrics.Interval | None:
    """Our measure, or ours minus theirs, over the seeds both have."""
    mine = learners.get(ours, {})
    other = mine if theirs is None else learners.get(theirs, {})
    seeds = sorted(set(mine) & set(other))
    if not seeds:
        return None
    if theirs is None:
        return metrics.interval([measure(mine[s]) for s in seeds])
    return metrics.interval([measure(mine[s]) - measure(other[s]) for s in seeds])


def _shown(values: list[float]) -> str:
    found = metrics.interval(values)
    return f"{found.mean:.1f} ± {found.half:.1f}"
