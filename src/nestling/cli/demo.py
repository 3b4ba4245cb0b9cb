"""`nestling demo`: the main job, in a few minutes, offline."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["parser", "run"]

NAMES = {"hope": "Hope", "transformer": "Transformer"}


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    made = argparse.ArgumentParser(
        prog="nestling demo",
        description="Train a small Hope and a Transformer of equal size on made-up chronicles,\n"
        "let documents neither has seen stream through both, and write a report with plots.\n"
        "Needs no network; under 5 minutes on 2 cores.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the demo")
    made.add_argument("--steps", type=int, default=120, help="training steps of each model")
    made.add_argument("--documents", type=int, default=4, help="unseen documents to stream")
    made.add_argument("--seed", type=int, default=0)
    return made


class Arm(NamedTuple):
    """One trained model and what it cost."""

    name: str
    model: Any
    tokenizer: Any
    recipe: Any
    best: float
    seconds: float

    @property
    def window(self) -> int | None:
        """Attention sees what it was trained to see; a memory reads on."""
        return self.recipe.data.length if self.name == "transformer" else None


def run(arguments: argparse.Namespace) -> int:
    """Train, stream, compare, report."""
    if arguments.steps < 1 or arguments.documents < 1:
        raise ValueError("--steps and --documents must be at least 1")
    arms = [_train(name, arguments) for name in NAMES]
    documents = _unseen(arms[0].tokenizer, arguments.documents)
    _say("streaming unseen documents through both")
    positions = {arm.name: _by_position(arm, documents) for arm in arms}
    _say("testing what is left of a document after reading other text")
    forgetting = _forgetting(arms[0], documents)
    samples = {arm.name: _sample(arm) for arm in arms}
    page = _report(arms, positions, forgetting, samples)
    print(f"report: {page.save(arguments.out / 'report.html').resolve()}")
    return 0


def _say(line: str) -> None:
    print(f"== {line}", file=sys.stderr, flush=True)


def _train(name: str, arguments: argparse.Namespace) -> Arm:
    from nestling.train.loop import train
    from nestling.train.recipe import Data, Model, Optim, Recipe, Run

    recipe = Recipe(
        model=Model(preset="tiny", mixer=name, fields={"num_hidden_layers": 3}),
        data=Data(order="sequential", length=256, carry=name == "hope"),
        optim=Optim(lr=4e-3, warmup=20),
        run=Run(
            steps=arguments.steps,
            rows=16,
            seed=arguments.seed,
            eval_every=max(1, arguments.steps // 2),
            save_every=max(1, arguments.steps // 2),
        ),
    )
    _say(f"training {NAMES[name]}")
    start = time.perf_counter()
    outcome = train(recipe, arguments.out / name)
    if outcome.signal is not None:
        raise KeyboardInterrupt
    seconds = time.perf_counter() - start
    model = outcome.model.eval()
    return Arm(name, model, outcome.encoder.tokenizer, recipe, outcome.best, seconds)


def _unseen(tokenizer: Any, count: int) -> list[list[int]]:
    """Documents about valleys outside the training and validation text, as long as those."""
    from nestling.train.chronicle import chronicle

    texts = [chronicle(10_000 + i, characters=2400) for i in range(count)]
    return [tokenizer(text, add_special_tokens=False, verbose=False).input_ids for text in texts]


def _by_position(arm: Arm, documents: list[list[int]]) -> list[tuple[float, float]]:
    """(position, mean loss) over the documents, in bins that double in length."""
    import torch

    from nestling.evaluate.lm import token_losses

    length = min(len(ids) for ids in documents)
    losses = torch.stack(
        [token_losses(arm.model, d[:length], window=arm.window) for d in documents]
    )
    edges = [0, 64]
    while edges[-1] < length - 1:
        edges.append(min(edges[-1] * 2, length - 1))
    spans = itertools.pairwise(edges)
    return [((a + b) / 2, float(losses[:, a:b].mean())) for a, b in spans if b > a]


def _forgetting(arm: Arm, documents: list[list[int]]) -> list[tuple[int, float, float]]:
    """(tokens of other text, loss on the rest of a document, the same without having read it)."""
    import statistics

    found = []
    for gap in (0, 128, 256, 512):
        known, new = [], []
        for i, ids in enumerate(documents):
            cut = len(ids) * 2 // 3
            other = (documents[(i + 1) % len(documents)] * 2)[:gap]
            known.append(_rest_loss(arm, ids[:cut] + other, ids[cut:]))
            new.append(_rest_loss(arm, other, ids[cut:]))
        found.append((gap, statistics.fmean(known), statistics.fmean(new)))
    return found


def _rest_loss(arm: Arm, before: list[int], rest: list[int]) -> float:
    """The loss on `rest` after reading `before` (the first 32 tokens are not judged)."""
    from nestling.evaluate.lm import token_losses

    losses = token_losses(arm.model, [*before, *rest], window=arm.window)
    return float(losses[-(len(rest) - 32) :].mean())


def _sample(arm: Arm) -> str:
    import torch

    ids = arm.tokenizer("This is the chronicle of", return_tensors="pt").input_ids
    torch.manual_seed(0)
    out = arm.model.generate(
        ids, max_new_tokens=240, do_sample=True, temperature=0.5, pad_token_id=256
    )
    return str(arm.tokenizer.decode(out[0], skip_special_tokens=True))


def _report(
    arms: list[Arm],
    positions: dict[str, list[tuple[float, float]]],
    forgetting: list[tuple[int, float, float]],
    samples: dict[str, str],
) -> Any:
    from nestling.report import Line, Page, lines

    page = Page(
        "A model that learns while it reads",
        "Hope and a Transformer of equal size were trained on the same invented chronicles. Here is"
        " what each does with documents it has never seen.",
    )
    _costs(page, arms)
    page.heading("The longer it reads, the better it knows the valley")
    page.text(
        "Every document is about a new valley with invented names and facts. What cannot be known"
        " in advance must be learned while reading. The Transformer sees its last"
        f" {arms[1].recipe.data.length} tokens, the length it was trained on; Hope's memory carries"
        " on from the first token, in constant space."
    )
    drawn = [Line(NAMES[n], [x for x, _ in p], [y for _, y in p]) for n, p in positions.items()]
    page.figure(
        lines(drawn, x="position in the document (bytes)", y="loss (nats per byte)", log_x=True),
        "Loss against position, mean over the unseen documents. Lower is better.",
    )
    page.heading("How much is left after reading something else")
    page.text(
        "Hope reads two thirds of a document, then other text, then the rest of the first document."
        " The other line is the same without the first two thirds: the space between the lines"
        " is what the memory kept."
    )
    gaps = [gap for gap, _, _ in forgetting]
    page.figure(
        lines(
            [
                Line("has read it", gaps, [k for _, k, _ in forgetting]),
                Line("has not", gaps, [n for _, _, n in forgetting]),
            ],
            x="bytes of other text in between",
            y="loss on the rest",
        ),
        "Forgetting: loss on the last third of a document after a detour.",
    )
    page.heading("What they write")
    for name, text in samples.items():
        page.text(f"{NAMES[name]}:")
        page.code(text)
    page.footer("Made by `nestling demo`. One seed, small models: a demonstration, not a result.")
    return page


def _costs(page: Any, arms: list[Arm]) -> None:
    rows = []
    for arm in arms:
        tokens = arm.recipe.run.steps * arm.recipe.run.rows * arm.recipe.data.length
        rows.append(
            (
                NAMES[arm.name],
                f"{sum(p.numel() for p in arm.model.parameters()):,}",
                f"{tokens:,}",
                f"{arm.seconds:.0f} s",
                f"{arm.best:.3f}",
            )
        )
    page.heading("Two models, one diet")
    page.table(["", "parameters", "tokens read", "training time", "validation loss"], rows)
