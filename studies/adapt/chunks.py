"""(iv) The size of chunks, at the same rate per token, by plain gradient descent.

Three levels, each chunk four times the next faster one's, at a rate that grows with the fastest
chunk. What the first pass over a long text costs in loss (stream), what it leaves on the
text's continuation (new), and what it does to text of the base model's own kind (old).
"""

from __future__ import annotations

from typing import Any

import nestling
from studies.adapt.frontier import frozen
from studies.adapt.texts import Base

CHUNKS = (32, 64, 128, 256, 512)
SIZE = (16385, 4096)


def run(base: Base, data: Any, chunk: int, which: int) -> dict[str, float]:
    """One book in chunks of one size."""
    length, continued = SIZE
    ids = base.text(base, data, which, length + continued)
    learner = nestling.adapt(base.model, [chunk, 4 * chunk, 16 * chunk], rate=chunk / 3200)
    stream = learner.learn(ids[:length]).loss
    return {"stream": stream, "new": learner.score(ids[length:]), "old": learner.score(base.old)}


def study(base: Base, data: Any, store: Any, seeds: tuple[int, ...]) -> dict[str, Any]:
    """Every size on every book, and the base model as it is."""
    found: dict[str, Any] = {
        "frozen": [
            store.get(f"chunks frozen book {seed}", lambda s=seed: frozen(base, data, s, SIZE))
            for seed in seeds
        ]
    }
    for chunk in CHUNKS:
        found[str(chunk)] = [
            store.get(f"chunks {chunk} book {s}", lambda c=chunk, s=s: run(base, data, c, s))
            for s in seeds
        ]
    return found
