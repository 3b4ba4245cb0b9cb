"""The matrix scan against causal attention and against the loop over tokens; correctness first.

Forward + backward with gradients of every input, B=4, H=4, D=64, T=2048, two threads. Arms take
turns; medians; all keep freed memory (`nestling.machine.keep_memory`). Then the two-layer memory
(scan_mlp.py), unless called with --matrix.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import common
import torch
from torch import Tensor
from torch.nn import functional as F

from nestling.machine import keep_memory
from nestling.scan import scan

BATCH, HEADS, WIDTH, TOKENS = 4, 4, 64, 2048


def inputs(tokens: int, dtype: torch.dtype = torch.float32, batch: int = BATCH) -> list[Tensor]:
    """state, x, u, rate, retain, queries as a trained layer has them: unit keys, retain near 1."""
    made = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, HEADS, *shape, generator=made, dtype=torch.float64)

    def gate(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(batch, HEADS, tokens, generator=made)

    x, q = (F.normalize(normal(tokens, WIDTH), dim=-1) for _ in range(2))
    given = [0.1 * normal(WIDTH, WIDTH), x, normal(tokens, WIDTH), gate(0, 1), gate(0.9, 1), q]
    return [tensor.to(dtype).requires_grad_() for tensor in given]


def step(given: list[Tensor], **options: object) -> Callable[[], list[Tensor]]:
    """One forward and backward pass of the scan; returns reads, end state and gradients."""

    def run() -> list[Tensor]:
        reads, end = scan(*given, **options)
        grads = torch.autograd.grad([reads, end], given, [torch.ones_like(reads), end.detach()])
        return [reads.detach(), end.detach(), *grads]

    return run


def attention(tokens: int) -> Callable[[], object]:
    """One forward and backward pass of causal attention of the same shape."""
    given = [inputs(tokens)[i] for i in (1, 2, 5)]

    def run() -> object:
        out = F.scaled_dot_product_attention(given[2], given[0], given[1], is_causal=True)
        return torch.autograd.grad(out, given, torch.ones_like(out))

    return run


def check() -> None:
    """Stop unless the kernel agrees with the loop, gradients included."""
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
        given = inputs(200, dtype, batch=1)
        exact = inputs(200, torch.float64, batch=1) if dtype == torch.float64 else None
        exact = exact or [tensor.detach().double().requires_grad_() for tensor in given]
        for found, expected in zip(step(given)(), step(exact, backend="naive")(), strict=True):
            error = float((found.double() - expected).abs().max() / expected.abs().max())
            if not error < tolerance:
                raise SystemExit(f"the chunked scan is wrong: relative error {error:.1e} ({dtype})")
    print("chunked scan = loop over tokens (outputs, end state, gradients)")


def main() -> None:
    """Print every ratio beside its target; the process fails when one is missed."""
    torch.set_num_threads(2)
    keep_memory()  # for every arm: fresh pages would drown the arithmetic
    torch.set_flush_denormal(True)
    check()
    given = inputs(TOKENS)
    arms: dict[str, Callable[[], object]] = {
        "causal attention (SDPA)": attention(TOKENS),
        "scan": step(given),
        "scan, chunk 16": step(given, chunk=16),
        "scan, recompute": step(given, recompute=True),
        "scan without erasing": step(given, erase=False),
        "scan, chunk_autograd": step(given, backend="chunk_autograd"),
    }
    products = common.delta_rule(BATCH * HEADS, TOKENS, WIDTH, WIDTH, 32)
    arms["matrix products alone"] = common.matmuls(products)
    seconds = common.interleaved(arms, repeats=5, warmup=1)
    naive = step(given, backend="naive")
    start = time.perf_counter()
    naive()
    seconds["loop over tokens (scan_naive)"] = time.perf_counter() - start
    for name, value in seconds.items():
        rate = BATCH * TOKENS / value / 1e3
        print(f"  {name:<32} {value * 1e3:8.1f} ms {rate:8.1f}k tokens/s")
    ours = seconds["scan"]
    common.over_floor("scan", ours, seconds["matrix products alone"])
    met = [
        common.verdict(
            "time against causal attention", ours / seconds["causal attention (SDPA)"], 0.3,
            at_most=True,
        ),
        common.verdict(
            "speed against the loop", seconds["loop over tokens (scan_naive)"] / ours, 12,
            at_most=False,
        ),
    ]  # fmt: skip
    long = {tokens: step(inputs(tokens)) for tokens in (2048, 8192, 32768)}
    times: dict[int, list[float]] = {tokens: [] for tokens in long}
    for repeat in range(3):
        for tokens, run in long.items():
            start = time.perf_counter()
            run()
            if repeat:
                times[tokens].append((time.perf_counter() - start) / tokens)
    flat = {tokens: statistics.median(values) for tokens, values in times.items()}
    for tokens, value in flat.items():
        print(f"  T={tokens:<6} {value * 1e6 / BATCH:6.2f} us per token")
    worst = max(flat[tokens] for tokens in (8192, 32768)) / flat[2048]
    met.append(common.verdict("time per token, T = 32K against 2K", worst, 1.15, at_most=True))
    if "--matrix" not in sys.argv:
        import scan_mlp

        met.append(scan_mlp.main())
    sys.exit(0 if all(met) else 1)


if __name__ == "__main__":
    main()
