"""`nestling demo`: the main job, in a few minutes, offline."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from nestling.cli import Parser

__all__ = ["parser", "run"]

NAMES = {"hope": "Hope", "transformer": "Transformer"}
LEARNING = "Hope, learning"
CHUNKS = (64, 256, 1024, 4096)
RATE = 0.2
PASSAGE = 420  # characters of a shaded passage


def parser() -> Parser:
    """The command's arguments."""
    made = Parser(
        "demo",
        description="Train a small Hope and a Transformer of equal size on made-up chronicles,\n"
        "let documents neither has seen stream through both while Hope learns in context, and\n"
        "write a report with plots. Needs no network; under 5 minutes on 2 cores.",
    )
    made.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the demo")
    made.add_argument("--steps", type=int, default=100, help="training steps of each model")
    made.add_argument("--documents", type=int, default=4, help="unseen documents to stream")
    made.add_argument("--characters", type=int, default=3600, help="length of those documents")
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
    folder: Path


def run(arguments: argparse.Namespace) -> int:
    """Train, stream, compare, report."""
    if arguments.steps < 1 or arguments.documents < 1:
        raise ValueError("--steps and --documents must be at least 1")
    if arguments.characters < 600:
        raise ValueError(f"--characters must be at least 600; got {arguments.characters}")
    if arguments.out.exists() and not arguments.out.is_dir():
        raise ValueError(f"--out: {arguments.out} is not a folder")
    from nestling.report.story import tell

    begin = time.perf_counter()
    hope, transformer = (_train(name, arguments) for name in NAMES)
    ids = _unseen(hope.tokenizer, arguments)
    readers = _readers(hope, transformer)
    _say(f"reading {len(ids)} unseen documents of {ids.shape[1]:,} bytes")
    read = {reader.name: reader.losses(ids) for reader in _shown(readers)}
    _say("testing what is left of a document after reading other text")
    kept = {reader.name: _kept(reader, ids) for reader in _shown(readers)}
    _say("writing")
    page = tell(_story(hope, transformer, ids, read, kept, readers[-1]))
    path = page.save(arguments.out / "report.html").resolve()
    minutes, seconds = divmod(round(time.perf_counter() - begin), 60)
    print(f"report: {path}  (took {minutes} min {seconds:02d} s)")
    return 0


def _say(line: str) -> None:
    print(f"== {line}", file=sys.stderr, flush=True)


def _shown(readers: list[Any]) -> Any:
    """The readers one after the other, with a bar in a terminal."""
    if not sys.stderr.isatty():
        return readers
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(readers, description="reading", console=console, transient=True)


def _train(name: str, arguments: argparse.Namespace) -> Arm:
    from nestling.train.recipe import Data, Model, Optim, Recipe, Run
    from nestling.train.trainer import train

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
    folder = arguments.out / name
    outcome = train(recipe, folder)
    if outcome.signal is not None:
        raise KeyboardInterrupt
    seconds = time.perf_counter() - start
    model = outcome.model.eval()
    return Arm(name, model, outcome.encoder.tokenizer, recipe, outcome.best, seconds, folder)


def _unseen(tokenizer: Any, arguments: argparse.Namespace) -> Any:
    """Documents about valleys outside the training and validation text: [documents, tokens]."""
    import torch

    from nestling.train.builtin_text import chronicle

    length = arguments.characters
    texts = [chronicle(10_000 + i, characters=length) for i in range(arguments.documents)]
    read = [tokenizer(t, add_special_tokens=False, verbose=False).input_ids for t in texts]
    return torch.tensor([ids[: min(map(len, read))] for ids in read])


class Memory:
    """Hope as a reader: its memory carries on; with a rate, its continuum memory learns too."""

    def __init__(self, name: str, model: Any, rate: float) -> None:
        from nestling.continuum import Continuum, MemoryLevel, own_slots

        self.name, self.rate = name, rate
        names = [level.name for level in model.config.level_list]
        levels = [
            MemoryLevel(name=level, chunk=chunk, rate=rate)
            for level, chunk in zip(names, CHUNKS, strict=True)
        ]
        self.continuum = Continuum(model, levels, own_slots(model))
        self.updates: list[Any] = []
        self._begun: Any = None

    def read(self, ids: Any, state: Any = None) -> tuple[Any, Any]:
        """Each token's loss [B, T] and the state after them; the given state stays as it is."""
        learn = self.rate > 0
        out = self.continuum(ids, state, learn=learn, keep_logits=False)
        self.updates = list(out.updates)
        return out.losses.detach(), out.state

    def losses(self, ids: Any) -> Any:
        return self.read(ids)[0][:, 1:]

    def rest(self, before: Any, gap: Any, rest: Any) -> float:
        """The loss on `rest` after reading what comes before (the first 32 are not judged)."""
        import torch

        state = self._state(before) if before.shape[1] else None
        losses, _ = self.read(torch.cat([gap, rest], dim=1), state)
        return float(losses[:, gap.shape[1] + 32 :].mean())

    def _state(self, before: Any) -> Any:
        """The state after the beginning, read once for all gaps."""
        if self._begun is None:
            self._begun = self.read(before)[1]
        return self._begun


class Window:
    """The Transformer as a reader: it sees its last tokens."""

    def __init__(self, name: str, model: Any, length: int) -> None:
        self.name, self.model, self.length = name, model, length

    def losses(self, ids: Any) -> Any:
        import torch

        from nestling.evaluate.lm import token_losses

        return torch.stack([token_losses(self.model, row, window=self.length) for row in ids])

    def rest(self, before: Any, gap: Any, rest: Any) -> float:
        """As for a memory; what lies further back than the window cannot matter."""
        import torch

        seen = torch.cat([before, gap], dim=1)[:, -self.length :]
        losses = self.losses(torch.cat([seen, rest], dim=1))
        return float(losses[:, -(rest.shape[1] - 32) :].mean())


def _readers(hope: Arm, transformer: Arm) -> list[Any]:
    length = transformer.recipe.data.length
    return [
        Window(NAMES["transformer"], transformer.model, length),
        Memory(NAMES["hope"], hope.model, 0.0),
        Memory(LEARNING, hope.model, RATE),
    ]


def _by_position(losses: Any) -> list[tuple[float, float]]:
    """(position, mean loss) over the documents, in bins that double in length."""
    edges = [0, 64]
    while edges[-1] < losses.shape[1]:
        edges.append(min(edges[-1] * 2, losses.shape[1]))
    spans = [(a, b) for a, b in itertools.pairwise(edges) if b - a >= 32]
    return [((a + b) / 2, float(losses[:, a:b].mean())) for a, b in spans]


def _kept(reader: Any, ids: Any) -> list[tuple[float, float]]:
    """(bytes of other text, nats saved on the last third by having read the first two).

    Of the first 1,500 bytes of each document; the other text is another document.
    """
    ids = ids[:, :1500]
    cut = ids.shape[1] * 2 // 3
    begin, rest, other = ids[:, :cut], ids[:, cut:], ids.roll(1, 0)
    if len(ids) == 1:
        other = ids.flip(1)
    found = []
    for gap in (0, 128, 512):
        between = other[:, :gap]
        known = reader.rest(begin, between, rest)
        found.append((float(gap), reader.rest(begin[:, :0], between, rest) - known))
    return found


def _sample(arm: Arm) -> str:
    import torch

    ids = arm.tokenizer("This is the chronicle of", return_tensors="pt").input_ids
    torch.manual_seed(0)
    out = arm.model.generate(
        ids, max_new_tokens=240, do_sample=True, temperature=0.5, pad_token_id=256
    )
    return str(arm.tokenizer.decode(out[0], skip_special_tokens=True))


def _story(
    hope: Arm,
    transformer: Arm,
    ids: Any,
    read: dict[str, Any],
    kept: dict[str, list[tuple[float, float]]],
    learning: Memory,
) -> Any:
    import torch

    from nestling.description import Timeline, describe
    from nestling.report.story import Story

    losses, _ = learning.read(ids[:1])
    timeline = Timeline()
    for update in learning.updates:
        norm = float(update.grad_norm[0])
        way = RATE * norm  # of one step of gradient descent
        timeline.record(update._replace(loss=update.loss[0], grad_norm=norm, step=way))
    text = bytes(ids[0].tolist()).decode(errors="replace")
    return Story(
        trained=[_trained(arm) for arm in (hope, transformer)],
        window=transformer.recipe.data.length,
        trained_length=3000,
        documents=len(ids),
        positions={name: _by_position(found) for name, found in read.items()},
        kept=kept,
        passages=_passages(text, losses[0].nan_to_num().tolist()),
        description=describe(hope.model, torch.optim.AdamW(hope.model.parameters())),
        timeline=timeline,
        chunks={level.name: int(level.chunk) for level in learning.continuum.levels},
        rate=RATE,
        samples={NAMES[arm.name]: _sample(arm) for arm in (hope, transformer)},
    )


def _trained(arm: Arm) -> Any:
    from nestling.report.story import Trained

    run = arm.recipe.run
    return Trained(
        name=NAMES[arm.name],
        parameters=sum(p.numel() for p in arm.model.parameters()),
        tokens=run.steps * run.rows * arm.recipe.data.length,
        seconds=arm.seconds,
        best=arm.best,
        curve=_curve(arm.folder / "metrics.jsonl"),
    )


def _curve(path: Path) -> list[tuple[float, float]]:
    """(step, loss) of a run's log; of a step logged twice (a resumed run), the last."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted({row["step"]: row["loss"] for row in rows if "loss" in row}.items())


def _passages(text: str, losses: list[float]) -> list[Any]:
    """The beginning and a later part of a document, word by word with each word's mean loss."""
    from nestling.report.story import Marked

    later = text.find("\n", len(text) * 3 // 4) + 1
    found = []
    for title, start in (("the beginning", 0), (f"after {later:,} bytes", later)):
        words, place = [], start
        for word in text[start : start + PASSAGE].split(" ")[:-1]:
            own = losses[place : place + len(word)] or [0.0]
            words.append((word, sum(own) / len(own)))
            place += len(word) + 1
        found.append(Marked(title, words))
    return found
