"""How many files, and how deep, a token goes through: one Hope layer, one update of `adapt`.

    python benchmarks/trace.py            # both, with the files
    python benchmarks/trace.py --quiet    # the two counts

Counted by `sys.setprofile`: files of the package in which a function is called, and the deepest
nesting of such calls (those of torch and of the standard library between them do not count).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

import nestling
from nestling.adaptation import Limits
from nestling.models import NestlingForCausalLM, presets

PACKAGE = str(Path(nestling.__file__).parent)
LIMITS = {"layer": (10, 12), "update": (9, None)}
"""The most files, and the greatest depth, that each way may have."""


class Way(NamedTuple):
    """The files a call went through, and how deep."""

    files: tuple[str, ...]
    depth: int


def trace(call: Callable[[], Any]) -> Way:
    """Run `call` and report the package's files and the depth of calls in them."""
    files: set[str] = set()
    stack: list[bool] = []
    deepest = 0

    def watch(frame: FrameType, event: str, _: Any) -> None:
        nonlocal deepest
        if event == "call":
            name = frame.f_code.co_filename
            stack.append(name.startswith(PACKAGE))
            if stack[-1]:
                files.add(name[len(PACKAGE) + 1 :])
                deepest = max(deepest, sum(stack))
        elif event == "return" and stack:
            stack.pop()

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Way(tuple(sorted(files)), deepest)


def layer() -> Way:
    """One Hope layer, 128 tokens, forward."""
    torch.manual_seed(0)
    model = NestlingForCausalLM(presets.tiny(model="hope"))
    block = model.model.layers[0]
    x = torch.randn(1, 128, model.config.hidden_size)
    block(x)  # what runs only once is no part of the way
    return trace(lambda: block(x))


def update() -> Way:
    """One chunk of 16 tokens through `adapt(...).learn`, on a small Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 64}
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=2, **sizes)
    limits = Limits(forget=math.inf)  # (what is asked of old text after an update is no part of it)
    learner = nestling.adapt(LlamaForCausalLM(config).eval(), (16, 64), limits=limits)
    ids = torch.arange(32).view(1, 32) % 64
    learner.learn(ids)
    return trace(lambda: learner.learn(ids[:, :16]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quiet", action="store_true", help="only the counts")
    quiet = parser.parse_args().quiet
    good = True
    for name, run in (("layer", layer), ("update", update)):
        way, (files, depth) = run(), LIMITS[name]
        within = len(way.files) <= files and (depth is None or way.depth <= depth)
        good &= within
        limits = f"at most {files} files" + (f", depth {depth}" if depth else "")
        verdict = "within" if within else "beyond"
        print(f"{name}: {len(way.files)} files, depth {way.depth} ({verdict} {limits})")
        if not quiet:
            print("".join(f"  {file}\n" for file in way.files), end="")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
