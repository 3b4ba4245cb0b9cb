"""The scans on a GPU: right first, then how fast.  python benchmarks/gpu.py > page.txt

For whoever has a GPU: please paste the page into an issue, whatever it says. Nobody has timed these
kernels yet. First every back end is compared with the token-by-token form in float64, outputs and
gradients; a back end that is wrong is not timed. Then one layer's work is timed against
flash-linear-attention (if installed), SDPA and torch's Muon: the median of 20 runs, CUDA events.
Smaller: --tokens 2048 --batch 2.

`--rehearse` needs no GPU: every line of this file runs at small sizes on the CPU, Triton's kernels
in its interpreter. Its times mean nothing.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

if "--rehearse" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton looks when it is first loaded

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nestling.memories import (
    Memory,
    SelfModifying,
    SelfModifyingConfig,
    Steered,
    SteeredConfig,
    Titans,
    TitansConfig,
)
from nestling.norm import unit
from nestling.optim import M3
from nestling.scan import scan
from nestling.scan.backends import INSTALLED
from nestling.tree import tree_leaves

REHEARSAL = "--rehearse" in sys.argv
DEVICE = "cpu" if REHEARSAL else "cuda"
RAGGED = 19 if REHEARSAL else 203
"""Tokens of the comparisons: no multiple of a chunk."""

BACKENDS = ["chunk", "triton", *(["fla"] if "fla" in INSTALLED and not REHEARSAL else [])]


def inputs(batch: int, tokens: int, d: int, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """A gated delta rule's inputs [B, T, d], with rates up to 1 and long retention."""
    made = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, generator=made)

    given = {"state": 0.1 * draw(d, d), "x": unit(draw(tokens, d)), "u": draw(tokens, d)}
    given |= {"rate": torch.sigmoid(draw(tokens)), "retain": torch.sigmoid(draw(tokens) + 5)}
    given["queries"] = unit(draw(tokens, d))
    wide = ("state", "rate", "retain")
    return {
        name: value.to(DEVICE, torch.float32 if name in wide else dtype).requires_grad_()
        for name, value in given.items()
    }


def gradients(given: dict[str, Tensor], **options: Any) -> list[Tensor]:
    """Outputs and gradients of a fixed function of them."""
    reads, end = scan(**given, **options)
    made = torch.Generator().manual_seed(1)
    weights = [torch.randn(o.shape, generator=made).to(o) for o in (reads, end)]
    loss = (reads * weights[0]).sum() + (end * weights[1]).sum()
    return [reads, end, *torch.autograd.grad(loss, list(given.values()))]


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference, relative to the largest value of each tensor."""
    pairs = zip(found, expected, strict=True)
    pairs = ((a.detach().double(), b.detach()) for a, b in pairs)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def check_delta(d: int) -> dict[str, float]:
    """Each back end's error against the naive form, float32 inputs, ragged length."""
    given = inputs(2, RAGGED, d, torch.float32)
    double = {name: value.detach().double().requires_grad_() for name, value in given.items()}
    expected = gradients(double, backend="naive")
    return {name: error(gradients(given, backend=name), expected) for name in BACKENDS}


MEMORIES = {
    "Hope's": lambda **given: Steered(SteeredConfig(**given)),
    "printed Hope's": lambda **given: SelfModifying(SelfModifyingConfig(**given)),
    "Titans' features": lambda **given: Titans(
        TitansConfig(features=True, momentum=False, **given)
    ),
}


def memory_of(name: str, width: int, heads: int, backend: str, dtype: torch.dtype) -> Memory:
    torch.manual_seed(0)
    memory: Memory = MEMORIES[name](width=width, heads=heads, backend=backend)
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return memory.to(DEVICE, dtype)


def check_memory(name: str, d: int) -> float:
    """Triton's error against the chunked form in float64, outputs and gradients."""
    results = []
    for backend, dtype in (("triton", torch.float32), ("chunk", torch.float64)):
        memory = memory_of(name, 2 * d, 2, backend, dtype)
        torch.manual_seed(1)
        x = torch.randn(2, RAGGED, 2 * d).to(DEVICE, dtype).requires_grad_()
        y, state = memory(x)
        states = [leaf for _, leaf in tree_leaves(state) if leaf.requires_grad]
        (y.square().sum() + sum(leaf.square().sum() for leaf in states)).backward()
        results.append([y, *states, x.grad, *(p.grad for p in memory.parameters())])
    return error(*results)


def milliseconds(run: Callable[[], object], repeats: int = 20) -> float:
    """The median time of a run."""
    if REHEARSAL:
        began = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - began)
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def both_ways(run: Callable[[], Tensor], leaves: list[Tensor]) -> tuple[float, float]:
    """Milliseconds of the forward pass, and of both."""

    def train() -> None:
        torch.autograd.grad(run().float().sum(), leaves)

    with torch.no_grad():
        ahead = milliseconds(run)
    return ahead, milliseconds(train)


def row(name: str, times: tuple[float, float], base: float | None = None) -> None:
    share = "" if base is None else f"  {times[1] / base:5.2f}x SDPA"
    print(f"  {name:34s} forward {times[0]:8.2f} ms   both {times[1]:8.2f} ms{share}", flush=True)


def time_scans(batch: int, heads: int, tokens: int, d: int, dtype: torch.dtype) -> None:
    print(f"\n{dtype}: batch {batch}, heads {heads}, tokens {tokens}, head width {d}")
    q, k, v = (
        torch.randn(batch, heads, tokens, d, device=DEVICE, dtype=dtype, requires_grad=True)
        for _ in range(3)
    )
    attention = both_ways(lambda: scaled_dot_product_attention(q, k, v, is_causal=True), [q, k, v])
    row("SDPA, causal", attention)
    given = inputs(batch * heads, tokens, d, dtype)
    leaves = list(given.values())
    for name in BACKENDS:
        times = both_ways(lambda name=name: scan(**given, backend=name, check=False)[0], leaves)
        row(f"delta rule, {name}", times, attention[1])
    for name, backend in itertools.product(MEMORIES, ("chunk", "triton")):
        memory = memory_of(name, heads * d, heads, backend, torch.float32)
        x = torch.randn(batch, tokens, heads * d, device=DEVICE, requires_grad=True)

        def run(memory: Memory = memory, x: Tensor = x) -> Tensor:
            with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.bfloat16):
                return memory(x)[0]

        times = both_ways(run, [x, *memory.parameters()])
        row(f"{name} memory, {backend}", times, attention[1])


def time_optimizers(width: int) -> None:
    print(f"\noptimizer step, 24 matrices of {width} x {width}, float32")
    for name, make in (("torch.optim.Muon", torch.optim.Muon), ("nestling M3", M3)):
        weights = [torch.nn.Parameter(torch.randn(width, width, device=DEVICE)) for _ in range(24)]
        optimizer = make(weights, lr=1e-3)
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        print(f"  {name:34s} {milliseconds(optimizer.step, 10):8.2f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=64, help="of a head")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, small; times nothing")
    options = parser.parse_args()
    if not REHEARSAL and not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu.py needs a CUDA device; none was found (see --rehearse)")
    import triton

    widths = (64, 128)
    if REHEARSAL:
        widths, options.batch, options.heads, options.tokens, options.width = (16,), 1, 2, 6, 16
        print("a rehearsal on the CPU, in Triton's interpreter")
    else:
        found = torch.cuda.get_device_properties(0)
        print(f"{found.name}, sm_{found.major}{found.minor}, {found.total_memory / 2**30:.0f} GiB")
    print(f"torch {torch.__version__}, triton {triton.__version__}, found: {sorted(INSTALLED)}")
    print("\nlargest relative error against float64, outputs and gradients")
    for precision, limit in (("highest", 1e-4), ("high", 2e-2)):
        torch.set_float32_matmul_precision(precision)
        for d in widths:
            found = check_delta(d) | {f"{name} memory": check_memory(name, d) for name in MEMORIES}
            said = "  ".join(f"{name} {value:.1e}" for name, value in found.items())
            wrong = [name for name, value in found.items() if not value <= limit]
            print(
                f"  {precision:8s} width {d:3d}:  {said}{'  WRONG: ' if wrong else ''}{wrong or ''}"
            )
            if wrong:
                raise SystemExit(f"{wrong} beyond {limit:g}: please report this; nothing is timed")
    for dtype in (torch.float32, torch.bfloat16):
        time_scans(options.batch, options.heads, options.tokens, options.width, dtype)
    time_optimizers(options.heads * options.width)


if __name__ == "__main__":
    main()
