"""Which level owns which part of which weight: the one assignment, for every clock.

A *slot* is one weight matrix of a model, by its parameter's name; its *parts* say which levels own
it. In context a level changes its difference from these weights every `chunk` pairs of a text;
across steps its parameters take an optimizer step every `chunk` training steps (`level_parts`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn

from nestling.continuum.fast import Owned, Part, weight_of
from nestling.continuum.layers import Block, Chain, Parallel
from nestling.levels import Level

REST = Level(name="rest", chunk=1)
"""The level of all parameters that belong to no memory: a step every step."""

Factory = Callable[[list[Any]], Any]


class Slot(NamedTuple):
    """One weight matrix that holds memory, by its parameter's name, and the levels that own it.

    A matrix of `nn.Linear`, or of a GPT-2 `Conv1D` (recognised; parts are always meant in the
    orientation outputs x inputs). Parts of one level must not overlap.
    """

    name: str  # "model.layers.0.mlp.up_proj.weight"
    parts: tuple[Part, ...]


def own_slots(model: nn.Module, first: int = 0) -> tuple[Slot, ...]:
    """The slots of our own continuum memories, where each MLP is a level.

    For models with `Chain` (Eq. 70) or `Parallel` (Eq. 74) channels: level l owns every matrix of
    the l-th MLP of every block, from the block number `first` on.
    """
    slots = _own(model, first)
    if not slots:
        raise ValueError(
            f"model: {type(model).__name__} has no continuum memory of its own (channel='cms');"
            " name the slots"
        )
    return slots


def _own(model: nn.Module, first: int = 0) -> tuple[Slot, ...]:
    slots, blocks = [], 0
    for path, module in model.named_modules():
        blocks += isinstance(module, Block)
        if isinstance(module, Chain | Parallel) and (blocks > first or not first):
            for level, mlp in enumerate(module.mlps):
                for name, parameter in mlp.named_parameters():
                    if parameter.dim() == 2:
                        full = ".".join(filter(None, (path, "mlps", str(level), name)))
                        slots.append(Slot(full, (Part(level),)))
    return tuple(slots)


def shared_slots(model: nn.Module, levels: int) -> tuple[Slot, ...]:
    """Every linear layer's matrix as a slot on which all levels have a difference."""
    names = [
        f"{path}.weight" if path else "weight"
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    if not names:
        raise ValueError(f"model: {type(model).__name__} has no linear layer to learn in")
    return tuple(Slot(name, tuple(Part(level) for level in range(levels))) for name in names)


def owned(slots: Sequence[Slot], levels: Sequence[Level]) -> tuple[tuple[Owned, ...], ...]:
    """For every level the parts it owns, in the order of the slots."""
    names = [slot.name for slot in slots]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"slots: every matrix is one slot; {twice[0]!r} is named twice")
    found: list[list[Owned]] = [[] for _ in levels]
    for number, slot in enumerate(slots):
        for part in slot.parts:
            if not 0 <= part.level < len(levels):
                raise ValueError(
                    f"slots: {slot.name!r} names level {part.level}; there are {len(levels)} levels"
                )
            found[part.level].append(Owned(number, part))
    return tuple(tuple(parts) for parts in found)


def shapes(model: nn.Module, slots: Sequence[Slot]) -> list[tuple[int, int]]:
    """(outputs, inputs) of every slot; parts that do not fit are refused."""
    sizes = []
    for slot in slots:
        weight, transposed = weight_of(model, slot.name)
        outputs, inputs = reversed(weight.shape) if transposed else weight.shape
        for part in slot.parts:
            if part.axis not in (None, 0, 1):
                raise ValueError(f"slots: {slot.name!r}: axis must be None, 0 or 1; got {part!r}")
            end = inputs if part.axis == 1 else outputs
            if part.axis is not None and not 0 <= part.start < part.stop <= end:
                raise ValueError(
                    f"slots: {slot.name!r} is {outputs} x {inputs}; {part!r} does not fit"
                )
        _refuse_overlap(slot)
        sizes.append((int(outputs), int(inputs)))
    return sizes


def level_parts(
    model: nn.Module, levels: Sequence[Level], slots: Sequence[Slot], factory: Factory
) -> list[tuple[Level, list[Any], Factory]]:
    """The parts of a `NestedOptimizer`: every level with the parameters of its slots (Eq. 71).

        NestedOptimizer(level_parts(model, levels, own_slots(model), lambda p: M3(p, lr=1e-3)))

    What is no slot steps every step, under `REST`. Across steps a parameter belongs to one level:
    slots shared by several levels are refused.
    """
    named = dict(model.named_parameters())
    mine: list[list[Any]] = [[] for _ in levels]
    owners = _whole_owners(slots)
    for name, level in owners.items():
        if name not in named or level >= len(levels):
            raise ValueError(
                f"slots: {name!r} of level {level} does not fit this model and {len(levels)} levels"
            )
        mine[level].append(named[name])
    rest = [p for name, p in named.items() if name not in owners and p.requires_grad]
    parts = [(level, own, factory) for level, own in zip(levels, mine, strict=True) if own]
    return [*parts, (REST, rest, factory)] if rest else parts


def level_names(
    model: nn.Module, levels: Sequence[Level], slots: Sequence[Slot] | None = None
) -> dict[str, str]:
    """The level's name for every parameter that is a slot; by default of the model's own memory.

    A model without one has no such parameter.
    """
    owners = _whole_owners(_own(model) if slots is None else slots)
    return {name: levels[level].name for name, level in owners.items()}


def _whole_owners(slots: Sequence[Slot]) -> dict[str, int]:
    """The one level of every slot; slots that several levels share are refused."""
    found = {}
    for slot in slots:
        owners = sorted({part.level for part in slot.parts})
        if len(owners) != 1 or any(part.axis is not None for part in slot.parts):
            raise ValueError(
                f"slots: across steps a parameter belongs to one level, as a whole; {slot.name!r}"
                f" belongs to levels {owners}"
            )
        found[slot.name] = owners[0]
    return found


def _refuse_overlap(slot: Slot) -> None:
    for place, one in enumerate(slot.parts):
        for other in slot.parts[place + 1 :]:
            apart = one.axis is not None and one.axis == other.axis
            apart = apart and (one.stop <= other.start or other.stop <= one.start)
            if one.level == other.level and not apart:
                raise ValueError(f"slots: {slot.name!r}: level {one.level} owns a part twice")
