"""A run: the loop over its steps, its checkpoints, and going on after any stop."""

from __future__ import annotations

import contextlib
import math
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from nestling.continuum.stream import begin
from nestling.description import Timeline
from nestling.files import BrokenFileError, check_finite, check_state, expect, locked
from nestling.levels import LevelUpdate
from nestling.machine import bf16_speed, keep_memory
from nestling.models.cache import Learned
from nestling.models.card import model_card
from nestling.models.learning import engine_of
from nestling.shards import full, local
from nestling.train.batches import Batch
from nestling.train.checkpoint import Checkpoint, load_latest, restore_, save_checkpoint, sweep
from nestling.train.distributed import World, gathered
from nestling.train.judging import effects, level_measures, validation_loss
from nestling.train.optimizers import build, by_level
from nestling.train.parts import check, load_data, make_batches, make_model
from nestling.train.progress import Progress
from nestling.train.recipe import RENAMED, Recipe
from nestling.train.step import (
    BackwardResult,
    FreshRows,
    gradients,
    level_norms,
)
from nestling.train.tokenizer import TextEncoder
from nestling.tree import named_tuples, state_select, state_stack, state_to, tree_leaves


class TrainingFailedError(RuntimeError):
    """The run cannot go on; the message says why and where the last good checkpoint is."""


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
    tells which. At the end the model lies in `folder/model` in Hugging Face's format. The folder is
    locked while the run lasts; a second run in it is refused with the name of the first.
    """
    world = world or World()
    check(recipe)
    keep_memory()
    run = recipe.run
    with (
        locked(folder) if world.main else contextlib.nullcontext(),
        Progress(run.steps, folder, speak=world.main) as progress,
        _stop_requests() as asked,
    ):
        trainer = Trainer(recipe, folder, world, progress)
        trainer.resume()
        saved = trainer.state.step
        while not trainer.done:
            trainer.step()
            step = trainer.state.step
            last = step >= run.steps
            if step % run.eval_every == 0 or last:
                trainer.judge()
            if run.sample_every and step % run.sample_every == 0:
                trainer.sample()
            stop = world.any(bool(asked))
            due = step % run.save_every == 0 or last or stop or trainer.done
            if due and step != saved and trainer.save():
                saved = step
            if stop:
                progress.say(f"stopped at step {step}; the same command goes on from there")
                break
        finished = trainer.done
        if finished:
            _export(trainer, folder / "model")
            if trainer.timeline.updates and world.main:
                trainer.timeline.draw(folder / "timeline.svg")
    state = trainer.state
    sign = None if finished else (asked[0] if asked else signal.SIGTERM.value)
    return Outcome(
        state.step,
        trainer.loss,
        state.best,
        trainer.bare,
        trainer.encoder,
        trainer.timeline,
        sign,
    )


def _export(trainer: Trainer, folder: Path) -> None:
    tied = trainer.bare._tied_weights_keys if trainer.bare.config.tie_word_embeddings else {}
    weights = {k: v for k, v in trainer.bare.state_dict().items() if k not in tied}
    weights = gathered(weights)
    if trainer.world.main:
        with _without_bars():
            trainer.bare.save_pretrained(folder, state_dict=weights)
        trainer.encoder.tokenizer.save_pretrained(folder)
        said = model_card(trainer.bare.config, training=_how_trained(trainer))
        (folder / "README.md").write_text(said, encoding="utf-8")
        trainer.progress.say(f"saved the model in {folder}")
    trainer.world.barrier()


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """No progress bars of transformers between the lines of ours."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _how_trained(trainer: Trainer) -> str:
    """How a model was trained, for its card."""
    recipe, state = trainer.recipe, trainer.state
    tokens = state.step * recipe.run.rows * recipe.data.length
    where = "" if state.best_step is None else f" at step {state.best_step:,}"
    sources = ", ".join(recipe.data.train)
    return "\n".join(
        [
            f"{state.step:,} steps, at most {tokens:,} tokens, from {sources}."
            f" Best validation loss {state.best:.4f} nats per token{where}.",
            "",
            "Trained by `nestling train` with these settings:",
            "",
            "```",
            *recipe.lines(),
            "```",
        ]
    )


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


ADVICE = "The last good checkpoint is in {}; try a lower optim.lr"


class _RunState(NamedTuple):
    """State that must survive between steps, besides weights and optimizer."""

    step: int = 0
    best: float = math.inf
    best_step: int | None = None
    stale: int = 0
    bad: int = 0
    skipped: int = 0


class Trainer:
    """One process's run of one recipe."""

    def __init__(self, recipe: Recipe, folder: Path, world: World, progress: Progress) -> None:
        self.recipe, self.folder, self.world, self.progress = recipe, folder, world, progress
        if recipe.run.precision == "bf16" and world.device.type == "cpu" and world.main:
            _warn_of_bf16(progress)
        self.encoder, train, self.valid = load_data(recipe, world)
        self.batches = make_batches(recipe, train)
        self.bare = make_model(recipe, self.encoder)
        if recipe.run.recompute:
            self.bare.gradient_checkpointing_enable()
        keep = recipe.data.order == "sequential" and recipe.data.carry
        if keep and self.bare.config.learns_in_training and world.size > 1:
            raise ValueError(
                "data.carry=true with levels that learn while they read runs in one process: each"
                f" row is at a place of its own, and there are {world.size}; set data.carry=false"
            )
        self.fresh_rows = FreshRows(self.bare.model.layers) if keep else None
        self.model: Any = world.distribute(self.bare, recipe.run.strategy)
        if recipe.run.compile:
            self.model = torch.compile(self.model)
        self.optimizer = build(recipe.optim, self.bare)
        self._settle()
        self.base_rates = [group["lr"] for group in self.optimizer.param_groups]
        self.carry: list[Any] | None = None
        self.state = _RunState()
        self.loss = math.nan
        self._resumed: Checkpoint | None = None  # until a step was taken from it
        self.timeline = Timeline()
        self._watch = self._watcher()

    def _settle(self) -> None:
        """Products in float32 where a CPU would measure for itself which are quicker.

        A busy machine may find others at another start, or in another process of the run.
        """
        groups = self.optimizer.param_groups if self.world.device.type == "cpu" else []
        left = [group for group in groups if group.get("precision", 0) is None]
        for group in left:
            group["precision"] = torch.float32

    def _watcher(self) -> Callable[[int], Any]:
        """With levels of different chunks, note who changed when (one process)."""
        if not self.recipe.optim.chunks or self.world.size > 1:
            return lambda step: None
        levels = by_level(self.bare)
        return self.timeline.watch({k: [w for _, w in v] for k, v in levels.items()})

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def resume(self) -> None:
        """Go on from the newest whole checkpoint, if there is one."""
        if self.world.main:
            sweep(self.checkpoints)
        types = named_tuples(self.bare.model.init_states(1))
        if self.bare.config.learns_in_training:
            types |= named_tuples(Learned((), (begin(engine_of(self.bare), 1),)))
        found = load_latest(self.checkpoints, types, self.world)
        if found is None:
            return
        with _sound(found):
            expect(found.facts, _FACTS, found.path)
            _same_run(found, self.recipe, self.checkpoints)
            restore_(self.bare, self.optimizer, found)
            self._settle()
            _restore_random(found.load("random"))
            self.carry = self._load_carry(found)
            self.state = _load_state(found)
            self.timeline.extend(LevelUpdate(*saved) for saved in found.load("timeline"))
        self._watch = self._watcher()
        self.loss, self._resumed = found.facts["loss"], found
        self.progress.say(f"continuing from step {self.state.step} in {self.checkpoints}")

    def save(self) -> bool:
        """Write a checkpoint, each process its share; False if nothing is fit to be saved.

        After a bad step nothing is saved; weights that are not finite, or from which no step can
        be taken, end the run. The last good checkpoint stays what it was.
        """
        if self.state.bad:
            return False
        loss, norm = self._next()
        if not (math.isfinite(loss) and math.isfinite(norm)) or not self.world.all(
            _finite(self.bare)
        ):
            raise TrainingFailedError(
                f"training cannot go on from the weights after step {self.state.step} (loss"
                f" {loss}, gradient norm {norm}); nothing was saved."
                f" {ADVICE.format(self.checkpoints)}"
            )
        apart = self.bare.config.learns_in_training  # what levels learn stays in micro-batches
        states = {
            "model": self.bare.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "carry": self.carry if apart else self.carry and state_stack(self.carry),
            "random": _random_state(),
            "memory": self.state._asdict(),
            "timeline": [tuple(update) for update in self.timeline.updates],
        }
        save_checkpoint(
            self.checkpoints,
            self.state.step,
            states,
            {"recipe": self.recipe.to_json(), "loss": self.loss},
            keep=self.recipe.run.keep,
            best=self.state.best_step,
            world=self.world,
            cut=("carry",),
        )
        return True

    def _next(self) -> tuple[float, float]:
        """The loss of the present weights on tokens that come next, and its gradient's norm."""
        batch = self.batches(self.state.step, self.world.rank, self.world.size)
        few = Batch(*(field[: self.recipe.run.micro or len(field)] for field in batch))
        buffers = [(buffer, buffer.clone()) for buffer in self.bare.buffers()]
        learn = self.learning or False
        found = gradients(self.model, few, self.recipe.run, self.world, learn=learn)
        norm = _norm(self.bare, None)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, kept in buffers:  # natural steps average what they see
                buffer.copy_(kept)
        return found.loss, norm

    def _load_carry(self, found: Checkpoint) -> list[Any] | None:
        """This process's rows of the carried memories, in its micro-batches."""
        if self.bare.config.learns_in_training:
            kept: list[Any] | None = found.load("carry")
            for _, leaf in tree_leaves(kept):
                check_finite(leaf, f"{found.path}: a carried memory")
            return kept and [state_to(each, device=self.world.device) for each in kept]
        rows = self.recipe.run.rows // self.world.size
        start = self.world.rank * rows
        own = found.load("carry", lambda name: found.read(name, start, start + rows))
        if own is None:
            return None
        exact = state_to(own, dtype=torch.float32) if self.recipe.run.precision == "bf16" else own
        check_state(exact, self.bare.model.init_states(1), rows, f"{found.path}: carry")
        own = state_to(own, device=self.world.device)
        places = torch.arange(rows).split(self.recipe.run.micro or rows)
        return [state_select(own, index) for index in places]

    def step(self) -> None:
        """One optimizer step, skipped as a whole if the loss or gradient is not finite."""
        state, optim = self.state, self.recipe.optim
        batch = self.batches(state.step, self.world.rank, self.world.size)
        found = gradients(
            self.model,
            batch,
            self.recipe.run,
            self.world,
            self.carry,
            self.fresh_rows,
            learn=self.learning or False,
        )
        norm = _norm(self.bare, optim.clip)
        facts = {"loss": found.loss, "gradient_norm": norm, "tokens": found.tokens}
        if (state.step + 1) % self.progress.every == 0:
            norms = level_norms(self.bare, self.world)
            facts |= {f"gradient_norm/{level}": value for level, value in norms.items()}
        if math.isfinite(found.loss) and math.isfinite(norm):
            self._take(found)
            self.state = self.state._replace(bad=0)
        else:
            self._refuse(found.loss, norm)
        self.optimizer.zero_grad(set_to_none=True)
        self.state = self.state._replace(step=state.step + 1)
        facts["lr"] = self.optimizer.param_groups[0]["lr"]
        self.progress.step(self.state.step, found.tokens, facts)

    def _take(self, found: BackwardResult) -> None:
        factor = self.recipe.schedule(self.state.step)
        for group, rate in zip(self.optimizer.param_groups, self.base_rates, strict=True):
            group["lr"] = rate * factor
        with contextlib.nullcontext() if self._resumed is None else _sound(self._resumed):
            self.optimizer.step()
        self._resumed = None
        self._watch(self.state.step + 1)
        self.carry, self.loss = found.carry, found.loss

    def _refuse(self, loss: float, norm: float) -> None:
        state = self.state
        self.state = state._replace(bad=state.bad + 1, skipped=state.skipped + 1)
        self.progress.say(
            f"step {state.step + 1} skipped, nothing changed: loss {loss}, gradient norm {norm}"
        )
        if self.state.bad >= self.recipe.run.max_bad:
            raise TrainingFailedError(
                f"{self.state.bad} steps in a row had a loss or gradient that is not finite"
                f" (last: loss {loss}, gradient norm {norm}); stopped at step {state.step + 1}."
                f" {ADVICE.format(self.checkpoints)}"
            )

    @property
    def learning(self) -> list[str]:
        """The levels that learn while they read at this step of the run (level growth)."""
        levels = self.bare.config.memory_levels
        grow = self.recipe.model.grow or (0,) * len(levels)
        both = zip(levels, grow, strict=True)
        return [lv.name for lv, first in both if lv.active and self.state.step >= first]

    def _judge_levels(self) -> None:
        """Log what each learning level does, and what it is worth.

        Only levels that change within a window are worth something there.
        """
        length = self.recipe.data.length
        chunks = {level.name: level.chunk for level in self.bare.config.memory_levels}
        levels = [name for name in self.learning if chunks[name] < length]
        if not levels:
            return
        worth = effects(self.model, self.valid, self.recipe, self.world, levels)
        batch = self.batches(self.state.step, self.world.rank, self.world.size)
        facts = {f"effect/{name}": value for name, value in worth.items()}
        facts |= level_measures(self.model, batch.ids[:1].to(self.world.device), self.learning)
        if self.bare.rates is not None:
            names = [level.name for level in self.bare.config.memory_levels]
            found = zip(names, self.bare.rates().tolist(), strict=True)
            facts |= {f"rate/{name}": rate for name, rate in found if name in worth}
        self.progress.record(self.state.step, facts)
        says = ", ".join(f"{name} {value:+.4f}" for name, value in worth.items())
        self.progress.say(f"step {self.state.step}: effect of the levels: {says}")

    def judge(self) -> None:
        """Evaluate, and remember whether it got better; learning levels tell their effect."""
        learn = self.learning or False
        loss = validation_loss(self.model, self.valid, self.recipe, self.world, learn=learn)
        if learn:
            self._judge_levels()
        state = self.state
        if loss < state.best:
            self.state = state._replace(best=loss, best_step=state.step, stale=0)
        else:
            self.state = state._replace(stale=state.stale + 1)
        self.progress.record(state.step, {"validation_loss": loss})
        self.progress.say(f"step {state.step}: validation loss {loss:.4f}")

    def sample(self) -> None:
        """Show what the model writes."""
        if self.world.size > 1:
            return  # generation with sharded weights would need every process
        tokenizer = self.encoder.tokenizer
        ids = tokenizer(self.recipe.run.sample_prompt, return_tensors="pt").to(self.world.device)
        self.bare.eval()
        out = self.bare.generate(**ids, max_new_tokens=80, do_sample=False)
        self.bare.train()
        text = tokenizer.decode(out[0], skip_special_tokens=True)
        self.progress.record(self.state.step, {"sample": text})
        self.progress.say(f"sample: {text!r}")

    @property
    def done(self) -> bool:
        run = self.recipe.run
        stale = run.patience is not None and self.state.stale >= run.patience
        return self.state.step >= run.steps or stale


def _warn_of_bf16(progress: Progress) -> None:
    """Say so where this CPU is slower in bf16 than in float32."""
    speed = bf16_speed()
    if speed is not None and speed < 1.0:
        progress.say(
            f"run.precision=bf16 is emulated on this CPU: {speed:.2f}x the speed of float32; take"
            " run.precision=float32"
        )


def _finite(model: nn.Module) -> bool:
    """True if every weight this process holds is finite; one transfer tells."""
    held = [local(p).detach() for p in model.parameters()]
    sizes = [part.abs().amax() for part in held if part.numel()]
    return not sizes or bool(torch.stack([size.float() for size in sizes]).isfinite().all())


def _norm(model: nn.Module, clip: float | None) -> float:
    norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf if clip is None else clip)
    return float(full(norm))


_FACTS = {
    "recipe": {"model": dict, "data": dict, "optim": dict, "run": dict},
    "loss": float,
}
_STATE = {
    "step": int,
    "best": float,
    "best_step": object,
    "stale": int,
    "bad": int,
    "skipped": int,
}


@contextlib.contextmanager
def _sound(found: Checkpoint) -> Iterator[None]:
    """Name the checkpoint where what it holds does not fit; torch has errors of many kinds."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        said = " ".join(str(error).split())[:200]
        raise BrokenFileError(
            f"{found.path}: not a checkpoint of this run: {type(error).__name__}: {said}"
        ) from error


def _load_state(found: Checkpoint) -> _RunState:
    """The numbers of a run between its steps."""
    saved = expect(found.load("memory"), _STATE, f"{found.path}: memory")
    if saved["best_step"] is not None:
        expect(saved["best_step"], int, f"{found.path}: best_step")
    if saved["step"] != found.step:
        raise BrokenFileError(f"{found.path}: step {saved['step']} in the checkpoint {found.step}")
    return _RunState(**saved)


def _same_run(found: Checkpoint, recipe: Recipe, folder: Path) -> None:
    """Refuse to continue a run of another model or other data; its length may change."""
    old, new = found.facts["recipe"], recipe.to_json()
    for before, now in RENAMED.items():
        part, _, name = before.partition(".")
        if name in old[part]:
            old[part].setdefault(now.partition(".")[2], old[part][name])
    for part, keys in (
        ("model", None),
        ("data", None),
        ("optim", ("name",)),
        ("run", ("seed", "rows")),
    ):
        for key in keys or new[part]:
            if key not in ("cache", "workers") and old[part].get(key) != new[part][key]:
                raise ValueError(
                    f"{folder} holds a run with {part}.{key}={old[part].get(key)!r}, not"
                    f" {new[part][key]!r}; give the new run its own folder"
                )


def _random_state() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002
    }


def _restore_random(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
