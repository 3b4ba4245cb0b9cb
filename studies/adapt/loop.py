"""(ii) The memory loop: learn A, then B, then a little of A again. Does A come back faster?

A is a book, B another kind of text, A' the book's continuation; after each piece of A' the loss of
a later part of A is measured that is never learned. All arms are tuned alike: six settings each,
judged on books that are not seeds by the mean loss of A, B and A' as they are read (so an arm
cannot keep A by not learning B). *Lesioned*: everything but the fastest level is emptied after B.
k=1 is also run at half its best rate, where it overwrites less and learns less.
"""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

import nestling
from nestling.adaptation import Learner, Limits
from studies.adapt.texts import Base, articles, book
from studies.harness.store import key_of
from studies.harness.tuning import best
from studies.harness.verdict import judged, show

LONG, MEASURED = 4097, 1024
LITTLE = (128, 256, 512, 768, 1024)
TUNING_BOOKS = (7, 6)
BOOKS = (8, 9, 10, 11, 12)


class Setting(NamedTuple):
    """One way to remember: the fastest level's rate, and what else `adapt` is told.

    fresh: the fastest level begins anew with every text.
    """

    chunks: tuple[int, ...]
    rate: float
    retain: float = 1.0  # of the fastest level; the others keep everything
    share: float | None = None  # what moves to the next slower level when that is due
    fresh: bool = False

    def make(self, base: Base) -> Learner:
        slower = len(self.chunks) - 1
        return nestling.adapt(
            base.model,
            self.chunks,
            rate=[self.rate] + [0.0] * slower,
            retain=[self.retain] + [1.0] * slower,
            transfer="move" if slower else None,
            transfer_rate=self.share,
            limits=Limits(drift=1e9, step=1e9),
        )

    def new_text(self, learner: Learner) -> None:
        learner.new_text()
        if self.fresh:
            learner.reset("fast")


TWO, THREE = (64, 256), (64, 256, 1024)
ARMS: dict[str, list[Setting]] = {
    "k=1": [Setting((64,), rate) for rate in (0.01, 0.02, 0.03, 0.04, 0.06, 0.08)],
    "k=1, retention": [
        Setting((64,), rate, retain) for retain in (0.995, 0.98) for rate in (0.03, 0.05, 0.08)
    ],
    "2 levels": [
        Setting(TWO, rate, retain, 0.2) for retain in (0.95, 0.9) for rate in (0.04, 0.06, 0.09)
    ],
    "3 levels": [
        Setting(THREE, rate, retain, 0.25) for retain in (0.95, 0.9) for rate in (0.04, 0.06, 0.09)
    ],
    "2 levels, texts told apart": [
        Setting(TWO, rate, 1.0, share, True)
        for share in (0.2, 0.1)
        for rate in (0.03, 0.045, 0.065)
    ],
}


def run(
    base: Base, data: Any, setting: Setting, which: int, *, full: bool, long: int = LONG
) -> dict[str, Any]:
    """One loop; `full` also lesioned."""
    a = book(base, data, which, long + max(LITTLE) + MEASURED)
    b = articles(base, data, which, long)
    again, measured = a[long : long + max(LITTLE)], a[-MEASURED:]
    learner = setting.make(base)
    result: dict[str, Any] = {"start": learner.score(measured)}
    result["read A"] = learner.learn(a[:long]).loss
    result["after A"] = learner.score(measured)
    setting.new_text(learner)
    result["read B"] = learner.learn(b).loss
    result["learned B"] = learner.score(b[-MEASURED:])
    setting.new_text(learner)
    learner.snapshot("after B")
    result |= _again(learner, again, measured, "")
    if full and len(setting.chunks) > 1:
        learner.rollback("after B")
        for level in learner.levels[1:]:
            learner.reset(level.name)
        result |= _again(learner, again, measured, "lesioned ")
    return result


def _again(learner: Learner, again: Tensor, measured: Tensor, name: str) -> dict[str, float]:
    """The loss of A after 0, 128, ... tokens of A', and of the first 512 as they are read."""
    found, done, read = {f"{name}0": learner.score(measured)}, 0, []
    for many in LITTLE:
        read.append(learner.learn(again[done:many]).loss)
        found[f"{name}{many}"], done = learner.score(measured), many
    shares = (1, 1, 2)  # 128, 128 and 256 tokens
    found[f"{name}read A'"] = sum(n * loss for n, loss in zip(shares, read)) / sum(shares)
    return found


def study(
    base: Base,
    data: Any,
    store: Any,
    books: tuple[int, ...] = BOOKS,
    *,
    arms: dict[str, list[Setting]] = ARMS,
    long: int = LONG,
) -> dict[str, Any]:
    """The best of every arm's settings, then all seeds; k=1 also at a lower rate."""
    results: dict[str, Any] = {}
    for name, settings in arms.items():
        tried: dict[Setting, float] = {}
        for setting in settings if len(settings) > 1 else ():
            tried[setting] = statistics.fmean(
                _read(
                    store.get(
                        key_of(f"loop {name} {_key(setting)} tune {which}"),
                        lambda s=setting, w=which: run(base, data, s, w, full=False, long=long),
                    )
                )
                for which in TUNING_BOOKS
            )
        chosen = best(settings, tried.__getitem__, lower=True)
        found = list(tried.values())
        results[name] = {"setting": chosen._asdict(), "tried": found, "runs": [], "lower": []}
    for which in books:
        for name, entry in results.items():
            mine = Setting(**entry["setting"])
            others = [mine._replace(rate=mine.rate / 2)] if name == "k=1" else []
            for setting in [mine, *others]:
                full = setting == mine
                done = store.get(
                    key_of(f"loop {name} {_key(setting)} book {which}"),
                    lambda s=setting, w=which, f=full: run(base, data, s, w, full=f, long=long),
                )
                entry["runs" if full else "lower"].append(done)
    return results


def _read(result: dict[str, float]) -> float:
    return statistics.fmean(result[key] for key in ("read A", "read B", "read A'"))


def _key(setting: Setting) -> str:
    share = "" if setting.share is None else f" share {setting.share:g}"
    return f"rate {setting.rate:g} retain {setting.retain:g}{share}"


POINTS = ("0", *map(str, LITTLE))
READ = "read A'"
COLOURS = ("#8c8c8c", "#57534e", "#d1495b", "#00798c", "#edae49")


def section(part: dict[str, Any], picture: Path) -> list[str]:
    """The section of the page: method, table, verdicts and picture."""
    plain = part["k=1"]["runs"]
    lines = [
        "## (ii) Memory loop A, B, A'",
        "",
        "stories260K learns a book A, then WikiText-2 as B (4,097 tokens each), then a little of"
        f" the book's continuation A'. {len(plain)} books. Every arm was tuned with six settings"
        " on two other books, by the mean loss of A, B and A' as they are read, so that no arm can"
        " keep A by not learning B. In the arms with levels the slower ones have rate 0 and only"
        " receive a share of the next faster one whenever they are due (`transfer='move'`);"
        " the fastest level lets go of what it holds, by retention, or where texts are told"
        " apart because it begins anew with every text. *Lesioned*: all but the fastest level are"
        " emptied after B.",
        "",
        f"![Return]({picture.name})",
        "",
        "| | settings chosen | A as read | B as read | after A | after B | A' 128 | A' 256 | A' 512"
        " | A' 1,024 | A' as read | lesioned, A' 128 | lesioned, A' 512 |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    keys = ["read A", "read B", "after A", "0", "128", "256", "512", "1024", READ]
    for arm, entry in part.items():
        runs = entry["runs"]
        cells = [show([run[key] for run in runs]) for key in keys]
        lesioned = [
            show([run[key] for run in runs]) if key in runs[0] else ""
            for key in ("lesioned 128", "lesioned 512")
        ]
        lines.append(
            f"| {arm} | {_said(entry['setting'])} | {' | '.join(cells)} | {' | '.join(lesioned)} |"
        )
    lower = part["k=1"]["lower"]
    cells = [show([run[key] for run in lower]) for key in keys]
    lines += [
        f"| k=1, half the rate | not chosen | {' | '.join(cells)} | | |",
        "",
        "The loss is that of a later part of A which is never learned (*as read*: of the text"
        " itself, each token before it is learned; of A' the first 512 tokens). Claim: with levels"
        " A returns faster than without, and the slow levels are why. After 512 tokens k=1 has"
        " relearned A, and nobody is ahead. A lesion takes away whatever the slow levels hold, not"
        " only A. Half the rate keeps A as well for k=1, but then it learns A and B less well.",
        "",
    ]
    for arm, entry in part.items():
        if arm != "k=1":
            lines += _verdicts(arm, entry["runs"], plain, lower)
    _plot(part, picture)
    return [*lines, ""]


def _verdicts(arm: str, runs: Any, plain: Any, lower: Any) -> list[str]:
    def against(other: Any, key: str, name: str = "") -> str:
        return judged([a[name + key] - b[key] for a, b in zip(runs, other)], higher=False)

    lines = [
        f"- {arm}: lower loss on A than k=1 after B {against(plain, '0')}; after 128 tokens of A'"
        f" {against(plain, '128')}; 256 {against(plain, '256')}; 512 {against(plain, '512')}; A'"
        f" as read {against(plain, READ)}.",
        f"- {arm}, against k=1 at half its rate: after 128 {against(lower, '128')}; 512"
        f" {against(lower, '512')}; loss of B as read {against(lower, 'read B')}.",
        f"- {arm}: tokens of A' until A's loss is where k=1 has it after 256:"
        f" {show([_tokens(a, b['256']) for a, b in zip(runs, plain)], 0)}.",
    ]
    if "lesioned 0" in runs[0]:
        worse = [a["lesioned 128"] - a["128"] for a in runs]
        lines.append(
            f"- {arm}: without its slow levels the loss on A after 128 tokens is higher:"
            f" {judged(worse, higher=True)}, and no longer below that of k=1:"
            f" {show([a['lesioned 128'] - b['128'] for a, b in zip(runs, plain)])} above it."
        )
    return lines


def _tokens(run: dict[str, float], loss: float) -> float:
    """Tokens of A' after which the loss on A is at most this, by linear interpolation."""
    for one, two in itertools.pairwise(POINTS):
        if run[one] <= loss:
            return float(one)
        if run[two] <= loss:
            share = (run[one] - loss) / (run[one] - run[two])
            return float(one) + share * (float(two) - float(one))
    return float(POINTS[-1])


def _said(setting: dict[str, Any]) -> str:
    said = f"chunks {'/'.join(map(str, setting['chunks']))}, rate {setting['rate']:g}"
    if setting["retain"] != 1.0:
        said += f", retain {setting['retain']:g}"
    return said + (f", share {setting['share']:g}" if setting["share"] is not None else "")


def _plot(part: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def mean(runs: Any, name: str = "") -> list[float]:
        return [statistics.fmean(run[name + point] for run in runs) for point in POINTS]

    figure, axis = pyplot.subplots(figsize=(8, 4.5))
    xs = [int(point) for point in POINTS]
    for (arm, entry), colour in zip(part.items(), COLOURS, strict=False):
        axis.plot(xs, mean(entry["runs"]), marker="o", color=colour, label=arm)
        if arm == "2 levels":
            dashed = {"linestyle": "--", "marker": "x", "color": colour}
            axis.plot(xs, mean(entry["runs"], "lesioned "), label=f"{arm}, lesioned", **dashed)
    after = statistics.fmean(run["after A"] for run in part["k=1"]["runs"])
    axis.axhline(after, color="#8c8c8c", linewidth=1, linestyle=":")
    axis.text(0, after, "k=1 after A", va="bottom", fontsize=8)
    axis.set_xlabel("tokens of A' learned after B")
    axis.set_ylabel("loss on a later part of A")
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
