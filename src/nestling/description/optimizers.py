"""An optimizer's memory as components: torch's, ours, or one nobody has seen before.

Only what is known is said. Known classes are listed with their memories; of any other optimizer
the state it has made so far is reported as it is, without an objective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from nestling.rules.adam import Moments, SecondMoment
from nestling.rules.deep_momentum import DeepMomentumState
from nestling.rules.delta_momentum import DeltaMomentumState
from nestling.rules.momentum import MomentumState
from nestling.rules.multiscale import MultiScaleState
from nestling.tree import tree_walk

Group = Mapping[str, Any]
GRADIENT, SQUARE = "-<m, g>", "-<m, g^2>"


class Remembered(NamedTuple):
    """One memory of an optimizer: its name, objective, size, and steps between two changes."""

    name: str
    objective: str
    size: int | None
    chunk: int = 1


class Stepped(NamedTuple):
    """Parameters that one optimizer steps at one pace; `chunk` counts training steps."""

    name: str
    optimizer: Optimizer
    chunk: int | float


def parts(optimizer: Optimizer) -> Iterator[Stepped]:
    """The optimizer itself, or the optimizers inside a nested one with their chunks.

    A nested optimizer is one that offers `levels` (with `name` and `chunk`) and `optimizers`.
    """
    levels, inner = getattr(optimizer, "levels", None), getattr(optimizer, "optimizers", None)
    if levels is None or inner is None:
        yield Stepped("", optimizer, 1)
        return
    for level, one in zip(levels, inner, strict=True):
        yield Stepped(level.name, one, level.chunk)


def memories(optimizer: Optimizer) -> list[Remembered]:
    """The optimizer's memory between steps, over all its parameters."""
    name = type(optimizer).__name__
    if type(optimizer).__module__.startswith("torch.optim") and name in TORCH:
        return _from_table(TORCH[name], optimizer)
    if callable(getattr(optimizer, "rule", None)):
        return _from_rules(optimizer)
    return _as_found(optimizer)


def _adam(group: Group) -> dict[str, str]:
    extra = {"max_exp_avg_sq": "largest exp_avg_sq"} if group.get("amsgrad") else {}
    return {"exp_avg": GRADIENT, "exp_avg_sq": SQUARE, **extra}


def _rmsprop(group: Group) -> dict[str, str]:
    momentum = {"momentum_buffer": "-<m, g / sqrt(v)>"} if group.get("momentum") else {}
    centred = {"grad_avg": GRADIENT} if group.get("centered") else {}
    return {"square_avg": SQUARE, **momentum, **centred}


TORCH: dict[str, Callable[[Group], dict[str, str]]] = {
    "SGD": lambda group: {"momentum_buffer": GRADIENT} if group.get("momentum") else {},
    "Adam": _adam,
    "AdamW": _adam,
    "NAdam": _adam,
    "RAdam": _adam,
    "Adamax": lambda group: {"exp_avg": GRADIENT, "exp_inf": "largest |g|"},
    "RMSprop": _rmsprop,
    "Adagrad": lambda group: {"sum": SQUARE},
    "Adadelta": lambda group: {"square_avg": SQUARE, "acc_delta": "-<m, step^2>"},
    "Muon": lambda group: {"momentum_buffer": GRADIENT},
}
"""The memories of torch's optimizers and what each is trained on; sizes are the parameters'."""


def _from_table(table: Callable[[Group], dict[str, str]], optimizer: Optimizer) -> list[Remembered]:
    found: dict[str, Remembered] = {}
    for group in optimizer.param_groups:
        numbers = sum(parameter.numel() for parameter in group["params"])
        for name, objective in table(group).items():
            before = found[name].size if name in found else 0
            found[name] = Remembered(name, objective, (before or 0) + numbers)
    return list(found.values())


LEARNS: dict[type, dict[str, str]] = {
    MomentumState: {"memory": GRADIENT},
    DeltaMomentumState: {"memory": "|m g - 1|^2 / 2"},
    DeepMomentumState: {"inner": "|m(g) - 1|^2 / 2", "outer": "|m(g) - 1|^2 / 2"},
    Moments: {"first": GRADIENT, "second": SQUARE},
    SecondMoment: {"second": SQUARE},
    MultiScaleState: {"fast": GRADIENT, "slow": "-<m, sum of g>", "second": SQUARE},
}
"""The data that each field of our rules' states is trained on."""

KEPT_WITH = {"total": "slow", "slow_out": "slow"}
"""Fields that only serve another memory: the sum it is waiting for, and what it last answered."""


def _from_rules(optimizer: Any) -> list[Remembered]:
    """Ours: ask each group's rule for its state; the field `slow` changes every `chunk` steps."""
    found: dict[str, Remembered] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            rule = optimizer.rule(group, optimizer.kind(group, parameter))
            shape = parameter.shape if parameter.ndim > 1 else (1, *parameter.shape)
            for owner, field, size in _leaves(rule.init(torch.empty(shape, device="meta"))):
                name = KEPT_WITH.get(field, field)
                objective = LEARNS.get(owner, {}).get(name, "its rule's")
                old = found.get(name, Remembered(name, objective, 0))
                chunk = int(group.get("chunk", 1)) if name == "slow" else 1
                found[name] = old._replace(size=(old.size or 0) + size, chunk=chunk)
    return list(found.values())


def _leaves(state: Any) -> Iterator[tuple[type, str, int]]:
    """Every tensor of a rule's state: the NamedTuple that holds it, its field, its size."""
    for path, leaf in tree_walk(state):
        named = [(type(part), str(key)) for part, key in path if hasattr(part, "_fields")]
        owner, field = named[-1] if named else (tuple, "state")
        yield owner, field, leaf.numel()


def _as_found(optimizer: Optimizer) -> list[Remembered]:
    """The tensors that an unknown optimizer holds now; what they are for is not known."""
    sizes: dict[str, int] = {}
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.numel() > 1:
                sizes[name] = sizes.get(name, 0) + value.numel()
    if not sizes and not optimizer.state:
        return [Remembered("state", "unknown until the first step", None)]
    return [Remembered(name, "unknown", size) for name, size in sizes.items()]
