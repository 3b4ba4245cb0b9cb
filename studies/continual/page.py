"""The results page, generated from the stored runs: tables with intervals, verdicts, curves."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nestling.files import write_atomic
from studies.continual import metrics
from studies.continual.methods import METHODS
from studies.harness.page import table
from studies.harness.store import Store
from studies.harness.verdict import ENOUGH, Interval, difference, interval, verdict

__all__ = ["compare", "summary", "write_page"]

Run = dict[str, Any]
Runs = dict[str, dict[int, Run]]  # method -> seed -> run
MEASURES = {
    "accuracy": metrics.average_accuracy,
    "forgetting": metrics.forgetting,
    "share forgotten": metrics.forgotten_share,
    "best forgetting": lambda r: metrics.forgetting(r, best=True),
    "first accuracy": lambda r: statistics.fmean(r[j][j] for j in range(len(r))),
}
JUDGED = ("accuracy", "forgetting", "share forgotten")
DRAWN = ("cms-4", "sequential", "ewc", "replay", "lda", "joint")


def _by_method(runs: Iterable[Run]) -> Runs:
    found: Runs = defaultdict(dict)
    for run in runs:
        found[run["facts"]["method"]][run["facts"]["seed"]] = run
    return {name: found[name] for name in METHODS if name in found}


def _values(runs: dict[int, Run], measure: str, seeds: Sequence[int] | None = None) -> list[float]:
    chosen = sorted(runs) if seeds is None else seeds
    return [MEASURES[measure](runs[seed]["matrix"]) for seed in chosen]


def summary(runs: Iterable[Run]) -> str:
    """A table for the terminal: one line per method."""
    lines = [f"{'method':14} {'accuracy %':>14} {'forgetting %':>14} {'seconds':>8} {'stored':>10}"]
    for name, seeds in _by_method(runs).items():
        cost = statistics.fmean(run["seconds"] for run in seeds.values())
        stored = max(run["stored"] for run in seeds.values())
        accuracy = interval(_values(seeds, "accuracy"))
        lost = interval(_values(seeds, "forgetting"))
        lines.append(f"{name:14} {accuracy!s:>14} {lost!s:>14} {cost:8.1f} {stored:10,}")
    return "\n".join(lines)


def compare(ours: dict[int, Run], theirs: dict[int, Run], measure: str) -> Interval:
    """Our measure minus theirs, seed by seed over the seeds both have."""
    seeds = sorted(set(ours) & set(theirs))
    if not seeds:
        raise ValueError("no seed was run by both")
    return difference(_values(ours, measure, seeds), _values(theirs, measure, seeds))


CLAIMS = (
    ("CMS beats sequential fine-tuning", "cms-4", "sequential"),
    ("CMS beats EWC", "cms-4", "ewc"),
    ("CMS beats LoRA", "cms-4", "lora"),
    ("CMS beats dynamic evaluation", "cms-4", "dynamic"),
    ("CMS beats experience replay", "cms-4", "replay"),
    ("CMS beats frozen features + LDA", "cms-4", "lda"),
    ("CMS beats in-context learning", "cms-4", "icl"),
    ("CMS beats InCA", "cms-4", "inca"),
    ("one level with the same rule beats EWC", "cms-1", "ewc"),
    ("4 levels beat none (the readout alone)", "cms-4", "cms-0"),
    ("4 levels beat 1 (same parameters, same rule)", "cms-4", "cms-1"),
    ("4 levels beat 2", "cms-4", "cms-2"),
    ("4 levels beat 3", "cms-4", "cms-3"),
    ("frequencies beat rates", "cms-4", "rates-4"),
    ("plain CMS (Eq. 71) beats sequential", "cms-sgd-4", "sequential"),
    ("plain: frequencies beat rates", "cms-sgd-4", "rates-sgd-4"),
    ("nestling.adapt with 3 levels beats 1", "adapt-3", "adapt-1"),
    ("nestling.adapt beats in-context learning", "adapt-3", "icl"),
    ("joint training beats sequential (sanity)", "joint", "sequential"),
    ("joint training is an upper bound for CMS", "joint", "cms-4"),
)


def _table(runs: Runs) -> list[str]:
    head = "method|average accuracy %|forgetting %|share forgotten %|best minus last %"
    head += "|accuracy when learned %|forward transfer %|intransigence %|processor s|passes"
    rows = []
    for name, seeds in runs.items():
        ahead = [metrics.forward_transfer(r["matrix"], r["untrained"]) for r in seeds.values()]
        first = next(iter(seeds.values()))
        setting = first["facts"]["setting"].items()
        rows.append(
            (
                METHODS[name].title,
                *(interval(_values(seeds, measure)) for measure in MEASURES),
                interval(ahead),
                _stiffness(runs, name),
                f"{statistics.fmean(r['seconds'] for r in seeds.values()):.1f}",
                f"{first['passes']:,}",
                f"{max(r['stored'] for r in seeds.values()):,}",
                ", ".join(
                    f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in setting
                ),
            )
        )
    return table([*head.split("|"), "numbers kept", "setting"], rows)


def _stiffness(runs: Runs, name: str) -> str:
    """Intransigence against joint training with the same seeds; "-" where there is none."""
    joint = runs.get("joint", {})
    seeds = sorted(set(runs[name]) & set(joint))
    if not seeds:
        return "-"
    found = [metrics.intransigence(runs[name][s]["matrix"], joint[s]["matrix"][-1]) for s in seeds]
    return str(interval(found))


def _verdicts(groups: dict[str, Runs]) -> list[str]:
    head = ["claim", "stream"]
    for measure in JUDGED:
        head += [measure, "difference %"]
    lines = table(head, [])
    for claim, ours, theirs in CLAIMS:
        for where, runs in groups.items():
            shared = set(runs.get(ours, {})) & set(runs.get(theirs, {}))
            if not shared:
                continue
            if len(shared) < ENOUGH:
                lines.append(f"| {claim} | {where} | unfinished: {len(shared)} seeds | | | | | |")
                continue
            cells = []
            for measure in JUDGED:
                gap = compare(runs[ours], runs[theirs], measure)
                cells += [f"**{verdict(gap, higher=measure == 'accuracy')}**", gap]
            lines += table([], [(claim, where, *cells)])[2:]
    return lines


def _curves(runs: Runs, path: Path) -> None:
    from nestling.report import Line, lines

    drawn = []
    for name in DRAWN:
        if name not in runs:
            continue
        curves = [metrics.learning_curve(run["matrix"]) for run in runs[name].values()]
        points = [interval(list(values)) for values in zip(*curves, strict=True)]
        x = list(range(1, len(points) + 1))
        bands = len(curves) > 1
        drawn.append(
            Line(
                name,
                x,
                [100 * p.mean for p in points],
                [100 * p.low for p in points] if bands else None,
                [100 * p.high for p in points] if bands else None,
            )
        )
    svg = lines(drawn, x="tasks learned", y="accuracy on tasks so far (%)", zero=True)
    write_atomic(path, svg.encode())


HEAD = """# Continual learning: what was measured

Generated by `python -m studies continual all` from its stored runs. Classes arrive in
tasks; after each task the model is tested on all classes seen so far, without being told
the task. Class orders, weights and the order of examples come from the seed.

**Protocol.** All gradient methods adapt the same weights (the last MLP of the base model and a
readout) on the same features, with the same reads. Every tuned method got 10 trials (six, then two
around each of the best two) on the validation stream at full length, with a class order that no
reported seed uses; the best average accuracy decides (`nestling.adapt`: 8, its last two do not
depend on the first). Each choice was made without the test data and the reported seeds (from 10
on), but how many trials there are was changed after test results had been seen: see the end of the
page. Gradient methods may take up to 3 passes over a
task, the continuum memories take one: the table shows the passes and the processor time of learning
(one thread, busy machine). Joint training is the upper bound: all classes at once, from the
closed-form readout of all the data, then 5 or 15 passes. Other base models use the settings chosen
with the small Transformer, and DBpedia-14 those of DBpedia-70, for every method alike.

"±" is a 95% interval over seeds (Student's t); differences are paired by seed. *shown* / *refuted*
mean that the interval excludes zero; anything else is *inconclusive*; a claim with fewer than 3
seeds is *unfinished*. Forgetting is accuracy when
learned minus accuracy at the end; *share forgotten* divides it by the accuracy when learned, as a
method that learns little has little to forget. Even a classifier that forgets nothing (LDA on
frozen features) loses some accuracy, because classes are added to choose from. Methods that run the
whole language model (ICL, InCA, `nestling.adapt`) answer a sample of 64 test texts.

"""

QUICK = """**Quick runs**: a slice of 12 classes, a base model of 30 steps, no tuning, one or two
seeds. They show that everything runs, not what is better.
"""

Key = tuple[str, str, str, int]  # base, readout, stream, training examples


def write_page(store: Store, folder: Path, *, quick: bool = False) -> Path | None:
    """Write continual.md and its curves from what is stored; None where there is nothing.

    Quick runs are a page of their own.
    """
    groups: dict[Key, list[Run]] = defaultdict(list)
    for run in store.named("seed"):
        facts = run["facts"]
        if facts.get("kind") == "translation" or facts["base"].endswith("-quick") != quick:
            continue
        groups[facts["base"], facts["readout"], facts["stream"], facts["examples"]].append(run)
    if not groups:
        return None
    made = {key: _by_method(groups[key]) for key in sorted(groups, key=_place)}
    text = [HEAD, QUICK] if quick else [HEAD]
    text += ["## Verdicts", "", *_verdicts({_name(k): runs for k, runs in made.items()}), ""]
    for key, runs in made.items():
        picture = f"continual_{'_'.join(map(str, key))}.svg"
        _curves(runs, folder / picture)
        text += [*_section(key, runs), "", f"![learning curves]({picture})", ""]
    text += [] if quick else _limits(folder)
    path = folder / ("continual_quick.md" if quick else "continual.md")
    write_atomic(path, ("\n".join(text).rstrip() + "\n").encode())
    return path


def _section(key: Key, runs: Runs) -> list[str]:
    count = max(len(seeds) for seeds in runs.values())
    first = next(iter(next(iter(runs.values())).values()))
    return [
        f"## {_name(key)}",
        "",
        f"{first['facts']['classes']} classes in {len(first['matrix'])} tasks, {key[3]:,}"
        f" training examples, {count} seeds.",
        "",
        *_table(runs),
    ]


def _place(key: Key) -> tuple[bool, bool, Key]:
    """The head readout of the small Transformer first."""
    return key[1] != "head", key[0] != "transformer", key


def _name(key: Key) -> str:
    return f"{key[2]}, {key[0]}, {key[1]} readout, {key[3]:,} examples"


def _limits(folder: Path) -> list[str]:
    """A closing note written by hand, kept beside the page."""
    note = folder / "continual_note.md"
    return ["", note.read_text(encoding="utf-8")] if note.is_file() else []
