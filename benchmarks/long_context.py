"""Memory and speed of long-context samples: made piece by piece, and read by a small Hope.

    python benchmarks/long_context.py                        10M tokens of each generator, made
    python benchmarks/long_context.py --read --length 1M     also read by a Hope of 1M parameters
    python benchmarks/long_context.py --data DATA            real books and stories

Prints for each the tokens (bytes), the seconds, and the process's largest resident size (RSS) so
far. The target: making ten million tokens adds less than 100 MB (the largest book).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from common import peak_mb

from nestling.evaluate import babilong, ruler
from nestling.evaluate.samples import PLAIN_WORDS, Books, Sample, parse_lengths
from nestling.evaluate.suites import Sources, answer, samples
from nestling.models import NestlingForCausalLM, byte_tokenizer, presets
from nestling.train.builtin_text import chronicles

STORY = babilong.Story(("Mary went to the office.",), "Where is Mary?", "office")
TASKS = [
    *(("ruler", task) for task in ruler.TASKS),
    ("babilong", "qa1"),
    ("longhealth", "longhealth"),
]


def draw(suite: str, task: str, length: int, data: Sources) -> Sample:
    if suite == "babilong" and data.babi is None:
        assert data.books is not None
        return babilong.sample(task, length, 0, story=STORY, books=data.books)
    return next(samples(suite, task, length, data=data, count=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", default="10M")
    parser.add_argument("--data", type=Path, help="folder as of `nestling eval --data`")
    parser.add_argument("--tasks", help="names separated by commas (default: all)")
    parser.add_argument("--read", action="store_true", help="let a small Hope read the samples")
    arguments = parser.parse_args()
    (length,) = parse_lengths(arguments.length)
    text = " ".join(chronicles(50))
    data = Sources(words=PLAIN_WORDS, books=Books((lambda: text,)))
    if arguments.data:
        data = Sources.load(arguments.data)
    torch.manual_seed(0)
    model = NestlingForCausalLM(presets.tiny()).eval()
    tokenizer = byte_tokenizer()
    before = peak_mb()
    print(f"{'task':<22}{'tokens':>12}{'made in':>10}{'RSS MB':>9}   (before: {before:.0f} MB)")
    for suite, task in TASKS:
        if arguments.tasks and task not in arguments.tasks.split(","):
            continue
        start = time.perf_counter()
        sample = draw(suite, task, length, data)
        size = sum(len(piece.encode()) for piece in sample.stream())
        seconds = time.perf_counter() - start
        line = f"{suite + ' ' + task:<22}{size:>12,}{seconds:>8.1f} s{peak_mb():>9.0f}"
        if arguments.read:
            start = time.perf_counter()
            answer(model, [sample], tokenizer, tokens=4)
            seconds = time.perf_counter() - start
            speed = f"read in {seconds:.0f} s, {size / seconds:,.0f} tokens/s"
            line += f"   {speed}, RSS {peak_mb():.0f} MB"
        print(line, flush=True)
    if not arguments.read:
        print(f"added: {peak_mb() - before:.0f} MB (target below 100)")


if __name__ == "__main__":
    main()
