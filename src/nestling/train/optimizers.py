"""Optimizers by name, for recipes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from nestling import optim
from nestling.train.recipe import Optim

__all__ = ["OPTIMIZERS", "build"]

Maker = Callable[..., torch.optim.Optimizer]


def _labelled(model: nn.Module) -> Iterable[Any]:
    return optim.param_groups(model)


def _decayed(model: nn.Module) -> Iterable[Any]:
    """Matrices decay; vectors (norms, gates, biases) do not."""
    weights = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in weights if p.ndim >= 2]},
        {"params": [p for p in weights if p.ndim < 2], "weight_decay": 0.0},
    ]


def _adamw(params: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **{"betas": (0.9, 0.95), **options})


def _named(name: str) -> Maker:
    return lambda params, **options: getattr(optim, name)(params, **options)


OPTIMIZERS: dict[str, tuple[Callable[[nn.Module], Iterable[Any]], Maker]] = {
    "adamw": (_decayed, _adamw),
    "sgd": (_decayed, torch.optim.SGD),
    "muon": (_labelled, optim.Muon),
    "m3": (_labelled, optim.M3),
    "adamuon": (_labelled, optim.AdaMuon),
    "delta_momentum": (_decayed, _named("DeltaMomentum")),
    "deep_momentum": (_decayed, _named("DeepMomentum")),
}
"""How each optimizer wants its parameters grouped, and how it is made."""


def build(settings: Optim, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer a recipe asks for."""
    if settings.name not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise ValueError(f"optim.name must be one of {known}; got {settings.name!r}")
    group, make = OPTIMIZERS[settings.name]
    options = {"lr": settings.lr, "weight_decay": settings.weight_decay, **settings.options}
    try:
        return make(group(model), **options)
    except TypeError as error:
        raise ValueError(f"optim.options for {settings.name}: {error}") from error
