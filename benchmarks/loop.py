"""The cost of the training loop beside the bare model step, and the efficiency of two processes.

python benchmarks/loop.py [--part loop | --part processes]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from common import verdict

from nestling.machine import keep_memory
from nestling.train.distributed import World
from nestling.train.optimizers import build
from nestling.train.parts import load_data, make_batches, make_model
from nestling.train.recipe import changed, get_recipe
from nestling.train.step import loss_sum

STEPS = 30  # the loop logs every 10; both arms count the better of the last two tens
CHANGES = [
    "model.name=transformer",
    "data.train=builtin:40",
    "data.valid=builtin:40-41",
    f"run.steps={STEPS}",
    "run.eval_every=1000",
    "run.save_every=1000",
    "run.rows=4",
]


def bare(cache: str) -> float:
    """Seconds per step of forward, backward, clipping and AdamW in a plain loop."""
    recipe = changed(get_recipe("tiny"), [*CHANGES, f"data.cache={cache}"])
    encoder, train, _ = load_data(recipe, World())
    keep_memory()
    model, batches = make_model(recipe, encoder), make_batches(recipe, train)
    optimizer = build(recipe.optim, model)
    times = []
    for step in range(STEPS):
        batch = batches(step)
        begin = time.perf_counter()
        loss, _ = loss_sum(model, batch, torch.device("cpu"))
        (loss / batch.targets.numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begin)
    return min(sum(times[-10:]), sum(times[-20:-10])) / 10


def looped(cache: str, folder: Path, *, processes: int = 1) -> float:
    """Seconds per step of `nestling train`, from its own log."""
    launch = [sys.executable]
    if processes > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    launch += ["-m", "nestling.cli", "train", "tiny", *CHANGES, f"data.cache={cache}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*launch, "--out", str(folder)], check=True, capture_output=True, env=environment
    )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    speeds = [(r["tokens_per_second"], r["tokens"]) for r in rows if "tokens_per_second" in r]
    speed, tokens = max(speeds[2:])
    return tokens / speed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=("loop", "processes"), help="only this one")
    part = parser.parse_args().part
    with tempfile.TemporaryDirectory() as name:
        torch.set_num_threads(
            1
        )  # as every process below: threads that wait for each other vary more
        if part != "processes":
            seconds = bare(name)
            loop = looped(name, Path(name) / "loop")
            verdict("the loop's tokens/s over the bare step's", seconds / loop, 0.95, at_most=False)
        if part != "loop":
            one = looped(name, Path(name) / "one")
            two = looped(name, Path(name) / "two", processes=2)
            print(f"      two processes over one, a core each: {one / two:.2f}x of an ideal 2x")


if __name__ == "__main__":
    main()
