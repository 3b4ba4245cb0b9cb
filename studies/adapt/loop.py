"""(ii) The memory loop: learn A, then B, then a little of A again. Does A come back faster?

A is a book, B another kind of text, A' the book's continuation; after each piece of A' the loss of
a later part of A is measured that is never learned. All arms are tuned alike: six settings each,
judged on books that are not seeds by the mean loss of A, B and A' as they are read (so an arm
cannot keep A by not learning B). *Lesioned*: everything but the fastest level is emptied after B.
k=1 is also run at half its best rate, where it overwrites less and learns less.
"""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

from torch import Tensor

import nestling
from nestling.adaptation import Learner, Limits
from studies.adapt.texts import Base, articles, book

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


def run(base: Base, data: Any, setting: Setting, which: int, *, full: bool) -> dict[str, Any]:
    """One loop; `full` also lesioned."""
    a = book(base, data, which, LONG + max(LITTLE) + MEASURED)
    b = articles(base, data, which, LONG)
    again, measured = a[LONG : LONG + max(LITTLE)], a[-MEASURED:]
    learner = setting.make(base)
    result: dict[str, Any] = {"start": learner.score(measured)}
    result["read A"] = learner.learn(a[:LONG]).loss
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


def study(base: Base, data: Any, store: Any, books: tuple[int, ...] = BOOKS) -> dict[str, Any]:
    """The best of every arm's settings, then all seeds; k=1 also at a lower rate."""
    results: dict[str, Any] = {}
    for name, settings in ARMS.items():
        found = [
            statistics.fmean(
                _read(
                    store.get(
                        f"loop {name} {_key(setting)} tune {which}",
                        lambda s=setting, w=which: run(base, data, s, w, full=False),
                    )
                )
                for which in TUNING_BOOKS
            )
            for setting in settings
        ]
        best = settings[found.index(min(found))]
        results[name] = {"setting": best._asdict(), "tried": found, "runs": [], "lower": []}
    for which in books:
        for name, entry in results.items():
            best = Setting(**entry["setting"])
            others = [best._replace(rate=best.rate / 2)] if name == "k=1" else []
            for setting in [best, *others]:
                full = setting == best
                done = store.get(
                    f"loop {name} {_key(setting)} book {which}",
                    lambda s=setting, w=which, f=full: run(base, data, s, w, full=f),
                )
                entry["runs" if full else "lower"].append(done)
    return results


def _read(result: dict[str, float]) -> float:
    return statistics.fmean(result[key] for key in ("read A", "read B", "read A'"))


def _key(setting: Setting) -> str:
    share = "" if setting.share is None else f" share {setting.share:g}"
    return f"rate {setting.rate:g} retain {setting.retain:g}{share}"
