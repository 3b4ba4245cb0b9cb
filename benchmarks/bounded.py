"""Bounded by construction: adversarial streams of a million tokens, ten million tokens of text.

    python benchmarks/bounded.py                    # 1M tokens of every stream, per configuration
    python benchmarks/bounded.py --text 10000000    # and a text-like run, printing resident memory

Every stream runs through random and through trained weights; the largest row norm ever seen is
printed beside `memory.bound()`, and exceeding it (or any NaN) is a failure.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from common import verdict
from torch import Tensor, nn

from nestling.memories import (
    SelfModifying,
    SelfModifyingConfig,
    configure,
    state_detach,
    tree_leaves,
)

STREAMS = ("constant", "alternating", "zero", "maximal", "opposed", "random")
CONFIGURATIONS = {
    "matrix, dot": {},
    "matrix, l2": {"objective": "l2"},
    "matrix, dot, negative eigenvalues": {"negative": True},
    "matrix, dot, momentum": {"momentum": True},
    "2-layer, l2": {"objective": "l2", "expansion": 1},
    "matrix, dot, a head that adds": {"adding": 1},
    "matrix, dot, tied retention": {"retention": {"tied": True}},
    "matrix, dot, gates that shut": {"retention": {"tied": True}, "rates": {"shut": 0.1}},
}


def adversaries(width: int, start: int, stop: int) -> Tensor:
    """Tokens `start` to `stop` of every stream, one stream per row: [6, T, D]."""
    once = torch.Generator().manual_seed(0)
    one, two = torch.randn(2, width, generator=once)
    flow = torch.Generator().manual_seed(start + 1)
    step = torch.arange(start, stop).unsqueeze(1)
    noise = torch.randn(stop - start, width, generator=flow)
    return torch.stack(
        [
            one.expand(stop - start, width),
            torch.where(step % 2 == 0, one, two),
            torch.zeros(stop - start, width),
            1e6 * noise.sign(),
            torch.where(step % 2 == 0, one, -one) + 0.01 * noise,
            noise,
        ]
    )


def train(memory: SelfModifying, steps: int = 40) -> None:
    """A few steps of learning to recall, so that the weights are no longer random."""
    optimizer = torch.optim.AdamW(memory.parameters(), lr=1e-2)
    head = nn.Linear(memory.width, memory.width)
    for step in range(steps):
        x = torch.randn(4, 128, memory.width, generator=torch.Generator().manual_seed(step))
        loss = (head(memory(x)[0])[:, 8:] - x[:, :-8]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def largest_row(memory: SelfModifying, tokens: int, piece: int = 1024) -> tuple[Tensor, bool]:
    """The largest norm a row ever had after a piece, [layers], and whether all was finite."""
    state, most, finite = None, torch.zeros(1), True
    for start in range(0, tokens, piece):
        x = adversaries(memory.width, start, min(start + piece, tokens))
        y, state = memory(x, state)
        state = state_detach(state)
        layers = [w for w in (state.weights.first, state.weights.second) if w is not None]
        most = torch.maximum(most, torch.stack([w.norm(dim=-1).max() for w in layers]))
        finite = finite and bool(y.isfinite().all())
    finite = finite and all(bool(leaf.isfinite().all()) for _, leaf in tree_leaves(state))
    return most, finite


def stress(tokens: int, names: list[str]) -> bool:
    """Some configurations, random (large) and trained weights, all streams at once."""
    good = True
    for name in names:
        options = CONFIGURATIONS[name]
        for weights in ("random", "trained"):
            torch.manual_seed(0)
            memory = SelfModifying(configure(SelfModifyingConfig, width=16, heads=2, **options))
            if weights == "trained":
                train(memory)
            else:
                with torch.no_grad():
                    for parameter in memory.parameters():
                        parameter.add_(2 * torch.randn_like(parameter))
            began = time.perf_counter()
            most, finite = largest_row(memory, tokens)
            share = float((most / memory.bound()).max())
            what = f"{name}, {weights}, {tokens:,} tokens x {len(STREAMS)} streams"
            good &= verdict(f"{what}: row norm / bound", share, 1.0, at_most=True) and finite
            print(f"      finite: {finite}, {time.perf_counter() - began:.0f} s", flush=True)
    return good


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


@torch.no_grad()
def text(tokens: int, piece: int = 2048) -> bool:
    """A long stream of text-like bytes through a small model; memory must not grow."""
    from nestling import NestlingConfig, NestlingForCausalLM

    torch.manual_seed(0)
    config = NestlingConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    model = NestlingForCausalLM(config).eval()
    words = [bytes(torch.randint(97, 123, (2 + i % 9,)).tolist()) for i in range(500)]
    flow = torch.Generator().manual_seed(1)
    cache, done, early = None, 0, 0.0
    began = time.perf_counter()
    while done < tokens:
        picks = (500 * torch.rand(600, generator=flow) ** 3).long().tolist()
        line = b" ".join(words[i] for i in picks)[:piece]
        ids = torch.tensor([list(line)])
        out = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        if not bool(out.logits.isfinite().all()):
            print(f"MISS  not finite after {done:,} tokens")
            return False
        before, done = done, done + len(line)
        if before < tokens // 100 <= done:
            early = resident_mb()
            print(f"      resident memory after {done:,} tokens: {early:.0f} MB")
    late = resident_mb()
    print(f"      resident memory after {done:,} tokens: {late:.0f} MB")
    print(f"      {done / (time.perf_counter() - began):,.0f} tokens/s")
    return verdict("resident memory, end / after 1%", late / early, 1.05, at_most=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens of every stream")
    parser.add_argument("--text", type=int, default=0, help="tokens of the text-like run")
    parser.add_argument(
        "--configurations", nargs="+", default=list(CONFIGURATIONS), choices=CONFIGURATIONS
    )
    arguments = parser.parse_args()
    torch.set_flush_denormal(True)
    torch.set_num_threads(1)  # the tensors are small: more threads only wait for each other
    good = stress(arguments.tokens, arguments.configurations) if arguments.tokens else True
    if arguments.text:
        good &= text(arguments.text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
