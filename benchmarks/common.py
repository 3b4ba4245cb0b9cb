"""Shared by the benchmarks: interleaved timing, peak memory of a process, and the verdict table.

Absolute times vary by 10% and more on a shared machine; ratios measured in one run, with the arms
interleaved, are what count.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch


def interleaved(
    arms: Mapping[str, Callable[[], object]],
    repeats: int = 7,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
):
    """Median seconds per call of each arm; the arms take turns, so drift hits all alike.

    On a machine with other work, one thread and `time.process_time` as the clock disturb least.
    """
    for _ in range(warmup):
        for run in arms.values():
            run()
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name, run in arms.items():
            start = clock()
            run()
            seconds[name].append(clock() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


class Product(NamedTuple):
    """`times` products [batch, m, k] @ [batch, k, n]."""

    batch: int
    m: int
    k: int
    n: int
    times: int = 1


def matmuls(products: Sequence[Product]) -> Callable[[], None]:
    """The floor of whatever needs these products: they alone, into memory that is there."""
    made = []
    for batch, m, k, n, times in products:
        left, right = torch.randn(batch, m, k), torch.randn(batch, k, n)
        made.append((left, right, torch.empty(batch, m, n), times))

    def run() -> None:
        for left, right, out, times in made:
            for _ in range(times):
                torch.bmm(left, right, out=out)

    return run


def linear_layers(model: torch.nn.Module, tokens: int, *, times: int = 3) -> list[Product]:
    """The products of all linear layers with so many tokens; 3 times for forward and backward."""
    weights = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    return [Product(1, tokens, w.shape[1], w.shape[0], times) for w in weights]


def delta_rule(sequences: int, tokens: int, inner: int, outer: int, chunk: int) -> list[Product]:
    """The products that a chunked delta rule cannot do without: both Gram matrices, the memory
    asked by keys and queries, errors, reads and writes; 3 times for forward and backward."""
    count = sequences * -(-tokens // chunk)
    return [
        Product(count, chunk, inner, chunk, 6),
        Product(count, chunk, inner, outer, 6),
        Product(count, chunk, chunk, outer, 6),
        Product(count, outer, chunk, inner, 3),
    ]


def verdict(what: str, value: float, target: float, *, at_most: bool) -> bool:
    """Print one measured ratio beside its target; returns whether it is met."""
    met = value <= target if at_most else value >= target
    sign = "<=" if at_most else ">="
    print(f"{'ok  ' if met else 'MISS'}  {what:<58} {value:7.2f}x   (target {sign} {target:g}x)")
    return met


def over_floor(what: str, seconds: float, floor: float) -> None:
    """Print how many times the time of its matrix products alone something takes."""
    print(f"      {what:<58} {seconds / floor:7.2f}x   its matrix products alone")


def peak_mb() -> float:
    """Peak resident memory of this program so far, in MB (`ru_maxrss` starts at its parent's)."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return int(status.read_text().split("VmHWM:")[1].split()[0]) / 1024


def in_fresh_process(script: str, *arguments: str, **environment: str) -> dict[str, float]:
    """Run `script` with arguments in a new process; its last line must be a JSON object."""
    done = subprocess.run(
        [sys.executable, script, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    if done.returncode:
        raise RuntimeError(f"{script} {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])
