"""Kill a run at random moments, start it again, and compare the end with an uninterrupted run.

    python benchmarks/kills.py --kills 100

Every restart must continue, and the final weights must be equal bit for bit. A quarter of the kills
fall anywhere (most of them while Python starts), the others soon after a new checkpoint; a run that
reaches its end before all kills are spent counts, and another begins.
"""

from __future__ import annotations

import argparse
import contextlib
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


class Killer:
    """Starts a run and kills it at a random moment."""

    def __init__(self, steps: int, seed: int) -> None:
        self.steps, self.rng = steps, random.Random(seed)
        self.kills = self.in_saves = self.refused = 0

    def life(self, out: Path) -> bool:
        """One start and, if it is quick enough, one kill; True when the run reached its end."""
        process = start(out, self.steps)
        before = _newest(out)
        if self.rng.random() < 0.25:
            _wait(process, self.rng.uniform(0.0, 8.0))
        else:
            while process.poll() is None and _newest(out) == before:
                time.sleep(0.002)
            _wait(process, self.rng.uniform(0.0, 0.6))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if process.returncode == -signal.SIGKILL:
            self.kills += 1
            self.in_saves += any((out / "checkpoints").glob(".step-*"))
        elif process.returncode:
            self.refused += 1
        return process.returncode == 0


def _newest(out: Path) -> str:
    return max((path.name for path in (out / "checkpoints").glob("step-*")), default="")


def _wait(process: subprocess.Popen[str], seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    killer, runs, same = Killer(options.steps, options.seed), 0, 0
    with tempfile.TemporaryDirectory() as name:
        whole = finish(Path(name) / "whole", options.steps)
        while killer.kills < options.kills:
            out, ended = Path(name) / f"killed-{runs}", False
            while killer.kills < options.kills and not ended:
                ended = killer.life(out)
                said = f"\rkilled {killer.kills}/{options.kills}, {_newest(out) or 'no checkpoint'}"
                print(said, end="", flush=True, file=sys.stderr)
            runs += 1
            same += equal(finish(out, options.steps), whole)
    print(file=sys.stderr)
    print(
        f"{killer.kills} kills, {killer.in_saves} of them in the middle of a save;"
        f" {killer.refused} restarts failed; {same} of {runs} killed runs of {options.steps} steps"
        " ended with weights equal bit for bit"
    )
    sys.exit(0 if same == runs and killer.refused == 0 else 1)


if __name__ == "__main__":
    main()
