"""Kill a run at random moments, start it again, and compare the end with an uninterrupted run.

    python benchmarks/kills.py --kills 100
    python benchmarks/kills.py --kills 50 --processes 2 --strategy fsdp
    python benchmarks/kills.py --kills 50 --processes 2 --strategy ddp --last 1

Every restart must continue, and the final weights must be equal bit for bit. A quarter of the kills
fall anywhere, the others soon after a new checkpoint; a run that reaches its end before all kills
are spent counts, and another begins. With several processes one of them is killed, and the others
end with it, as torchrun does it; with `--last` the last leg runs with another number of processes
and must end within 2e-6. A single process's whole run and last leg are fresh interpreters.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import NamedTuple

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


class World(NamedTuple):
    """How many processes a run has, and how they share the work."""

    processes: int = 1
    strategy: str = "ddp"


def arguments(out: Path, steps: int, world: World) -> list[str]:
    ends = [f"run.steps={steps}", f"data.cache={out.parent / 'cache'}", "--out", str(out)]
    return ["train", "stream", *CHANGES, f"run.strategy={world.strategy}", *ends]


def start(out: Path, steps: int, world: World) -> list[int]:
    """Run the command in processes of its own; returns their ids.

    They are forked from this one, which has imported what they need: a life then costs half a
    second instead of six, and the kill is as real.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(world.processes):
        child = os.fork()
        if child:
            children.append(child)
            continue
        if world.processes > 1:
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world.processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        with open(f"{out}.{rank}.log", "w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            warnings.simplefilter("ignore")  # FSDP2's own
            os._exit(main_command(arguments(out, steps, world)))
    return children


def finish(out: Path, steps: int, world: World) -> dict[str, torch.Tensor]:
    """Run to the end undisturbed (one process: in a fresh interpreter, as a user would)."""
    if world.processes == 1:
        command = [sys.executable, "-m", "nestling.cli", *arguments(out, steps, world)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"a run failed with exit code {done.returncode}:\n{done.stderr}")
    else:
        for rank, child in enumerate(start(out, steps, world)):
            if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
                said = Path(f"{out}.{rank}.log").read_text()
                raise SystemExit(f"a run failed with exit code {code}:\n{said}")
    return load_file(out / "model" / "model.safetensors")


class Killer:
    """Starts a run and kills it, or one of its processes, at a random moment."""

    def __init__(self, steps: int, seed: int, world: World) -> None:
        self.steps, self.rng, self.world = steps, random.Random(seed), world
        self.kills = self.in_saves = 0

    def life(self, out: Path) -> bool:
        """One start and, if it is quick enough, one kill; True when the run reached its end."""
        before, children = _newest(out), start(out, self.steps, self.world)
        victim = self.rng.choice(children)
        anywhere = self.rng.random() < 0.25
        while not anywhere and _newest(out) == before and _running(victim):
            time.sleep(0.002)
        end = time.monotonic() + self.rng.uniform(0.0, 2.0 if anywhere else 0.6)
        while time.monotonic() < end and _running(victim):
            time.sleep(0.002)
        if not _running(victim):  # it ends by itself, and so do the others
            codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
            if any(codes):
                said = "".join(path.read_text() for path in out.parent.glob(f"{out.name}.*.log"))
                raise SystemExit(f"a restart failed with exit codes {codes}:\n{said}")
            return True
        for child in [victim, *(child for child in children if child != victim)]:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        self.kills += 1
        self.in_saves += any((out / "checkpoints").glob(".step-*"))
        return False


def _running(child: int) -> bool:
    """True until the process has ended (it is not collected)."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _newest(out: Path) -> str:
    return max((path.name for path in (out / "checkpoints").glob("step-*")), default="")


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference of two models' weights; infinite if they are not the same model."""
    if a.keys() != b.keys():
        return math.inf
    return max(float((a[k] - b[k]).abs().max()) for k in a)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--strategy", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--last", type=int, help="processes of the last leg (default: the same)")
    options = parser.parse_args()
    world = World(options.processes, options.strategy)
    last = World(options.last or options.processes, options.strategy)
    limit = 0.0 if last == world else 2e-6
    killer, far = Killer(options.steps, options.seed, world), []
    with tempfile.TemporaryDirectory() as name:
        whole = finish(Path(name) / "whole", options.steps, world)
        while killer.kills < options.kills:
            out, ended = Path(name) / f"killed-{len(far)}", False
            while killer.kills < options.kills and not ended:
                ended = killer.life(out)
                said = f"\rkilled {killer.kills}/{options.kills}, {_newest(out) or 'no checkpoint'}"
                print(said, end="", flush=True, file=sys.stderr)
            far.append(distance(finish(out, options.steps, last), whole))
            left = [path for path in out.rglob(".*") if path.name != ".lock"]
            if left:
                raise SystemExit(f"a run left {left} behind")
    print(file=sys.stderr)
    good = sum(each <= limit for each in far)
    close = "equal bit for bit" if limit == 0 else f"within {limit:g} (at most {max(far):.1e})"
    print(
        f"{killer.kills} kills of {world.processes} {world.strategy} process(es), {killer.in_saves}"
        f" of them in the middle of a save; every restart went on; {good} of {len(far)} killed runs"
        f" of {options.steps} steps ended with weights {close}"
    )
    sys.exit(0 if good == len(far) else 1)


if __name__ == "__main__":
    main()
