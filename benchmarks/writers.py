"""Two processes that save one memory at the same time: whatever happens, one of the two is there.

    python benchmarks/writers.py                # 1,000 rounds
    python benchmarks/writers.py --rounds 100

In every round two processes save their own memory into the same folder at once, while a third one
reads it. After the round the folder must hold one of the two, complete, and no other file; the
reader must have seen a complete memory every time. Prints how many rounds lost something (0).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import nestling
from nestling.adaptation import Learner


def learner(seed: int) -> Learner:
    """A learner over a model of a few thousand weights, who has read a text of its own."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 16}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes)).eval()
    made = nestling.adapt(model, [8], rate=0.1)
    made.learn(torch.randint(3, 16, (40,), generator=torch.Generator().manual_seed(seed)))
    return made


def _save(who: int, folder: Path, rounds: int, gate: Any) -> None:
    """One of the two writers."""
    torch.set_num_threads(1)
    mine = learner(who)
    for number in range(rounds):
        gate.wait()
        mine.save(folder, notes=[who, number])
        gate.wait()


def lost(rounds: int, folder: Path) -> list[str]:
    """The rounds that lost something, each with what."""
    processes = multiprocessing.get_context("fork")
    gate = processes.Barrier(3, timeout=600)
    writers = [
        processes.Process(target=_save, args=(who, folder, rounds, gate), daemon=True)
        for who in range(2)
    ]
    for writer in writers:
        writer.start()
    both, reader = [learner(who) for who in range(2)], learner(9)
    ids = torch.arange(16)[None]
    wanted, wrong = [one(ids).logits for one in both], []
    for number in range(rounds):
        gate.wait()
        try:
            if number:
                reader.load(folder)  # while they write
            gate.wait()
            who, said = reader.load(folder)
            left = sorted(path.name for path in folder.iterdir())
            if said != number or not torch.equal(reader(ids).logits, wanted[who]):
                wrong.append(f"round {number}: the memory of round {said} by {who}, or a mixture")
            if len(left) != 2:
                wrong.append(f"round {number}: {left}")
        except (ValueError, OSError) as error:
            wrong.append(f"round {number}: {error}")
            break
    for writer in writers:
        if wrong:
            writer.terminate()
        writer.join()
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        wrong = lost(given.rounds, Path(name) / "memory")
    print(f"two writers, {given.rounds} rounds: {len(wrong)} losses", *wrong[:5], sep="\n  ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
