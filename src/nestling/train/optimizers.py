"""Optimizers by name, for recipes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nestling import optim
from nestling.checks import one_of
from nestling.continuum import level_names
from nestling.levels import Level
from nestling.train.recipe import Optim

Maker = Callable[..., torch.optim.Optimizer]


def decayed(model: nn.Module) -> Iterable[Any]:
    """Matrices decay; vectors (norms, gates, biases) do not."""
    weights = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in weights if p.ndim >= 2]},
        {"params": [p for p in weights if p.ndim < 2], "weight_decay": 0.0},
    ]


OPTIMIZERS: dict[str, tuple[Callable[[nn.Module], Iterable[Any]], Maker]] = {
    "adamw": (decayed, partial(torch.optim.AdamW, betas=(0.9, 0.95))),
    "sgd": (decayed, torch.optim.SGD),
    "muon": (optim.param_groups, optim.Muon),
    "m3": (optim.param_groups, optim.M3),
    "adamuon": (optim.param_groups, optim.AdaMuon),
    "delta_momentum": (decayed, optim.DeltaMomentum),
    "deep_momentum": (decayed, optim.DeepMomentum),
}
"""How each optimizer wants its parameters grouped, and how it is made."""


def by_level(model: Any) -> dict[str, list[tuple[str, Tensor]]]:
    """A model's trainable parameters by place: each continuum level by name, and the rest."""
    found: dict[str, list[tuple[str, Tensor]]] = {}
    place = places(model)
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            found.setdefault(place[name], []).append((name, weight))
    return found


def places(model: Any) -> dict[str, str]:
    """For every parameter the continuum level it belongs to, `mixer`, or `rest`."""
    named = [name for name, _ in model.named_parameters()]
    others = {name: "mixer" if ".mixer." in name else "rest" for name in named}
    return others | level_names(model, model.config.level_list)


def build(settings: Optim, model: Any) -> torch.optim.Optimizer:
    """The optimizer a recipe asks for; with `chunks`, one per level inside a NestedOptimizer."""
    one_of("optim.name", settings.name, OPTIMIZERS)
    group, make = OPTIMIZERS[settings.name]
    options = {"lr": settings.lr, "weight_decay": settings.weight_decay, **settings.options}

    def maker(groups: list[Any]) -> torch.optim.Optimizer:
        try:
            return make(groups, **options)
        except TypeError as error:
            raise ValueError(f"optim.options for {settings.name}: {error}") from error

    groups = list(group(model))
    if not settings.chunks:
        return maker(groups)
    levels = model.config.level_list
    if len(settings.chunks) != len(levels):
        raise ValueError(
            f"optim.chunks must have one number for each of the {len(levels)} levels"
            f" {', '.join(level.name for level in levels)}; got {settings.chunks}"
        )
    chunks = {level.name: chunk for level, chunk in zip(levels, settings.chunks, strict=True)}
    parts = []
    for place, weights in by_level(model).items():
        own = {id(weight) for _, weight in weights}
        cut = [{**g, "params": [p for p in g["params"] if id(p) in own]} for g in groups]
        level = Level(name=place, chunk=chunks.get(place, 1))
        parts.append((level, [g for g in cut if g["params"]], maker))
    return optim.NestedOptimizer(parts)
