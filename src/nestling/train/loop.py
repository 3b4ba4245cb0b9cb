"""The loop: read, step, evaluate, save; stop anywhere and go on as if nothing had happened."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nestling.description import Timeline
from nestling.host import keep_memory
from nestling.train.progress import Progress
from nestling.train.recipe import Recipe
from nestling.train.session import Session
from nestling.train.tokens import TextEncoder
from nestling.train.world import World, whole

__all__ = ["Outcome", "train"]


class Outcome(NamedTuple):
    """How a run ended: `signal` is set when it was asked to stop."""

    step: int
    loss: float
    best: float
    model: Any
    encoder: TextEncoder
    timeline: Timeline
    signal: int | None


def train(recipe: Recipe, folder: Path, world: World | None = None) -> Outcome:
    """Run a recipe in a folder, from its newest checkpoint if there is one.

    SIGTERM and Ctrl-C save a checkpoint after the running step and end the run; `Outcome.signal`
    tells which. At the end the model lies in `folder/model` in Hugging Face's format.
    """
    world = world or World()
    keep_memory()
    run = recipe.run
    with (
        Progress(run.steps, folder, speak=world.main) as progress,
        _stop_requests() as asked,
    ):
        session = Session(recipe, folder, world, progress)
        session.resume()
        saved = session.memory.step
        while not session.done:
            session.step()
            step = session.memory.step
            last = step >= run.steps
            if step % run.eval_every == 0 or last:
                session.judge()
            if run.sample_every and step % run.sample_every == 0:
                session.sample()
            stop = world.any(bool(asked))
            if (step % run.save_every == 0 or last or stop or session.done) and step != saved:
                session.save()
                saved = step
            if stop:
                progress.say(f"stopped at step {step}; the same command goes on from there")
                break
        finished = session.done
        if finished:
            _export(session, folder / "model")
            if session.timeline.updates and world.main:
                session.timeline.draw(folder / "timeline.svg")
    memory = session.memory
    sign = None if finished else (asked[0] if asked else signal.SIGTERM.value)
    return Outcome(
        memory.step,
        session.loss,
        memory.best,
        session.bare,
        session.encoder,
        session.timeline,
        sign,
    )


def _export(session: Session, folder: Path) -> None:
    tied = session.bare._tied_weights_keys if session.bare.config.tie_word_embeddings else {}
    weights = {k: v for k, v in session.bare.state_dict().items() if k not in tied}
    weights = whole(weights)
    if session.world.main:
        session.bare.save_pretrained(folder, state_dict=weights)
        session.encoder.tokenizer.save_pretrained(folder)
        session.progress.say(f"saved the model in {folder}")
    session.world.barrier()


@contextlib.contextmanager
def _stop_requests() -> Iterator[list[int]]:
    """Signals that ask the run to end, in order of arrival."""
    asked: list[int] = []
    old = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(ValueError):  # not the main thread: no signals here
            old[number] = signal.signal(number, lambda n, frame: asked.append(n))
    try:
        yield asked
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
