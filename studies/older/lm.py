"""Language modelling: Hope beside Transformer++, Titans and DeltaNet, at equal size and tokens.

    python -m studies older.lm --data ../shared/data/wikitext2   run what is missing, write the page
    python -m studies older.lm --report                          only write the page

Bytes of WikiText-2, about 1M parameters, every arm the same batches. Each arm's rate is the best of
three on a seed of its own, at half the steps; then three seeds. More arms, at Hope's rate, tell
what matters: `hope_printed` is Eq. 83-88 as printed (deviation 22), `hope_parallel` has its levels
side by side (Eq. 74) instead of in a chain, `hope_gated` has gated MLPs as levels. Beside the
validation loss at the trained length, every model reads streams eight times as long: loss against
position.
"""

from __future__ import annotations

import argparse
import gzip
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from nestling.host import keep_memory
from nestling.models import MemoryCache, NestlingForCausalLM, presets
from studies.harness.small import Store, watched
from studies.older.lm_report import page

SIZE = presets.Size(width=128, layers=3, heads=4, vocabulary=256, parameters=1_000_000)
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "hope": ("hope", {}),
    "transformer": ("transformer", {}),
    "titans": ("titans", {}),
    "deltanet": ("deltanet", {}),
    "hope_parallel": ("hope", {"topology": "parallel"}),
    "hope_gated": ("hope", {"activation": "swiglu"}),
    "hope_parallel_gated": ("hope", {"topology": "parallel", "activation": "swiglu"}),
    "hope_printed": ("hope", {"mixer_options": {"self_modifying": {"residual": False}}}),
}
VARIANTS = ("hope_parallel", "hope_gated", "hope_parallel_gated", "hope_printed")
"""Arms that take Hope's rate."""

RATES = (6e-3, 12e-3, 24e-3)
TUNING_SEED, SEEDS = 100, (0, 1, 2)
LENGTH, ROWS, FURTHER = 512, 4, 8
ROOT = Path(__file__).resolve().parents[2]


def text(folder: Path, part: str) -> Tensor:
    """The bytes of one part of WikiText-2."""
    return torch.frombuffer(
        bytearray(gzip.decompress((folder / f"{part}.txt.gz").read_bytes())), dtype=torch.uint8
    )


def windows(data: Tensor, count: int, length: int, seed: int) -> Tensor:
    """Windows of `length + 1` bytes from random places, [count, length + 1]."""
    flow = torch.Generator().manual_seed(seed)
    first = torch.randint(len(data) - length - 1, (count,), generator=flow)
    return data[first[:, None] + torch.arange(length + 1)].long()


def train(model: NestlingForCausalLM, data: Tensor, *, rate: float, seed: int, steps: int) -> float:
    """AdamW with warm-up and cosine decay; the mean loss of the last tenth."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))
    losses = []
    for step in range(steps):
        scale = min(1.0, (step + 1) / 20) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = rate * scale
        ids = windows(data, ROWS, LENGTH, 1_000_003 * (seed + 1) + step)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last)


@torch.no_grad()
def validate(model: NestlingForCausalLM, data: Tensor, windows_of: int = 48) -> float:
    """Mean loss in nats per byte over windows of the trained length."""
    losses = []
    for ids in windows(data, windows_of, LENGTH, seed=7).split(8):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        losses.append(cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item())
    return sum(losses) / len(losses)


@torch.no_grad()
def by_position(model: NestlingForCausalLM, data: Tensor, streams: int = 8) -> list[float]:
    """The loss of streams beyond the trained length, one value for every `LENGTH` bytes."""
    ids = windows(data, streams, FURTHER * LENGTH, seed=8)
    cache = MemoryCache(SIZE.layers)
    losses = []
    for start in range(0, FURTHER * LENGTH, LENGTH):
        seen, next_ = ids[:, start : start + LENGTH], ids[:, start + 1 : start + LENGTH + 1]
        logits = model(input_ids=seen, past_key_values=cache, use_cache=True).logits
        losses.append(cross_entropy(logits.flatten(0, 1), next_.flatten()).item())
    return losses


def run(arm: str, rate: float, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """Train one model and judge it."""
    name, fields = ARMS[arm]
    torch.manual_seed(seed)
    model = NestlingForCausalLM(presets.configure(SIZE, name, **fields)).train()
    began = time.process_time()
    found = train(model, text(folder, "train"), rate=rate, seed=seed, steps=steps)
    seconds = time.process_time() - began
    model.eval()
    valid = text(folder, "valid")
    result = {
        "arm": arm,
        "rate": rate,
        "seed": seed,
        "tokens": steps * ROWS * LENGTH,
        "parameters": model.num_parameters(),
        "train": found,
        "valid": validate(model, valid),
        "seconds": seconds,
    }
    if seed != TUNING_SEED:
        result["positions"] = by_position(model, valid)
    return result


def study(store: Store, folder: Path, arms: list[str], seeds: list[int], steps: int) -> None:
    """Tune, then run the seeds one after another, so that a stopped study is balanced."""
    trials = [(arm, rate) for arm in arms if arm not in VARIANTS for rate in RATES]
    for arm, rate in watched(trials, lambda job: f"{job[0]} at rate {job[1]:g}"):
        key = f"tune/{steps}/{arm}/{rate:g}"
        if key not in store:
            store.add(key, run(arm, rate, TUNING_SEED, steps // 2, folder))
    jobs = [(arm, seed) for seed in seeds for arm in arms]
    for arm, seed in watched(jobs, lambda job: f"{job[0]}, seed {job[1]}"):
        tuned = "hope" if arm in VARIANTS else arm
        tried = {rate: store.get(f"tune/{steps}/{tuned}/{rate:g}")["valid"] for rate in RATES}
        key = f"run/{steps}/{arm}/{seed}"
        if key not in store:
            store.add(key, run(arm, min(tried, key=tried.__getitem__), seed, steps, folder))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "wikitext2")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "lm", help="one file per run")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "results" / "lm.md")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=60, help="of training; tuning takes half")
    parser.add_argument("--report", action="store_true", help="only write the page")
    options = parser.parse_args(arguments)
    store = Store(options.runs, options.page.with_suffix(".json"))
    if not options.report:
        if not (options.data / "train.txt.gz").is_file():
            parser.error(f"--data: no train.txt.gz in {options.data}")
        keep_memory()
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        study(store, options.data, options.arms, options.seeds, options.steps)
    stored = store.gather()
    chosen = {key: r for key, r in stored.items() if int(key.split("/")[1]) == options.steps}
    page(chosen, options.page, length=LENGTH, rows=ROWS, size=SIZE)
    print(options.page.read_text())
