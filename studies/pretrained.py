"""The small Hope that comes with the package: trained on public-domain novels, then packed.

    python -m studies pretrained                    train (goes on after a stop), then pack
    python -m studies pretrained run.steps=100      the recipe with changes, as `nestling train`
    python -m studies pretrained --pack             pack what runs/pretrained/model holds

Fifteen novels teach it and three others judge it. Packing rounds the weights to bfloat16, checks
that this costs nothing that matters, that all files together are at most 10 MB, and writes the
model card with the licence. Whoever has the package then has a model that speaks:
`nestling generate nestling:small --prompt "It was"`.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nestling.adaptation import load_pretrained
from nestling.evaluate.lm import token_losses
from nestling.models import NestlingForCausalLM, model_card, presets
from nestling.models.tokenizer import BYTE_VOCABULARY
from nestling.pretrained import HOME
from nestling.train.recipe import Data, Model, Optim, Recipe, Run, changed
from nestling.train.trainer import train
from studies.harness.command import DATA
from studies.tasks.text import HELD_OUT

LARGEST = 10_000_000
"""Bytes of a shipped model, all files together."""
ROUNDING = 0.01
"""Nats per byte that rounding to bfloat16 may cost on the text that judges."""
JUDGED = 1 << 16
"""Bytes of the first held-out novel that both are compared on."""

SIZE = presets.Size(width=128, layers=4, heads=4, vocabulary=BYTE_VOCABULARY, parameters=1_000_000)


def recipe(data: Path) -> Recipe:
    """The default Hope, 1M parameters, ten bytes of novels for each."""
    books = sorted((data / "gutenberg_books").glob("*.txt.gz"))
    if not books:
        raise FileNotFoundError(f"{data / 'gutenberg_books'}: no books there; see --data")
    held = [path for path in books if path.name.split(".")[0] in HELD_OUT]
    size = presets.configure(SIZE, "hope")
    shape = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    return Recipe(
        model=Model(preset="tiny", fields={name: getattr(size, name) for name in shape}),
        data=Data(
            train=tuple(str(path) for path in books if path not in held),
            valid=tuple(map(str, held)),
            length=2048,
        ),
        optim=Optim(lr=5e-3, warmup=50),
        run=Run(steps=2500, rows=2, eval_every=250, eval_windows=8, save_every=100),
    )


def pack(folder: Path, into: Path, training: str, judge: torch.Tensor) -> Path:
    """Write the model of `folder` as bfloat16 with its card into `into`, which it replaces.

    judge: [T] tokens of a text it was not trained on.
    """
    model, tokenizer = load_pretrained(folder)
    rounded = NestlingForCausalLM(model.config).eval()
    rounded.load_state_dict(
        {name: value.bfloat16().float() for name, value in model.state_dict().items()}
    )
    before, after = (float(token_losses(each, judge).mean()) for each in (model, rounded))
    if after - before > ROUNDING:
        raise ValueError(
            f"bfloat16 costs {after - before:.4f} nats per byte, more than {ROUNDING}: not packed"
        )
    into.parent.mkdir(parents=True, exist_ok=True)
    temporary = into.with_name(f".{into.name}.new")
    shutil.rmtree(temporary, ignore_errors=True)
    rounded.bfloat16().save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    _without_code(temporary)
    said = f"{training} Loss on a novel it has not read: {after:.3f} nats per byte."
    card = model_card(rounded.config, training=said, licence="apache-2.0")
    (temporary / "README.md").write_text(card, encoding="utf-8")
    size = sum(path.stat().st_size for path in temporary.iterdir())
    if size > LARGEST:
        shutil.rmtree(temporary)
        raise ValueError(f"the model takes {size:,} bytes, more than {LARGEST:,}: not packed")
    if into.exists():
        shutil.rmtree(into)
    temporary.rename(into)
    return into


def _without_code(folder: Path) -> None:
    """The package is there: no file that imports it, and no mention of one."""
    for path in folder.glob("*.py"):
        path.unlink()
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    config.pop("auto_map", None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def story(made: Recipe, steps: int) -> str:
    """How it was trained, without the paths of whoever did it."""
    titles = ", ".join(Path(path).name.split(".")[0].replace("_", " ") for path in made.data.train)
    tokens = steps * made.run.rows * made.data.length
    return (
        f"{tokens:,} bytes in {steps:,} steps by `python -m studies pretrained`, seed"
        f" {made.run.seed}, from novels of Project Gutenberg that are in the public domain in the"
        f" USA: {titles}."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and pack; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m studies pretrained",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("changes", nargs="*", metavar="key=value", help="changes to the recipe")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the data sets")
    parser.add_argument("--runs", type=Path, default=Path("runs/pretrained"))
    parser.add_argument("--out", type=Path, default=HOME, help="where the folder `small` goes")
    parser.add_argument("--pack", action="store_true", help="train nothing, pack what is there")
    parser.add_argument("--quick", action="store_true", help="two steps of a very small model")
    given = parser.parse_args(arguments)
    made = recipe(given.data)
    if given.quick:
        tiny = {**made.model.fields, "hidden_size": 24, "num_hidden_layers": 1}
        made = dataclasses.replace(
            made,
            model=dataclasses.replace(made.model, fields={**tiny, "intermediate_size": 24}),
            data=dataclasses.replace(
                made.data, train=made.data.train[:1], valid=made.data.valid[:1]
            ),
            run=Run(steps=2, rows=2, eval_every=2, eval_windows=1, save_every=2),
        )
    made = changed(made, given.changes)
    steps = made.run.steps
    if not given.pack:
        outcome = train(made, given.runs)
        if outcome.signal is not None:
            return 128 + outcome.signal
        steps = outcome.step
    bytes_ = _first_bytes(Path(made.data.valid[0]), 4096 if given.quick else JUDGED)
    packed = pack(given.runs / "model", given.out / "small", story(made, steps), bytes_)
    print(f"packed: {packed}")
    return 0


def _first_bytes(path: Path, count: int) -> torch.Tensor:
    with gzip.open(path) as file:
        return torch.frombuffer(bytearray(file.read(count)), dtype=torch.uint8).long()
