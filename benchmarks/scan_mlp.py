"""The two-layer memory as a layer against titans-pytorch's NeuralMemory: speed and memory.

Both layers have the same norms, projections, gates and heads around them, a memory of depth 2 with
hidden width 4x, chunk 64, and read at every token (ours with the memory after that token, theirs
with the memory of the chunk before). Forward + backward, gradients of the input and of all
parameters; both keep freed memory. "features" is the same layer with only the last layer of the
memory learning in context (`TitansConfig(features=True)`): the delta rule on `unit(silu(W2 k))`.
Extra memory is the growth of the peak resident size over a fresh process's first steps, each layer
in a process of its own. `--loaded`: one sequence, one thread, processor time, speed only.
`--expand 1`: another hidden width, in head widths, of all layers alike.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable

import common
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nestling.machine import keep_memory
from nestling.norm import unit
from nestling.scan import MLPState, mlp_naive, scan, scan_mlp

BATCH, TOKENS, DIM, HEADS, CHUNK, EXPAND = 4, 2048, 256, 4, 64, 4
LAYERS = (
    "nestling",
    "nestling recompute",
    "nestling features",
    "titans",
    "titans without momentum",
)


class Layer(nn.Module):
    """Norms, projections, gates, the memory, and the way back: what NeuralMemory has."""

    def __init__(self, recompute: bool = False, features: bool = False) -> None:
        super().__init__()
        width = DIM // HEADS
        self.store_norm, self.retrieve_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.queries = nn.Linear(DIM, DIM, bias=False)
        self.keys = nn.Linear(DIM, DIM, bias=False)
        self.values = nn.Linear(DIM, DIM, bias=False)
        self.gates = nn.Linear(DIM, 2 * HEADS)
        self.retrieve_gate = nn.Linear(DIM, HEADS, bias=False)
        self.combine = nn.Linear(DIM, DIM, bias=False)
        self.w1 = nn.Parameter(torch.randn(HEADS, width, EXPAND * width) / (EXPAND * width) ** 0.5)
        self.w2 = nn.Parameter(torch.randn(HEADS, EXPAND * width, width) / width**0.5)
        self.recompute, self.features = recompute, features

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        stored, asked = self.store_norm(x), self.retrieve_norm(x)
        split = lambda t: t.unflatten(-1, (HEADS, -1)).transpose(1, 2)  # noqa: E731
        k = F.normalize(split(self.keys(stored)), dim=-1)
        q = F.normalize(split(self.queries(asked)), dim=-1)
        rate, retain = torch.sigmoid(self.gates(stored)).mT.chunk(2, dim=1)
        written = (split(self.values(stored)), 0.1 * rate, 1 - 0.01 * retain)
        w1, w2 = (w.expand(batch, *w.shape) for w in (self.w1, self.w2))
        if self.features:
            k, q = (unit(F.silu(part @ self.w2.mT)) for part in (k, q))
            y, _ = scan(w1, k, *written, q, chunk=CHUNK, check=False)
        else:
            y, _ = scan_mlp(MLPState(w1, w2), k, *written, q, chunk=CHUNK, recompute=self.recompute)
        y = y * torch.sigmoid(self.retrieve_gate(asked)).mT.unsqueeze(-1)
        return self.combine(y.transpose(1, 2).flatten(-2))


def step(name: str, batch: int = BATCH) -> Callable[[], None]:
    """One forward + backward pass of a layer."""
    torch.manual_seed(0)
    if name.startswith("titans"):
        from titans_pytorch import NeuralMemory

        layer: nn.Module = NeuralMemory(
            dim=DIM, dim_head=DIM // HEADS, heads=HEADS, chunk_size=CHUNK,
            momentum=name == "titans",
            default_model_kwargs={"depth": 2, "expansion_factor": EXPAND},
        )  # fmt: skip
    else:
        layer = Layer(recompute="recompute" in name, features="features" in name)
    x = torch.randn(batch, TOKENS, DIM, requires_grad=True)
    grad = torch.randn(batch, TOKENS, DIM)

    def run() -> None:
        y = layer(x)
        (y[0] if isinstance(y, tuple) else y).backward(grad)
        layer.zero_grad(set_to_none=True)
        x.grad = None

    return run


def features_products(batch: int) -> list[common.Product]:
    """The products the layer with features needs: its layers, the features, the delta rule."""
    width, tokens = DIM // HEADS, batch * TOKENS
    layers = common.Product(1, tokens, DIM, DIM, 3 * 4)
    features = common.Product(batch * HEADS, TOKENS, width, EXPAND * width, 3 * 2)
    return [
        layers, features,
        *common.delta_rule(batch * HEADS, TOKENS, EXPAND * width, width, 32),
    ]  # fmt: skip


def extra_memory(name: str) -> float:
    """MB by which three steps raise the peak resident size of this process."""
    run = step(name)
    gc.collect()
    before = common.peak_mb()
    for _ in range(3):
        run()
    return common.peak_mb() - before


def agrees() -> float:
    """Largest relative difference between the fast and the naive scan, gradients included."""
    torch.manual_seed(0)
    shapes = [(2, 8, 16), (2, 16, 8), (2, 70, 8), (2, 70, 8), (2, 70), (2, 70), (2, 70, 8)]
    inputs = [torch.rand(*shape).sub_(0.0 if len(shape) == 2 else 0.5) for shape in shapes]
    results = []
    for function in (mlp_naive, scan_mlp):
        leaves = [part.double().requires_grad_() for part in inputs]
        y, state = function(MLPState(*leaves[:2]), *leaves[2:], chunk=16)
        loss = y.square().sum() + state.w1.square().sum() + state.w2.square().sum()
        results.append([y, *torch.autograd.grad(loss, leaves)])
    pairs = zip(*results, strict=True)
    return max(((a - b).abs().max() / a.abs().max()).item() for a, b in pairs)


def main(repeats: int = 3, *, loaded: bool = False) -> bool:
    """Print the ratios; returns whether all targets are met."""
    error = agrees()
    if not error < 1e-10:
        raise RuntimeError(f"fast and naive two-layer scan differ by {error:.1e}")
    keep_memory()
    batch = 1 if loaded else BATCH
    arms = {name: step(name, batch) for name in LAYERS}
    clock = time.process_time if loaded else time.perf_counter
    arms["floor"] = common.matmuls(features_products(batch))
    seconds = common.interleaved(arms, repeats=repeats, warmup=1, clock=clock)
    common.over_floor("nestling features", seconds["nestling features"], seconds["floor"])
    for name in LAYERS:
        print(f"      {name:<26} {batch * TOKENS / seconds[name]:9,.0f} tokens/s", flush=True)
    theirs = "titans"
    ok = True
    for ours, target in (("nestling", 2.5), ("nestling features", 5.0)):
        ok &= common.verdict(
            f"{ours}: tokens/s of titans-pytorch", seconds[theirs] / seconds[ours], target,
            at_most=False,
        )  # fmt: skip
    if loaded:
        return ok
    memory = {}
    for name in LAYERS:
        memory[name] = common.in_fresh_process(__file__, name, "--expand", str(EXPAND))["extra_mb"]
        print(f"      {name:<26} {memory[name]:9,.0f} MB extra", flush=True)
    ok &= common.verdict(
        "two-layer memory: extra memory of titans-pytorch",
        memory["nestling"] / memory[theirs], 0.6, at_most=True,
    )  # fmt: skip
    return ok


if __name__ == "__main__":
    torch.set_flush_denormal(True)
    if "--expand" in sys.argv:
        place = sys.argv.index("--expand")
        EXPAND = int(sys.argv[place + 1])
        del sys.argv[place : place + 2]
    if "--loaded" in sys.argv:
        torch.set_num_threads(1)
        main(repeats=1, loaded=True)
    elif len(sys.argv) > 1:
        print(json.dumps({"extra_mb": extra_memory(sys.argv[1])}))
    else:
        main()
