"""(ii) The memory loop: learn A, then B, then a little of A again. Does A come back faster?

After each step the loss of a part of A is measured that is never learned. *Forgetting* is its rise
from the end of A to the end of B. *Returned* is the share of that rise which a little of A' undoes;
*savings* is the loss after A and B and A' against a memory that never saw A but the same B and A'.
"""

from __future__ import annotations

from typing import Any

from arms import make_memory
from texts import Base, articles, book
from torch import Tensor

LONG, LITTLE, MEASURED = 4096, (128, 256, 512), 1024


def run(
    base: Base, data: Any, chunks: list[int], rate: float, seed: int, options: dict[str, Any]
) -> dict[str, Any]:
    """One loop, with and without A, and with the slow levels removed after B."""
    a = book(base, data, seed, LONG + max(LITTLE) + MEASURED)
    b = articles(base, data, seed, LONG)
    again, measured = a[LONG : LONG + max(LITTLE)], a[-MEASURED:]
    learner = make_memory(base, chunks, rate, **options)
    result: dict[str, Any] = {"start": learner.score(measured)}
    learner.learn(a[:LONG])
    result["after A"] = learner.score(measured)
    learner.new_text()
    learner.learn(b)
    result["after B"] = learner.score(measured)
    learner.new_text()
    learner.snapshot("after B")
    result |= {f"A'{n}": loss for n, loss in _again(learner, again, measured).items()}
    if len(chunks) > 1:
        learner.rollback("after B")
        for level in learner.levels[1:]:
            learner.reset(level.name)
        result["lesioned"] = learner.score(measured)
        curve = _again(learner, again, measured)
        result |= {f"lesioned A'{n}": loss for n, loss in curve.items()}
    naive = make_memory(base, chunks, rate, **options)
    naive.learn(b)
    naive.new_text()
    result["naive"] = naive.score(measured)
    result |= {f"naive A'{n}": loss for n, loss in _again(naive, again, measured).items()}
    return result


def _again(learner: Any, again: Tensor, measured: Tensor) -> dict[int, float]:
    losses, done = {}, 0
    for many in LITTLE:
        learner.learn(again[done:many])
        losses[many], done = learner.score(measured), many
    return losses


def study(
    base: Base, data: Any, store: Any, seeds: tuple[int, ...], arms: dict[str, Any]
) -> dict[str, Any]:
    """All seeds of every arm: name -> (chunks, rate, options)."""
    results: dict[str, Any] = {}
    for seed in seeds:
        for name, (chunks, rate, options) in arms.items():
            done = store.get(
                f"loop {name} {rate:g} seed {seed}",
                lambda c=chunks, r=rate, s=seed, o=options: run(base, data, c, r, s, o),
            )
            results.setdefault(name, {"rate": rate, "chunks": chunks, "runs": []})
            results[name]["runs"].append(done)
    return results
