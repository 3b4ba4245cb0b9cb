"""Kill work at random moments, start it again, and compare the end with undisturbed work.

    python benchmarks/kills.py --kills 200          # over train, learn, study, export, prepare
    python benchmarks/kills.py --kills 100 --what train
    python benchmarks/kills.py --kills 50 --processes 2 --strategy fsdp
    python benchmarks/kills.py --kills 50 --processes 2 --strategy ddp --last 1

Every restart must go on, the end must be equal bit for bit, and nothing may be left behind: no
hidden file, no lock. Work that reaches its end before all kills are spent counts, and another
begins. *train*: a quarter of the kills fall anywhere, the others soon after a new checkpoint; with
several processes one of them is killed, and the others end with it, as torchrun does it; with
`--last` the last leg runs with another number of processes and must end within 2e-6. A single
process's whole run and last leg are fresh interpreters. *learn*: `nestling learn`. *study*: stored
runs, their copy, and a model that is kept for other studies. *export*: a PEFT LoRA and a trained
model. *prepare*: a packed corpus.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from safetensors.torch import load_file

import nestling.models
import nestling.train.trainer  # noqa: F401  (what a child needs is imported before it is forked)
from nestling.cli import main as main_command
from nestling.machine import bf16_is_quicker

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


class Work(NamedTuple):
    """Something to be killed: what runs, in a folder, and what must be equal in the end."""

    prepare: Callable[[Path], None]  # once, in the folder above
    run: Callable[[Path], int]
    result: Callable[[Path], Any]


def _contents(folder: Path, *names: str) -> dict[str, bytes]:
    """The bytes of every file below a folder (with these names)."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    chosen = [path for path in files if not names or path.name in names]
    return {str(path.relative_to(folder)): path.read_bytes() for path in chosen}


def _small_model(folder: Path) -> None:
    from nestling.models import NestlingForCausalLM, presets
    from nestling.models.tokenizer import byte_tokenizer

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = presets.tiny("transformer", vocab_size=259, intermediate_size=64, **sizes)
    NestlingForCausalLM(config).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    (folder / "text.txt").write_text("Day 1, spring. The rain fell on the harbour. " * 60)


_NEW = "--chunks 8,32 --rule gd --rate 0.1 --rank 4 --layers 0 --passes 1".split()


def _learn_line(folder: Path, *more: str) -> list[str]:
    above = folder.parent
    line = ["learn", str(above / "model"), "--memory", str(folder / "memory"), *more]
    return [*line, "--forget", "inf"]


def _learn(folder: Path) -> int:
    """The same command again goes on; once all is learned, it is not learned again."""
    from nestling.files import read_manifest

    folder.mkdir(exist_ok=True)
    new: list[str] = _NEW
    if (folder / "memory" / "memory.json").exists():
        new = []
        notes = read_manifest(folder / "memory", "memory").meta["notes"]
        if all(each["done"] for each in notes["files"]):
            return 0
    more = ["--from", str(folder.parent / "text.txt"), "--save-every", "64", *new]
    return main_command(_learn_line(folder, *more))


def _memory(folder: Path) -> Any:
    from nestling.files import load_tree

    return {k: v.numpy().tobytes() for k, v in load_tree(folder / "memory", "memory")[0].items()}


def _study(folder: Path) -> int:
    """Stored runs, a kept model and the copy, as a study makes them."""
    from nestling.models import NestlingForCausalLM
    from studies.harness.models import keep_model, kept_model
    from studies.harness.store import Store

    store = Store(folder / "runs", study="kills", copy=folder / "kills.json", needs=("loss",))
    for seed in range(12):
        made = {"loss": 1.0 / (seed + 1), "curve": [float(seed)] * 2000}
        store.get(f"hope/seed-{seed}", lambda made=made: made)
    if kept_model(folder / "base") is None:
        model = NestlingForCausalLM.from_pretrained(folder.parent / "model")
        keep_model(model, folder / "base", {"seed": 0})
    store.gather()
    return 0


def _export_start(folder: Path) -> None:
    _small_model(folder)
    line = _learn_line(folder, "--from", str(folder / "text.txt"), *_NEW, "--tokens", "200")
    line[line.index("--memory") - 1] = str(folder / "model")
    if code := main_command(line):
        raise SystemExit(code)


def _export(folder: Path) -> int:
    """A memory as a LoRA, and a model whose training has come to its end."""
    line = ["learn", str(folder.parent / "model"), "--memory", str(folder.parent / "memory")]
    if code := main_command([*line, "--export", str(folder / "lora")]):
        return code
    return main_command(arguments(folder / "run", 1, World()))


def _prepare(folder: Path) -> int:
    from nestling.models.tokenizer import byte_tokenizer
    from nestling.train.corpus import Corpus
    from nestling.train.packed import prepare
    from nestling.train.tokenizer import TextEncoder

    prepare([Corpus(source="builtin:60")], TextEncoder(byte_tokenizer()), folder / "cache")
    return 0


WORKS = {
    "learn": Work(_small_model, _learn, _memory),
    "study": Work(_small_model, _study, _contents),
    "export": Work(
        _export_start,
        _export,
        lambda folder: _contents(folder, "adapter_model.safetensors", "model.safetensors"),
    ),
    "prepare": Work(lambda folder: None, _prepare, _contents),
}


def forked(work: Work, folder: Path) -> int:
    """The work in a process of its own; returns its id."""
    child = os.fork()
    if child == 0:
        with open(f"{folder}.log", "w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        warnings.simplefilter("ignore")
        code = 1
        try:
            code = work.run(folder)
        except BaseException:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
        os._exit(code)
    return child


def _ended(child: int, folder: Path) -> None:
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        said = Path(f"{folder}.log").read_text()[-2000:]
        raise SystemExit(f"a restart failed with exit code {code}:\n{said}")


def kill_work(name: str, kills: int, seed: int) -> tuple[int, int]:
    """Kill one kind of work; how many pieces of it ended, and how many of them were wrong."""
    work, rng = WORKS[name], random.Random(f"{seed} {name}")
    pieces = wrong = killed = 0
    with tempfile.TemporaryDirectory() as above:
        root = Path(above)
        work.prepare(root)
        begun = time.monotonic()
        _ended(forked(work, root / "whole"), root / "whole")
        long, wanted = time.monotonic() - begun, work.result(root / "whole")
        while killed < kills:
            folder, ended = root / f"killed-{pieces}", False
            pieces += 1
            while killed < kills and not ended:
                child, end = forked(work, folder), time.monotonic() + rng.uniform(0, long)
                while time.monotonic() < end and _running(child):
                    time.sleep(0.001)
                if _running(child):
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    killed += 1
                else:
                    _ended(child, folder)
                    ended = True
                print(f"\r{name}: killed {killed}/{kills}", end="", flush=True, file=sys.stderr)
            _ended(forked(work, folder), folder)
            left = [str(path) for path in folder.rglob(".*")]
            if left or work.result(folder) != wanted:
                wrong += 1
                print(f"{name}: {left or 'another result'} in {folder.name}", flush=True)
    print(f"\n{name}: {kills} kills, every restart went on; {pieces - wrong} of {pieces} ended"
          " equal bit for bit with nothing left behind", flush=True)  # fmt: skip
    return pieces, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="of all works together")
    parser.add_argument("--what", nargs="+", choices=("train", *WORKS), default=["train", *WORKS])
    parser.add_argument("--steps", type=int, default=60, help="of a training run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--strategy", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--last", type=int, help="processes of the last leg (default: the same)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    bf16_is_quicker()  # measured once, before lives are forked that would each ask
    what = ["train"] if options.processes > 1 else options.what
    shares = {name: (options.kills + place) // len(what) for place, name in enumerate(what)}
    bad = sum(kill_work(name, n, options.seed)[1] for name, n in shares.items() if name != "train")
    if "train" in shares:
        bad += kill_training(options, shares["train"])
    sys.exit(1 if bad else 0)


def kill_training(options: argparse.Namespace, kills: int) -> int:
    """Kill training runs; how many ended with other weights than an undisturbed run."""
    world = World(options.processes, options.strategy)
    last = World(options.last or options.processes, options.strategy)
    limit = 0.0 if last == world else 2e-6
    killer, far = Killer(options.steps, options.seed, world), []
    with tempfile.TemporaryDirectory() as name:
        whole = finish(Path(name) / "whole", options.steps, world)
        while killer.kills < kills:
            out, ended = Path(name) / f"killed-{len(far)}", False
            while killer.kills < kills and not ended:
                ended = killer.life(out)
                said = f"\rkilled {killer.kills}/{kills}, {_newest(out) or 'no checkpoint'}"
                print(said, end="", flush=True, file=sys.stderr)
            far.append(distance(finish(out, options.steps, last), whole))
            left = list(out.rglob(".*"))
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
    return len(far) - good


if __name__ == "__main__":
    main()
