"""Kill a process that saves a memory all the time, at random moments; the memory must survive.

    python benchmarks/power_cuts.py --kills 50

After every SIGKILL the folder must hold one of the two memories that were being saved in turn,
complete. Prints a JSON line with the number of broken ones (0); exit code 1 if there are any.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import nestling
from nestling.adaptation import Learner


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


def save_for_ever(folder: Path, turns: list[tuple[str, Learner]]) -> NoReturn:
    """Save two memories in turn."""
    while True:
        for name, one in turns:
            one.save(folder, notes=name)


def kill_once(folder: Path, turns: list[tuple[str, Learner]], seconds: float) -> None:
    """Fork a process that saves, and kill it after so long."""
    child = os.fork()
    if child == 0:
        save_for_ever(folder, turns)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    chance, ids = random.Random(options.seed), text(3)[None]
    one, two, reader = learner(), learner(), learner()
    one.learn(text(1))
    two.learn(text(2))
    wanted = {"one": one(ids).logits, "two": two(ids).logits}
    found, broken = dict.fromkeys(wanted, 0), 0
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        begin = time.perf_counter()
        one.save(name, notes="one")
        long, notes = 3 * (time.perf_counter() - begin), "one"
        for kill in range(1, options.kills + 1):
            turns = [("one", one), ("two", two)]
            turns = turns if notes == "two" else turns[::-1]  # first the one that is not there
            kill_once(Path(name), turns, chance.uniform(0.0, long))
            try:
                notes = reader.load(name)
                found[notes] += 1
                right = torch.equal(reader(ids).logits, wanted[notes])
            except (ValueError, OSError) as error:
                print(error, file=sys.stderr)
                right = False
            broken += not right
            print(f"\rkilled {kill}/{options.kills}, {broken} broken", end="", file=sys.stderr)
    print(file=sys.stderr)
    print(json.dumps({"kills": options.kills, "broken": broken, "found": found}))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
