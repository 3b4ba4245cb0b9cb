"""(iii) Number of levels x slowest chunk, on a stream of many keys (the direction of Fig. 7).

The stream is `key value key value ...` over tokens of stories260K. Three kinds of keys, a third of
the stream each: *lasting* keys always have the same value; *early* keys too, but they come only in
the first half; *passing* keys get new values every eighth of the stream. At the end each key is
asked alone, so only the fast weights can answer: accuracy and loss. The model's own context is 64
tokens. Besides 1 to 4 levels up to each slowest chunk, the fastest level alone is a control.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from studies.adapt.arms import make_memory
from studies.adapt.texts import Base

KEYS, LENGTH, PHASES = 16, 3072, 8
KINDS = ("lasting", "early", "passing")
SLOWEST = (128, 512, 1536)
RATES = (0.05, 0.1, 0.2, 0.4, 0.8)
TUNING_SEED = 100


def make_stream(seed: int) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """The stream, and for each kind its keys and the values that hold at the end."""
    random = torch.Generator().manual_seed(seed)
    order = torch.randperm(250, generator=random) + 260  # past the raw bytes
    keys = {kind: order[i * KEYS : (i + 1) * KEYS] for i, kind in enumerate(KINDS)}
    values = order[3 * KEYS : 3 * KEYS + 64]
    held = {kind: values[torch.randint(64, (KEYS,), generator=random)] for kind in KINDS}
    pieces = []
    for phase in range(PHASES):
        held["passing"] = values[torch.randint(64, (KEYS,), generator=random)]
        kinds = KINDS if phase < PHASES // 2 else ("lasting", "passing")
        count = LENGTH // PHASES // 2
        which = torch.randint(len(kinds), (count,), generator=random)
        place = torch.randint(KEYS, (count,), generator=random)
        for kind, at in zip(which.tolist(), place.tolist(), strict=True):
            name = kinds[kind]
            pieces += [int(keys[name][at]), int(held[name][at])]
    return torch.tensor(pieces), {kind: (keys[kind], held[kind]) for kind in KINDS}


def chunks_of(levels: int, slowest: int) -> list[int]:
    """`levels` chunks from 32 up to the slowest, evenly in the logarithm; one level is slowest."""
    if levels == 1:
        return [slowest]
    ratio = (slowest / 32) ** (1 / (levels - 1))
    return [max(32 * round(ratio**i), 32 * (i + 1)) for i in range(levels - 1)] + [slowest]


def run(base: Base, levels: int, slowest: int, rate: float, seed: int) -> dict[str, Any]:
    """Learn the stream, then ask every key."""
    stream, asked = make_stream(seed)
    learner = make_memory(base, chunks_of(levels, slowest), rate, scale=0.5, context=64)
    report = learner.learn(stream)
    result: dict[str, Any] = {"read": report.loss}
    total = 0.0
    for kind, (keys, values) in asked.items():
        bos = torch.full_like(keys, base.tokenizer.bos_token_id)
        logits = learner(torch.stack([bos, keys], 1)).logits[:, -1].float()
        result[kind] = float((logits.argmax(-1) == values).double().mean())
        result[f"{kind} loss"] = float(torch.nn.functional.cross_entropy(logits, values))
        total += result[kind] / len(KINDS)
    return {"recall": total, **result}


def study(base: Base, store: Any, seeds: tuple[int, ...]) -> dict[str, Any]:
    """Every number of levels and slowest chunk: its best rate on another seed, then the seeds."""
    grid = [(levels, slowest) for slowest in SLOWEST for levels in (1, 2, 3, 4)]
    grid.append((1, 32))  # the fastest level alone
    rates: dict[tuple[int, int], float] = {}
    for levels, slowest in grid:
        found = {
            rate: store.get(
                f"recall {levels}x{slowest} tune {rate:g}",
                lambda a=levels, b=slowest, c=rate: run(base, a, b, c, TUNING_SEED),
            )["recall"]
            for rate in RATES
        }
        rates[levels, slowest] = max(found, key=found.__getitem__)
    results: dict[str, Any] = {}
    for seed in seeds:
        for levels, slowest in grid:
            rate = rates[levels, slowest]
            done = store.get(
                f"recall {levels}x{slowest} rate {rate:g} seed {seed}",
                lambda a=levels, b=slowest, c=rate, d=seed: run(base, a, b, c, d),
            )
            entry = results.setdefault(f"{levels}x{slowest}", {"rate": rate, "runs": []})
            entry["runs"].append(done)
    return results
