"""Kill a run at random moments, start it again, and compare the end with an uninterrupted run.

    python benchmarks/kills.py --kills 100

Every restart must continue, and the final weights must be equal bit for bit.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

CHANGES = [
    "model.fields.hidden_size=32",
    "model.fields.num_hidden_layers=1",
    "model.fields.num_attention_heads=2",
    "model.fields.intermediate_size=32",
    "data.train=builtin:6",
    "data.valid=builtin:6-7",
    "data.length=64",
    "run.rows=4",
    "run.eval_windows=4",
    "run.save_every=3",
    "run.eval_every=50",
    "run.micro=2",
    "optim.name=m3",
    "optim.lr=0.005",
]


def start(out: Path, steps: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "nestling.cli", "train", "stream", *CHANGES]
    command += [f"run.steps={steps}", f"data.cache={out.parent / 'cache'}", "--out", str(out)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finish(out: Path, steps: int) -> dict[str, torch.Tensor]:
    process = start(out, steps)
    said, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"a run failed with exit code {process.returncode}:\n{said}")
    return load_file(out / "model" / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        whole = finish(Path(name) / "whole", options.steps)
        out, kills, refused = Path(name) / "killed", 0, 0
        while kills < options.kills:
            process = start(out, options.steps)
            time.sleep(rng.uniform(2.0, 9.0))
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                kills += 1
                print(f"\rkilled {kills}/{options.kills}", end="", flush=True, file=sys.stderr)
            elif process.returncode:
                refused += 1
            process.communicate()
            if process.returncode == 0:
                break
        print(file=sys.stderr)
        got = finish(out, options.steps)
        same = got.keys() == whole.keys() and all(torch.equal(got[k], whole[k]) for k in whole)
    verdict = "equal bit for bit" if same else "DIFFERENT"
    print(f"{kills} kills, {refused} restarts failed, final weights {verdict}")
    sys.exit(0 if same and refused == 0 else 1)


if __name__ == "__main__":
    main()
