"""`describe`: any model and any optimizer as a nested system (Definitions 2-4)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from nestling.description.description import Component, Description
from nestling.description.modules import (
    collapse,
    continuum,
    in_context,
    level_weights,
    unknown_mixers,
)
from nestling.description.optimizers import Stepped, memories, parts

NO_OPTIMIZER = "no optimizer was given: no parameter changes after the sequence is read"


def describe(model: Any, optimizer: Optimizer | None = None) -> Description:
    """List the levels of a model and its optimizer, ours or not.

    `model` is a module, or anything else with a method `describe_levels(name)` that returns its
    components, such as a nested system of `nestling.paper`.

    Levels are ordered by update frequency (Definition 2): what changes with every token, then the
    optimizer's memories, then the weights, then what never changes. Modules that are not known to
    learn in context are what they are: weights at the level of the outer optimizer; a note names
    those that seem to mix a sequence. The same part of all layers counts as one component.

        print(nestling.describe(model, optimizer))
        nestling.describe(model, optimizer).draw("levels.html")
    """
    if not isinstance(model, nn.Module):
        if not hasattr(model, "describe_levels"):
            raise TypeError(
                "describe takes a torch.nn.Module, or an object with a method"
                f" describe_levels(name); got {type(model).__name__}"
            )
        return Description(type(model).__name__, model.describe_levels(""))
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer or None, got {type(optimizer).__name__}"
        )
    title = type(model).__name__
    notes = [] if optimizer else [NO_OPTIMIZER]
    if optimizer:
        title += f" with {_optimizer_name(optimizer)}"
    notes += continuum(model) + unknown_mixers(model)
    return Description(title, [*in_context(model), *_outer(model, optimizer, notes)], notes)


def _optimizer_name(optimizer: Optimizer) -> str:
    inside = sorted({type(part.optimizer).__name__ for part in parts(optimizer)})
    own = type(optimizer).__name__
    return own if inside == [own] else f"{own} of {', '.join(inside)}"


def _outer(model: nn.Module, optimizer: Optimizer | None, notes: list[str]) -> list[Component]:
    """The weights, each at the pace of the optimizer that steps it, and what those remember."""
    weights = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    frozen = {id(p): name for name, p in model.named_parameters() if not p.requires_grad}
    components: list[Component] = []
    for part in parts(optimizer) if optimizer else ():
        held = [id(p) for group in part.optimizer.param_groups for p in group["params"]]
        own = {key: weights.pop(key) for key in held if key in weights}
        if len(own) < len(held):
            notes.append(
                f"{len(held) - len(own)} tensors of the optimizer are not trained parameters of"
                " this model and are left out of its weights"
            )
        remembered = _memories(part)
        components += remembered
        quick = tuple(m.name for m in remembered if m.chunk <= part.chunk)
        components += _weights(model, own, part, quick)
    rest = {**weights, **frozen}
    if optimizer and weights:
        notes.append(f"{len(weights)} parameters want a gradient but no optimizer steps them")
    return _distinct([*components, *_weights(model, rest, None, ())])


def _memories(part: Stepped) -> list[Component]:
    prefix = f"{part.name}: " if part.name else ""
    own = type(part.optimizer).__name__
    found: list[Component] = []
    for memory in memories(part.optimizer):
        chunk = part.chunk * memory.chunk
        found.append(
            Component(
                name=f"{prefix}{own}.{memory.name}",
                kind="optimizer memory",
                clock="step" if chunk != math.inf else "never",
                chunk=chunk,
                state=memory.size,
                objective=memory.objective,
                context="gradients the model generates",
                transfer="direct: the weights follow it",
            )
        )
    return found


def _weights(
    model: nn.Module, names: dict[int, str], part: Stepped | None, memories: tuple[str, ...]
) -> list[Component]:
    """Weights of one pace, grouped by the module they belong to."""
    steps = part is not None and part.chunk != math.inf
    sizes = {id(p): p.numel() for p in model.parameters()}
    levels = level_weights(model)
    paces = dict(levels.values())
    groups: dict[str, int] = {}
    for key, name in names.items():
        module = _module(name) or type(model).__name__
        module, _ = levels.get(module, (module, ""))
        groups[module] = groups.get(module, 0) + sizes[key]
    return collapse(
        Component(
            name=module,
            kind="weights",
            clock="step" if steps else "never",
            chunk=part.chunk if part and steps else math.inf,
            parameters=size,
            state=size if steps else 0,
            objective="the training loss" if steps else "none: frozen",
            context=_context(steps, paces.get(module)),
            transfer="backpropagation" if steps else "",
            needs=memories if steps else (),
        )
        for module, size in groups.items()
    )


def _context(steps: bool, pace: str | None) -> str:
    """The data weights learn from, and the pace that a level of a continuum memory declares."""
    parts = ["training batches"] if steps else []
    return "; ".join(parts + ([f"declared: {pace}"] if pace else []))


def _module(name: str) -> str:
    """The part of a layer that a parameter belongs to: `layers.3.mlp.up.weight` -> `layers.3.mlp`.

    Numbered parts inside it are kept: `layers.3.channel.mlps.1`.
    """
    path = name.split(".")[:-1]
    numbers = [place for place, step in enumerate(path) if step.isdigit()]
    if not numbers:
        return ".".join(path)
    return ".".join(path[: max(numbers[-1] + (1 if len(numbers) > 1 else 2), 1)])


def _distinct(components: list[Component]) -> list[Component]:
    """Give components that share a name, at different paces, a name of their own."""
    seen: dict[str, int] = {}
    named = []
    for component in components:
        count = seen[component.name] = seen.get(component.name, 0) + 1
        named.append(
            component if count == 1 else replace(component, name=f"{component.name} [{count}]")
        )
    return named
