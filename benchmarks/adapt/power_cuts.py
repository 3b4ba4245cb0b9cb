"""Kill a process that saves a memory all the time, at random moments; the memory must survive.

    python benchmarks/adapt/power_cuts.py --kills 50

After every SIGKILL the folder must hold one of the two memories that were being saved in turn,
complete. Prints a JSON line with the number of broken ones (0); exit code 1 if there are any.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import nestling
from nestling.stacking import Learner

READY = "saving"


def learner() -> Learner:
    """A learner over a model of fixed random weights; its memory has about 2 MB."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return nestling.adapt(LlamaForCausalLM(config).eval(), [8, 16, 32], rate=0.1)


def text(seed: int) -> torch.Tensor:
    return torch.randint(3, 64, (40,), generator=torch.Generator().manual_seed(seed))


def save_for_ever(folder: Path) -> None:
    """Save two memories in turn; says so once the first is there."""
    one, two = learner(), learner()
    one.learn(text(1))
    two.learn(text(2))
    one.save(folder, notes="one")
    print(READY, flush=True)
    while True:
        two.save(folder, notes="two")
        one.save(folder, notes="one")


def kill_once(folder: Path, chance: random.Random) -> float:
    """Start a saving process, kill it at a random moment; returns how long it had been saving."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--child", str(folder)], stdout=subprocess.PIPE, text=True
    )
    if process.stdout is None or process.stdout.readline().strip() != READY:
        raise SystemExit("the saving process did not start")
    wait = chance.uniform(0.0, 0.5)
    time.sleep(wait)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return wait


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.child:
        save_for_ever(options.child)
    chance, ids, broken = random.Random(options.seed), text(3)[None], 0
    wanted = {}
    for name, seed in (("one", 1), ("two", 2)):
        made = learner()
        made.learn(text(seed))
        wanted[name] = made(ids).logits
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        reader = learner()
        for kill in range(1, options.kills + 1):
            kill_once(Path(name), chance)
            try:
                notes = reader.load(name)
                right = torch.equal(reader(ids).logits, wanted[notes])
            except (ValueError, OSError) as error:
                print(error, file=sys.stderr)
                right = False
            broken += not right
            print(f"\rkilled {kill}/{options.kills}, {broken} broken", end="", file=sys.stderr)
    print(json.dumps({"kills": options.kills, "broken": broken}))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
