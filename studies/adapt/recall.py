"""(iii) Number of levels x slowest chunk, on a stream of many keys (the direction of Fig. 7).

The stream is `key value key value ...` over tokens of stories260K. Three kinds of keys, a third of
the stream each: *lasting* keys always have the same value; *early* keys too, but they come only in
the first half; *passing* keys get new values every eighth of the stream. At the end each key is
asked alone, so only the fast weights can answer: accuracy and loss. The model's own context is 64
tokens. Besides 1 to 4 levels up to each slowest chunk, the fastest level alone is a control.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor

from studies.adapt.arms import make_memory
from studies.adapt.texts import Base
from studies.harness.store import key_of
from studies.harness.verdict import judged, show

KEYS, LENGTH, PHASES = 16, 3072, 8
KINDS = ("lasting", "early", "passing")
SLOWEST = (128, 512, 1536)
RATES = (0.05, 0.1, 0.2, 0.4, 0.8)
TUNING_SEED = 100


def make_stream(seed: int, length: int = LENGTH) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
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
        count = length // PHASES // 2
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


def run(
    base: Base, levels: int, slowest: int, rate: float, seed: int, length: int = LENGTH
) -> dict[str, Any]:
    """Learn the stream, then ask every key."""
    stream, asked = make_stream(seed, length)
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


def study(
    base: Base,
    store: Any,
    seeds: tuple[int, ...],
    *,
    tried: tuple[float, ...] = RATES,
    most: tuple[int, ...] = SLOWEST,
    length: int = LENGTH,
) -> dict[str, Any]:
    """Every number of levels and slowest chunk: its best rate on another seed, then the seeds."""
    grid = [(levels, slowest) for slowest in most for levels in (1, 2, 3, 4)]
    grid.append((1, 32))  # the fastest level alone
    rates: dict[tuple[int, int], float] = {}
    for levels, slowest in grid:
        found = {
            rate: store.get(
                key_of(f"recall {levels}x{slowest} tune {rate:g}"),
                lambda a=levels, b=slowest, c=rate: run(base, a, b, c, TUNING_SEED, length),
            )["recall"]
            for rate in tried
        }
        rates[levels, slowest] = max(found, key=found.__getitem__)
    results: dict[str, Any] = {}
    for seed in seeds:
        for levels, slowest in grid:
            rate = rates[levels, slowest]
            done = store.get(
                key_of(f"recall {levels}x{slowest} rate {rate:g} seed {seed}"),
                lambda a=levels, b=slowest, c=rate, d=seed: run(base, a, b, c, d, length),
            )
            entry = results.setdefault(f"{levels}x{slowest}", {"rate": rate, "runs": []})
            entry["runs"].append(done)
    return results


def section(part: dict[str, Any]) -> list[str]:
    """Table, kinds of keys, and verdicts."""
    control = part.pop("1x32")
    slowest = sorted({int(name.split("x")[1]) for name in part})
    levels = sorted({int(name.split("x")[0]) for name in part})
    seeds = len(next(iter(part.values()))["runs"])
    lines = [
        "## (iii) More levels, on a stream of many keys",
        "",
        "Recall (accuracy, mean over lasting, early and passing keys) of 48 keys from the fast"
        f" weights alone, after 3,072 tokens; {seeds} seeds, every cell at the best of the same"
        f" {len(RATES)} rates on another seed. One level has the slowest chunk; more levels start"
        " at 32.",
        "",
        "| levels | " + " | ".join(f"slowest {chunk}" for chunk in slowest) + " |",
        "|---|" + "---|" * len(slowest),
    ]
    for count in levels:
        cells = [
            show([run["recall"] for run in part[f"{count}x{chunk}"]["runs"]]) for chunk in slowest
        ]
        lines.append(f"| {count} | {' | '.join(cells)} |")
    alone = show([run["recall"] for run in control["runs"]])
    lines += ["", f"Control, the fastest level alone (one level, chunk 32): {alone}.", ""]
    for kind in ("lasting", "early", "passing"):
        cells = []
        for count in levels:
            runs = [run for chunk in slowest for run in part[f"{count}x{chunk}"]["runs"]]
            cells.append(f"{count} levels {show([run[kind] for run in runs])}")
        lines.append(f"- {kind} keys, over all slowest chunks: {', '.join(cells)}.")
    lines += [
        "",
        "Claim (Fig. 7): more levels are better, at every slowest chunk. One level with a slow"
        " chunk takes few steps (2 of chunk 1,536), so only a gain over the control, the fastest"
        " level alone, speaks for levels. Seeds were extended from three to six, for all cells,"
        " after three had left most comparisons open.",
        "",
        f"Best rates of {', '.join(f'{rate:g}' for rate in RATES)}:"
        f" {', '.join(_best(name, entry) for name, entry in part.items())}.",
        "",
    ]
    for count in levels[1:]:
        gaps = [
            statistics.fmean(
                part[f"{count}x{chunk}"]["runs"][seed]["recall"]
                - part[f"{count - 1}x{chunk}"]["runs"][seed]["recall"]
                for chunk in slowest
            )
            for seed in range(seeds)
        ]
        said = judged(gaps, higher=True)
        lines.append(f"- all slowest chunks together, {count} levels over {count - 1}: {said}.")
    for count in levels[1:]:
        gaps = [
            statistics.fmean(part[f"{count}x{chunk}"]["runs"][s]["recall"] for chunk in slowest)
            - control["runs"][s]["recall"]
            for s in range(seeds)
        ]
        said = judged(gaps, higher=True)
        lines.append(f"- all together, {count} levels over the fastest level alone: {said}.")
    for chunk in slowest:
        for count in levels[1:]:
            less, more = part[f"{count - 1}x{chunk}"], part[f"{count}x{chunk}"]
            gaps = [b["recall"] - a["recall"] for a, b in zip(less["runs"], more["runs"])]
            said = judged(gaps, higher=True)
            lines.append(f"- slowest {chunk}, {count} levels over {count - 1}: {said}.")
        most = part[f"{levels[-1]}x{chunk}"]["runs"]
        gaps = [b["recall"] - a["recall"] for a, b in zip(control["runs"], most)]
        said = judged(gaps, higher=True)
        lines.append(f"- slowest {chunk}, {levels[-1]} levels over the fastest alone: {said}.")
    return [*lines, ""]


def _best(name: str, entry: dict[str, Any]) -> str:
    levels, slowest = name.split("x")
    return f"{levels} up to {slowest} {entry['rate']:g}"
