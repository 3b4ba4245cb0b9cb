"""Kill a run at random moments, start it again, and compare the end with an uninterrupted run.

    python benchmarks/kills.py --kills 100

Every restart must continue, and the final weights must be equal bit for bit. A quarter of the kills
fall anywhere, the others soon after a new checkpoint; a run that reaches its end before all kills
are spent counts, and another begins. The whole run and the last leg are fresh interpreters.
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

import nestling.models
import nestling.train.trainer  # noqa: F401  (what a child needs is imported before it is forked)
from nestling.cli import main as main_command

CHANGES = [
    "model.fields.hidden_size=32",
    "model.fields.num_hidden_layers=1",
    "model.fields.num_attention_heads=2",
    "model.fields.intermediate_size=32",
    "data.train=builtin:6",
    "data.valid=builtin:6-7",
    "data.length=32",
    "run.rows=2",
    "run.eval_windows=4",
    "run.save_every=2",
    "run.eval_every=50",
    "run.micro=1",
    "optim.name=m3",
    "optim.lr=0.005",
]


def arguments(out: Path, steps: int) -> list[str]:
    ends = [f"run.steps={steps}", f"data.cache={out.parent / 'cache'}", "--out", str(out)]
    return ["train", "stream", *CHANGES, *ends]


def start(out: Path, steps: int) -> int:
    """Run the command in a process of its own; returns its id.

    The process is forked from this one, which has imported what it needs: a life then costs half a
    second instead of six, and the kill is as real.
    """
    child = os.fork()
    if child:
        return child
    with open(out.with_suffix(".log"), "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        os._exit(main_command(arguments(out, steps)))


def finish(out: Path, steps: int) -> dict[str, torch.Tensor]:
    """Run to the end in a fresh interpreter, as a user would."""
    command = [sys.executable, "-m", "nestling.cli", *arguments(out, steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"a run failed with exit code {done.returncode}:\n{done.stderr}")
    return load_file(out / "model" / "model.safetensors")


class Killer:
    """Starts a run and kills it at a random moment."""

    def __init__(self, steps: int, seed: int) -> None:
        self.steps, self.rng = steps, random.Random(seed)
        self.kills = self.in_saves = 0

    def life(self, out: Path) -> bool:
        """One start and, if it is quick enough, one kill; True when the run reached its end."""
        before, child = _newest(out), start(out, self.steps)
        anywhere = self.rng.random() < 0.25
        while not anywhere and _newest(out) == before and _running(child):
            time.sleep(0.002)
        end = time.monotonic() + self.rng.uniform(0.0, 2.0 if anywhere else 0.6)
        while time.monotonic() < end and _running(child):
            time.sleep(0.002)
        os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == -signal.SIGKILL:
            self.kills += 1
            self.in_saves += any((out / "checkpoints").glob(".step-*"))
        elif code:
            said = out.with_suffix(".log").read_text()
            raise SystemExit(f"a restart failed with exit code {code}:\n{said}")
        return code == 0


def _running(child: int) -> bool:
    """True until the process has ended (it is not collected)."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _newest(out: Path) -> str:
    return max((path.name for path in (out / "checkpoints").glob("step-*")), default="")


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=240)
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
        f" every restart went on; {same} of {runs} killed runs of {options.steps} steps"
        " ended with weights equal bit for bit"
    )
    sys.exit(0 if same == runs else 1)


if __name__ == "__main__":
    main()
