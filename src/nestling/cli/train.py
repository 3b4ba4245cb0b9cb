"""`nestling train`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from nestling.cli import Parser

_EXAMPLES = """examples:
  nestling train tiny
  nestling train tiny model.name=transformer run.steps=1000 --out runs/transformer
  nestling train small data.train=book.txt data.valid=other.txt optim.name=m3
  torchrun --nproc-per-node 2 -m nestling.cli train tiny run.strategy=fsdp

Kill it anywhere and start the same command again: it continues bit for bit from its newest
checkpoint. Ctrl-C and SIGTERM save first. `nestling train RECIPE --show` prints every key."""


def parser() -> Parser:
    """The command's arguments."""
    from nestling.train.recipe import RECIPES

    made = Parser(
        "train",
        description="Train a language model from a recipe.\n\nrecipes:\n"
        + "\n".join(f"  {name:<14} {make.__doc__}" for name, make in RECIPES.items()),
        epilog=_EXAMPLES,
    )
    made.add_argument("recipe", help="name of a recipe")
    made.add_argument("changes", nargs="*", metavar="key=value", help="changes to the recipe")
    made.add_argument("--out", type=Path, help="folder of the run (default: runs/RECIPE)")
    made.add_argument("--show", action="store_true", help="print the recipe and stop")
    return made


def run(arguments: argparse.Namespace) -> int:
    """Train; 0 when done, 143 or 130 when a signal asked to stop, 1 when it cannot go on."""
    from nestling.train.recipe import changed, get_recipe

    recipe = changed(get_recipe(arguments.recipe), arguments.changes)
    if arguments.show:
        print("\n".join(recipe.lines()))
        print("# and model.fields.NAME=VALUE, optim.options.NAME=VALUE")
        return 0
    from nestling.train.distributed import join
    from nestling.train.trainer import TrainingFailedError, train

    folder = arguments.out or Path("runs") / arguments.recipe
    with join() as world:
        try:
            outcome = train(recipe, folder, world)
        except TrainingFailedError as error:
            print(f"nestling train: {error}", file=sys.stderr)
            return 1
        if world.main and outcome.signal is None:
            print(f"done: {outcome.step} steps, best validation loss {outcome.best:.4f}, {folder}")
    return 0 if outcome.signal is None else 128 + outcome.signal
