"""Run by test_worlds.py under torchrun: two processes learn what one learns, and may change places.

worlds.py OUT: for DDP and FSDP2, AdamW and M3, a run goes from two processes to one and back
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file

from nestling.train.distributed import World, join
from nestling.train.recipe import changed, get_recipe
from nestling.train.trainer import train

SMALL = [
    "model.fields.hidden_size=32",
    "model.fields.num_hidden_layers=1",
    "model.fields.num_attention_heads=2",
    "model.fields.intermediate_size=32",
    "data.train=builtin:6",
    "data.valid=builtin:6-7",
    "data.length=32",
    "run.rows=4",
    "run.micro=1",
    "run.eval_every=4",
    "run.eval_windows=4",
    "run.save_every=1",
    "optim.lr=0.002",  # sums in another order differ; higher rates of M3 enlarge that
    "optim.shape=constant",  # the rate must not depend on the length of a leg
    "optim.warmup=0",
]


def leg(out: Path, world: World, steps: int, *changes: str) -> None:
    cache = f"data.cache={out.parent / 'cache'}"
    recipe = changed(get_recipe("stream"), [*SMALL, cache, *changes, f"run.steps={steps}"])
    train(recipe, out, world)


def main(out: Path) -> None:
    """Write, for each pair, how far the weights are from those of one process."""
    warnings.simplefilter("ignore")  # FSDP2's own
    found = {}
    with join() as world:
        for optimizer in ("adamw", "m3"):
            name = f"optim.name={optimizer}"
            alone = out / f"{optimizer}-alone"
            if world.main:
                leg(alone, World(), 8, name)
            world.barrier()
            for strategy in ("ddp", "fsdp"):
                way = [name, f"run.strategy={strategy}"]
                folder = out / f"{optimizer}-{strategy}"
                leg(folder, world, 3, *way)
                if world.main:
                    leg(folder, World(), 5, *way)
                world.barrier()
                leg(folder, world, 8, *way)
                if world.main:
                    a, b = (load_file(p / "model" / "model.safetensors") for p in (alone, folder))
                    far = max(float((a[k] - b[k]).abs().max()) for k in a.keys() | b.keys())
                    found[f"{optimizer} {strategy}"] = far
        if world.main:
            (out / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
