"""`nestling demo`: the main job, in a few minutes, offline."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from nestling.cli import Parser
from nestling.cli.options import whole

NAMES = {"hope": "Hope", "hope_attention": "Transformer"}
PASSAGE = 420  # characters of a shaded passage


def parser() -> Parser:
    """The command's arguments."""
    made = Parser(
        "demo",
        description="Train a small Hope whose levels learn while it reads, and a Transformer of\n"
        "equal size with learning levels, on made-up chronicles. Then documents neither has seen\n"
        "stream through them: all levels learning, only the fastest, none. Writes a report with\n"
        "plots. Needs no network; a few minutes on 2 cores.",
    )
    made.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the demo")
    made.add_argument("--steps", type=whole(), default=120, help="training steps of each model")
    made.add_argument("--documents", type=whole(), default=4, help="unseen documents to stream")
    made.add_argument(
        "--characters", type=whole(600), default=6000, help="length of those documents"
    )
    made.add_argument("--seed", type=int, default=0, help="of all random choices (0)")
    return made


class Arm(NamedTuple):
    """One trained model, and what the report says of it."""

    model: Any
    tokenizer: Any
    trained: Any  # nestling.report.demo.Trained


def run(arguments: argparse.Namespace) -> int:
    """Train, stream, compare, report."""
    if arguments.out.exists() and not arguments.out.is_dir():
        raise ValueError(f"--out: {arguments.out} is not a folder")
    importlib.import_module("matplotlib")  # of the report: missed now, not after the training
    from nestling.report.demo import demo_page

    begin = time.perf_counter()
    hope, transformer = (_train(name, arguments) for name in NAMES)
    ids = _unseen(hope.tokenizer, arguments)
    readers = _readers(hope, transformer)
    _say(f"reading {len(ids)} unseen documents of {ids.shape[1]:,} bytes, once more after others")
    read, kept = {}, {}
    for reader in readers:
        _say(f"  {reader.name}")
        read[reader.name], kept[reader.name] = reader.read(ids), _kept(reader, ids)
    _say("writing")
    results = _collect(hope, transformer, ids, read, kept)
    for line in results.result:
        print(line)
    path = demo_page(results).save(arguments.out / "report.html").resolve()
    minutes, seconds = divmod(round(time.perf_counter() - begin), 60)
    print(f"report: {path}  (took {minutes} min {seconds:02d} s)")
    return 0


def _say(line: str) -> None:
    print(f"== {line}", file=sys.stderr, flush=True)


def _train(name: str, arguments: argparse.Namespace) -> Arm:
    """The recipe of this name, whose levels learn, with three layers."""
    from nestling.report.demo import Trained
    from nestling.train.recipe import Optim, get_recipe
    from nestling.train.trainer import train

    usual = get_recipe(name)
    recipe = dataclasses.replace(
        usual,
        model=dataclasses.replace(
            usual.model, fields={**usual.model.fields, "num_hidden_layers": 3}
        ),
        optim=Optim(lr=4e-3, warmup=20),
        run=dataclasses.replace(
            usual.run,
            steps=arguments.steps,
            seed=arguments.seed,
            eval_every=arguments.steps,
            save_every=arguments.steps,
            eval_windows=8,
        ),
    )
    _say(f"training {NAMES[name]}")
    start = time.perf_counter()
    folder = arguments.out / name
    outcome = train(recipe, folder)
    if outcome.signal is not None:
        raise KeyboardInterrupt
    model = outcome.model.eval()
    trained = Trained(
        name=NAMES[name],
        parameters=sum(p.numel() for p in model.parameters()),
        tokens=recipe.run.steps * recipe.run.rows * recipe.data.length,
        seconds=time.perf_counter() - start,
        best=outcome.best,
        curve=_curve(folder / "metrics.jsonl"),
    )
    return Arm(model, outcome.encoder.tokenizer, trained)


def _unseen(tokenizer: Any, arguments: argparse.Namespace) -> Any:
    """Documents about valleys outside the training and validation text: [documents, tokens]."""
    import torch

    from nestling.train.builtin_text import chronicle

    length = arguments.characters
    texts = [chronicle(10_000 + i, characters=length) for i in range(arguments.documents)]
    read = [tokenizer(t, add_special_tokens=False, verbose=False).input_ids for t in texts]
    return torch.tensor([ids[: min(map(len, read))] for ids in read])


class Reader(NamedTuple):
    """A model that reads; `learn` says which of its levels learn while it does."""

    name: str
    model: Any
    learn: bool | tuple[str, ...]

    def read(self, ids: Any, cache: Any = None) -> Any:
        """Each token's loss given all before it, [B, T - 1]; a cache goes on."""
        import torch

        from nestling.losses import pair_losses

        with torch.no_grad():
            out = self.model(
                ids, past_key_values=cache, use_cache=cache is not None, learn=self.learn
            )
        return pair_losses(out.logits[:, :-1], ids[:, 1:])

    def begun(self, ids: Any) -> Any:
        """The memory after some text."""
        cache = self.model.make_cache()
        if ids.shape[1]:
            self.read(ids, cache)
        return cache

    def rest(self, cache: Any, gap: Any, rest: Any) -> float:
        """The loss on `rest` after reading other text (the first 32 bytes are not judged)."""
        import torch

        losses = self.read(torch.cat([gap, rest], dim=1), cache.copy())
        return float(losses[:, gap.shape[1] + 32 :].mean())


def _names(model: Any) -> list[str]:
    return [level.name for level in model.config.memory_levels if level.active]


def _readers(hope: Arm, transformer: Arm) -> list[Reader]:
    fastest = _names(hope.model)[:1]
    return [
        Reader("Hope, all levels learn", hope.model, True),
        Reader("Hope, only the fastest level", hope.model, tuple(fastest)),
        Reader("Hope, frozen", hope.model, False),
        Reader("Transformer, learning", transformer.model, True),
    ]


def _by_position(losses: Any) -> list[tuple[float, float]]:
    """(position, mean loss) over the documents, in bins that double in length."""
    edges = [0, 64]
    while edges[-1] < losses.shape[1]:
        edges.append(min(edges[-1] * 2, losses.shape[1]))
    spans = [(a, b) for a, b in itertools.pairwise(edges) if b - a >= 32]
    return [((a + b) / 2, float(losses[:, a:b].mean())) for a, b in spans]


def _kept(reader: Reader, ids: Any) -> list[tuple[float, float]]:
    """(bytes of other text, nats saved on the last third by having read the first two).

    Of the first 2,400 bytes of each document; the other text is another document.
    """
    ids = ids[:, :2400]
    cut = ids.shape[1] * 2 // 3
    rest, other = ids[:, cut:], ids.roll(1, 0) if len(ids) > 1 else ids.flip(1)
    known, new = reader.begun(ids[:, :cut]), reader.begun(ids[:, :0])
    found = []
    for gap in (0, 256, 1024):
        between = other[:, :gap]
        saved = reader.rest(new, between, rest) - reader.rest(known, between, rest)
        found.append((float(gap), saved))
    return found


def _sample(arm: Arm) -> str:
    import torch

    ids = arm.tokenizer("This is the chronicle of", return_tensors="pt").input_ids
    torch.manual_seed(0)
    out = arm.model.generate(
        ids, max_new_tokens=240, do_sample=True, temperature=0.5, pad_token_id=256
    )
    return str(arm.tokenizer.decode(out[0], skip_special_tokens=True))


def _worth(model: Any, ids: Any, all_learn: Any) -> dict[str, float]:
    """The worth of each level: the loss without its learning, less the loss with all."""
    names = _names(model)
    found = {}
    for name in names:
        some = tuple(each for each in names if each != name)
        found[name] = float((Reader("", model, some or False).read(ids) - all_learn).mean())
    return found


def _result(read: dict[str, Any], counts: dict[str, int], kept: dict[str, Any]) -> list[str]:
    """The outcome in three lines."""
    half = {name: float(found[:, found.shape[1] // 2 :].mean()) for name, found in read.items()}
    first, (best, *others) = next(iter(half)), sorted(half, key=half.__getitem__)
    gaps = "; ".join(f"{name} {half[name]:.3f}" for name in others)
    changes = ", ".join(f"{name} {count}" for name, count in counts.items())
    left = "; ".join(f"{name} {points[-1][1]:+z.3f}" for name, points in kept.items())
    return [
        f"Best at the second half of unseen documents: {best}, with a loss of {half[best]:.3f} nats"
        f" per byte. {gaps}.",
        f"Updates of each level while it read one document: {changes}.",
        f"Nats per byte a document is still worth after {kept[first][-1][0]:,.0f} bytes of another:"
        f" {left}.",
    ]


def _collect(
    hope: Arm,
    transformer: Arm,
    ids: Any,
    read: dict[str, Any],
    kept: dict[str, list[tuple[float, float]]],
) -> Any:
    import torch

    from nestling.description import Timeline, describe
    from nestling.report.demo import DemoResults

    with torch.no_grad():
        updates = hope.model(ids[:1], use_cache=False, measure=True).updates or ()
    timeline, far = Timeline(), {name: [(0.0, 0.0)] for name in _names(hope.model)}
    for update in updates:
        norm, way = float(update.grad_norm[0]), float(update.step[0])
        timeline.record(
            update._replace(
                loss=update.loss[0], grad_norm=norm, step=way, distance=float(update.distance[0])
            )
        )
        points = far[update.level]
        points += [(update.position, points[-1][1]), (update.position, float(update.distance[0]))]
    for points in far.values():
        points.append((ids.shape[1], points[-1][1]))
    counts = {name: sum(u.level == name for u in updates) for name in far}
    first = next(iter(read.values()))
    text = bytes(ids[0].tolist()).decode(errors="replace")
    return DemoResults(
        result=_result(read, counts, kept),
        trained=[hope.trained, transformer.trained],
        documents=len(ids),
        positions={name: _by_position(found) for name, found in read.items()},
        kept=kept,
        passages=_passages(text, [0.0, *first[0].tolist()]),
        description=describe(hope.model, torch.optim.AdamW(hope.model.parameters())),
        timeline=timeline,
        levels={level.name: level for level in hope.model.config.memory_levels if level.active},
        distances=far,
        worth=_worth(hope.model, ids, first),
        samples={arm.trained.name: _sample(arm) for arm in (hope, transformer)},
    )


def _curve(path: Path) -> list[tuple[float, float]]:
    """(step, loss) of a run's log; of a step logged twice (a resumed run), the last."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted({row["step"]: row["loss"] for row in rows if "loss" in row}.items())


def _passages(text: str, losses: list[float]) -> dict[str, list[tuple[str, float]]]:
    """The beginning and a later part of a document, word by word with each word's mean loss."""
    later = text.find("\n", len(text) * 3 // 4) + 1
    found = {}
    for title, start in (("the beginning", 0), (f"after {later:,} bytes", later)):
        words, place = [], start
        for word in text[start : start + PASSAGE].split(" ")[:-1]:
            own = losses[place : place + len(word)] or [0.0]
            words.append((word, sum(own) / len(own)))
            place += len(word) + 1
        found[title] = words
    return found
