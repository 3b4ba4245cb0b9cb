"""The common parts of all tables' pages: a cell's number, who is first, and one picture."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from studies.harness.page import Page, Section, table
from studies.harness.store import Run
from studies.harness.study import Cell, Study, cells
from studies.harness.tuning import best
from studies.harness.verdict import (
    ENOUGH,
    PLACE,
    Interval,
    interval,
    paired,
    percent,
    show,
    verdict,
)

__all__ = ["Measure", "dots", "table_page", "unfinished"]

Cells = Mapping[tuple[str, str], Cell]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A number of a run: its name there, what a page calls it, and which way is better."""

    name: str
    title: str
    higher: bool
    share: bool = False  # shown in percent

    def shown(self, values: Sequence[float]) -> str:
        """Mean and interval."""
        return percent(values) if self.share else show(values)


def table_page(
    study: Study,
    runs: Mapping[str, Run],
    *,
    title: str,
    measures: Sequence[Measure],
    limits: Sequence[str],
    hero: str = "hope",
    more: Sequence[Section] = (),
    picture: str = "",
    caption: str = "",
) -> Page:
    """The page of a table: arms by tasks for each measure; the first measure decides."""
    found = cells(runs)
    first = measures[0]
    parts = [
        Section(title=f"{m.title}, mean and 95% interval", body=_grid(study, found, m))
        for m in measures
    ]
    parts += [
        *more,
        Section(title="Every seed", body=_every(study, found, first), appendix=True),
        Section(title="Trials", body=_trials(study, runs), appendix=True),
    ]
    return Page(
        title=title,
        command=f"python -m studies {study.name}",
        findings=_findings(study, found, first, hero),
        limits=[*unfinished(study, found), *_edges(study, runs), *limits],
        protocol=study.protocol,
        picture=picture or dots(_means(study, found, first), first.title),
        caption=caption or f"{first.title} of every arm, mean over tasks",
        sections=parts,
    )


def _grid(study: Study, found: Cells, measure: Measure) -> list[str]:
    rows = []
    for arm, title in study.arms.items():
        mine = {task: found.get((task, arm), Cell({})) for task in study.tasks}
        values = [list(cell.values(measure.name).values()) for cell in mine.values()]
        if any(values):
            sizes = {run["parameters"] for c in mine.values() for run in c.runs.values()}
            rows.append((title, *map(measure.shown, values), f"{min(sizes):,}"))
    return table(["", *study.tasks, "parameters"], rows)


def _gap(found: Cells, task: str, ours: str, theirs: str, measure: Measure) -> Interval | None:
    """Ours minus theirs over the seeds both have; None under three of them."""
    both = [found.get((task, arm), Cell({})).values(measure.name) for arm in (ours, theirs)]
    gaps = paired(*both)
    return interval(gaps) if len(gaps) >= ENOUGH else None


def _findings(study: Study, found: Cells, measure: Measure, hero: str) -> list[str]:
    """Where the hero stands, in at most five sentences made from the numbers."""
    name = study.arms[hero]
    counts: dict[str, dict[str, list[str]]] = {}
    gaps: dict[str, Interval] = {}
    for arm in study.arms:
        for task in study.tasks:
            gap = None if arm == hero else _gap(found, task, hero, arm, measure)
            if gap is not None:
                word = verdict(gap, higher=measure.higher, words=PLACE)
                counts.setdefault(arm, {}).setdefault(word, []).append(task)
                gaps[arm] = gap
    if not counts:
        return [f"Nothing is claimed: no task has {ENOUGH} seeds of {name} and another arm."]
    behind = {task for said in counts.values() for task in said.get("behind", [])}
    judged = {task for said in counts.values() for tasks in said.values() for task in tasks}
    level = [task for task in study.tasks if task in judged - behind]
    lines = [
        f"{name} is first, or not separable from the first, in {len(level)} of {len(judged)}"
        f" tasks ({measure.title}, 95%, paired seeds)"
        + (f"; behind in {', '.join(sorted(behind))}." if behind else ".")
    ]
    order = sorted(counts, key=lambda arm: -len(counts[arm].get("behind", [])))
    if len(study.tasks) == 1:
        scale = 100 if measure.share else 1
        listed = [
            f"{study.arms[arm]}: {next(iter(counts[arm]))}"
            f" ({scale * gaps[arm].mean:+.3g} ± {scale * gaps[arm].half:.2g})"
            for arm in order
        ]
    else:
        listed = [
            f"{study.arms[arm]}: " + ", ".join(f"{w} {len(t)}" for w, t in counts[arm].items())
            for arm in order
        ]
    step, what = max(1, math.ceil(len(listed) / 4)), "" if len(study.tasks) == 1 else " (tasks)"
    for i in range(0, len(listed), step):
        lines.append(f"{name} against {'; '.join(listed[i : i + step])}{what}.")
    return lines


def unfinished(study: Study, found: Cells) -> list[str]:
    """The limit that every page of a study with missing runs begins with."""
    wanted = len(study.tasks) * len(study.arms) * len(study.seeds)
    done = sum(len(cell.runs) for cell in found.values())
    return [f"**Unfinished**: {done} of {wanted} runs."] if done < wanted else []


def _edges(study: Study, runs: Mapping[str, Run]) -> list[str]:
    """Arms whose best rate is the least or the largest of three or more: another may be better."""
    said = []
    for task in study.tasks:
        for arm, title in study.arms.items():
            jobs = study.trials(task, arm)
            rates = sorted(job.setting["rate"] for job in jobs if "rate" in job.setting)
            if arm in study.borrowed or len(rates) < 3 or any(j.key not in runs for j in jobs):
                continue
            scores = {job.setting["rate"]: runs[job.key][study.judged] for job in jobs}
            chosen = best(rates, scores.__getitem__, lower=study.lower)
            if chosen in (rates[0], rates[-1]):
                said.append(f"{title} ({task}, {chosen:g})")
    return [f"The best rate is at the edge of the grid for {'; '.join(said)}."] if said else []


def _every(study: Study, found: Cells, measure: Measure) -> list[str]:
    rows = []
    for (task, arm), cell in found.items():
        each = ", ".join(f"{seed}: {v:.4g}" for seed, v in cell.values(measure.name).items())
        if arm in study.arms:
            seconds = [run["seconds"] for run in cell.runs.values()]
            rows.append((task, study.arms[arm], each, f"{sum(seconds) / len(seconds):.0f}"))
    return table(["task", "arm", f"seed: {measure.title}", "processor s"], rows)


def _trials(study: Study, runs: Mapping[str, Run]) -> list[str]:
    rows = []
    for task in study.tasks:
        for arm, title in study.arms.items():
            tried = [(j.setting, runs[j.key]) for j in study.trials(task, arm) if j.key in runs]
            if tried and arm not in study.borrowed:
                said = ", ".join(f"{_brief(s)}: {run[study.judged]:.4g}" for s, run in tried)
                rows.append((task, title, said))
    return table(["task", "arm", f"setting: {study.judged}"], rows)


def _brief(setting: Mapping[str, object]) -> str:
    return " ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in setting.values())


def _means(study: Study, found: Cells, measure: Measure) -> dict[str, Interval]:
    """For each arm the mean over tasks of a seed's number, with its interval over seeds."""
    made = {}
    for arm, title in study.arms.items():
        each = [found.get((task, arm), Cell({})).values(measure.name) for task in study.tasks]
        shared = set.intersection(*(set(values) for values in each)) if each else set()
        if shared:
            per_seed = [sum(v[seed] for v in each) / len(each) for seed in sorted(shared)]
            made[title] = interval(per_seed)
    return made


def dots(rows: Mapping[str, Interval], title: str) -> str:
    """A dot and its interval for every row, as SVG; the same rows give the same text."""
    shown = {name: each for name, each in rows.items() if math.isfinite(each.mean)}
    half = {name: each.half if math.isfinite(each.half) else 0.0 for name, each in shown.items()}
    low = min((e.mean - half[n] for n, e in shown.items()), default=0.0)
    high = max((e.mean + half[n] for n, e in shown.items()), default=1.0)
    span = (high - low) or 1.0

    def x(value: float) -> float:
        return 260 + 400 * (value - low) / span

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {40 + 24 * len(shown)}"'
        ' font-family="sans-serif" font-size="13">',
        f'<text x="260" y="16" fill="#5c667a">{html.escape(title)}</text>',
    ]
    for i, (name, each) in enumerate(shown.items()):
        y, colour = 40 + 24 * i, "#0b6e6e" if i == 0 else "#5c667a"
        a, b = x(each.mean - half[name]), x(each.mean + half[name])
        lines += [
            f'<text x="250" y="{y + 4}" text-anchor="end" fill="{colour}">'
            f"{html.escape(name)}</text>",
            f'<line x1="{a:.1f}" x2="{b:.1f}" y1="{y}" y2="{y}" stroke="{colour}"/>',
            f'<circle cx="{x(each.mean):.1f}" cy="{y}" r="4" fill="{colour}"/>',
            f'<text x="{b + 8:.1f}" y="{y + 4}" fill="{colour}">{each.mean:.3g}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"
