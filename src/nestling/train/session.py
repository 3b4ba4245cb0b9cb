"""One process's run of one recipe: what it holds, how it steps, saves and resumes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from nestling.description import Timeline
from nestling.levels import LevelUpdate
from nestling.train.checkpoint import Checkpoint, load_latest, save_checkpoint
from nestling.train.optimizers import build, by_level
from nestling.train.progress import Progress
from nestling.train.recipe import Recipe
from nestling.train.restart import Restarts
from nestling.train.setup import evaluate, load_data, make_batches, make_model
from nestling.train.step import Gradients, gradients, level_norms
from nestling.train.world import World, spread_, whole
from nestling.tree import named_tuples, state_select, state_stack, tree_map

__all__ = ["Session", "TrainingFailedError"]


class TrainingFailedError(RuntimeError):
    """The run cannot go on; the message says why and where the last good checkpoint is."""


class _Memory(NamedTuple):
    """What must survive between steps, besides weights and optimizer."""

    step: int = 0
    best: float = math.inf
    best_step: int | None = None
    stale: int = 0
    bad: int = 0
    skipped: int = 0


class Session:
    """One process's run of one recipe."""

    def __init__(self, recipe: Recipe, folder: Path, world: World, progress: Progress) -> None:
        self.recipe, self.folder, self.world, self.progress = recipe, folder, world, progress
        self.encoder, train, self.valid = load_data(recipe, world)
        self.batches = make_batches(recipe, train)
        self.bare = make_model(recipe, self.encoder)
        if recipe.run.recompute:
            self.bare.gradient_checkpointing_enable()
        keep = recipe.data.order == "sequential" and recipe.data.carry
        self.restarts = Restarts(self.bare.model.layers) if keep else None
        self.model: Any = world.distribute(self.bare, recipe.run.strategy)
        if recipe.run.compile:
            self.model = torch.compile(self.model)
        self.optimizer = build(recipe.optim, self.bare)
        self.base_rates = [group["lr"] for group in self.optimizer.param_groups]
        self.carry: list[Any] | None = None
        self.memory = _Memory()
        self.loss = math.nan
        self.timeline = Timeline()
        self._watch = self._watcher()

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
        types = named_tuples(self.bare.model.init_states(1))
        found = load_latest(self.checkpoints, types)
        if found is None:
            return
        _same_run(found, self.recipe, self.checkpoints)
        spread_(self.bare, self.optimizer, found.states)
        _restore_random(found.states["random"])
        if found.states["carry"] is not None:
            self.carry = self._cut(found.states["carry"])
        self.memory = _Memory(**found.states["memory"])
        self.timeline.extend(_update(*saved) for saved in found.states["timeline"])
        self._watch = self._watcher()
        self.loss = found.facts["loss"]
        self.progress.say(f"continuing from step {self.memory.step} in {self.checkpoints}")

    def save(self) -> None:
        """Write a checkpoint (all processes take part; rank 0 writes)."""
        states = whole(
            {
                "model": self.bare.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            }
        )
        states["carry"] = None
        if self.carry is not None:  # the rows of the batch in order, whoever holds them
            states["carry"] = tree_map(self.world.rows, state_stack(self.carry))
        states |= {
            "random": _random_state(),
            "memory": self.memory._asdict(),
            "timeline": [tuple(update) for update in self.timeline.updates],
        }
        if self.world.main:
            facts = {"recipe": self.recipe.to_json(), "loss": self.loss}
            save_checkpoint(
                self.checkpoints,
                self.memory.step,
                states,
                facts,
                keep=self.recipe.run.keep,
                best=self.memory.best_step,
            )
        self.world.barrier()

    def _cut(self, carry: Any) -> list[Any]:
        """Carried states of the whole batch, cut into this process's micro-batches."""
        if not named_tuples(carry):  # the form of earlier versions
            raise ValueError(
                f"{self.checkpoints} was written by an earlier version; give the run a new folder"
            )
        own = tree_map(lambda t: self.world.own_rows(t).to(self.world.device), carry)
        rows = self.recipe.run.rows // self.world.size
        places = torch.arange(rows).split(self.recipe.run.micro or rows)
        return [state_select(own, index) for index in places]

    def step(self) -> None:
        """One optimizer step, skipped as a whole if the loss or gradient is not finite."""
        memory, optim = self.memory, self.recipe.optim
        batch = self.batches(memory.step, self.world.rank, self.world.size)
        found = gradients(self.model, batch, self.recipe.run, self.world, self.carry, self.restarts)
        norm = _norm(self.bare, optim.clip)
        facts = {"loss": found.loss, "gradient_norm": norm, "tokens": found.tokens}
        if (memory.step + 1) % self.progress.every == 0:
            facts |= {f"gradient_norm/{k}": v for k, v in level_norms(self.bare).items()}
        if math.isfinite(found.loss) and math.isfinite(norm):
            self._take(found)
            self.memory = self.memory._replace(bad=0)
        else:
            self._refuse(found.loss, norm)
        self.optimizer.zero_grad(set_to_none=True)
        self.memory = self.memory._replace(step=memory.step + 1)
        facts["lr"] = self.optimizer.param_groups[0]["lr"]
        self.progress.step(self.memory.step, found.tokens, facts)

    def _take(self, found: Gradients) -> None:
        factor = self.recipe.schedule(self.memory.step)
        for group, rate in zip(self.optimizer.param_groups, self.base_rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.step()
        self._watch(self.memory.step + 1)
        self.carry, self.loss = found.carry, found.loss

    def _refuse(self, loss: float, norm: float) -> None:
        memory = self.memory
        self.memory = memory._replace(bad=memory.bad + 1, skipped=memory.skipped + 1)
        self.progress.say(
            f"step {memory.step + 1} skipped, nothing changed: loss {loss}, gradient norm {norm}"
        )
        if self.memory.bad >= self.recipe.run.max_bad:
            raise TrainingFailedError(
                f"{self.memory.bad} steps in a row had a loss or gradient that is not finite"
                f" (last: loss {loss}, gradient norm {norm}); stopped at step {memory.step + 1}."
                f" The last good checkpoint is in {self.checkpoints}; try a lower optim.lr"
            )

    def judge(self) -> None:
        """Evaluate, and remember whether it got better."""
        loss = evaluate(self.model, self.valid, self.recipe, self.world)
        memory = self.memory
        if loss < memory.best:
            self.memory = memory._replace(best=loss, best_step=memory.step, stale=0)
        else:
            self.memory = memory._replace(stale=memory.stale + 1)
        self.progress.record(memory.step, {"validation_loss": loss})
        self.progress.say(f"step {memory.step}: validation loss {loss:.4f}")

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
        self.progress.record(self.memory.step, {"sample": text})
        self.progress.say(f"sample: {text!r}")

    @property
    def done(self) -> bool:
        run = self.recipe.run
        stale = run.patience is not None and self.memory.stale >= run.patience
        return self.memory.step >= run.steps or stale


def _norm(model: nn.Module, clip: float | None) -> float:
    norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf if clip is None else clip)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def _update(position: int, level: str, *measures: float) -> LevelUpdate:
    """A saved update; earlier versions kept two measures, the gradient's norm and the step."""
    if len(measures) == 2:
        measures = (math.nan, *measures, math.nan)
    return LevelUpdate(position, level, *measures)


def _same_run(found: Checkpoint, recipe: Recipe, folder: Path) -> None:
    """Refuse to continue a run of another model or other data; its length may change."""
    old, new = found.facts["recipe"], recipe.to_json()
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
