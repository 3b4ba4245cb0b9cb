"""Slots bound to a model: the matrix behind each name, and which level owns which part of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from nestling.blocks.channel import Chain, Parallel
from nestling.continuum.core import MemoryLevel, Part, Slot

__all__ = ["Owned", "cut", "own_slots", "owned", "shapes", "weight_of"]


class Owned(NamedTuple):
    """One part of one slot, as its level sees it."""

    slot: int  # index into the slots
    part: Part

    @property
    def key(self) -> tuple[int, int | None, int, int]:
        """What of the model it is, whosever."""
        return self.slot, self.part.axis, self.part.start, self.part.stop


def own_slots(model: nn.Module) -> tuple[Slot, ...]:
    """The slots of our own continuum memories, where each MLP is a level.

    For models with `Chain` (Eq. 70) or `Parallel` (Eq. 74) channels: level l owns every matrix of
    the l-th MLP of every block.
    """
    slots = []
    for path, module in model.named_modules():
        if isinstance(module, Chain | Parallel):
            for level, mlp in enumerate(module.mlps):
                for name, parameter in mlp.named_parameters():
                    if parameter.dim() == 2:
                        full = ".".join(filter(None, (path, "mlps", str(level), name)))
                        slots.append(Slot(full, (Part(level),)))
    if not slots:
        raise ValueError(
            f"model: {type(model).__name__} has no continuum memory of its own (channel='cms');"
            " name the slots"
        )
    return tuple(slots)


def weight_of(model: nn.Module, name: str) -> tuple[Tensor, bool]:
    """The matrix behind a parameter's name, and whether it is stored inputs first (Conv1D)."""
    path, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(path)
        weight: Any = getattr(module, leaf)
    except AttributeError as error:
        raise ValueError(f"slots: the model has no parameter {name!r}") from error
    transposed = type(module).__name__ == "Conv1D"
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"slots: {name!r} must be a floating point matrix of a linear layer")
    if not (transposed or isinstance(module, nn.Linear)):
        raise ValueError(
            f"slots: {name!r} belongs to a {type(module).__name__}; a slot is the weight of an"
            " nn.Linear or a Conv1D"
        )
    return weight, transposed


def owned(slots: Sequence[Slot], levels: Sequence[MemoryLevel]) -> tuple[tuple[Owned, ...], ...]:
    """For every level the parts it owns, in the order of the slots."""
    names = [slot.name for slot in slots]
    if len(set(names)) < len(names):
        raise ValueError(f"slots: every matrix is one slot; {_twice(names)!r} is named twice")
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


def cut(weight: Tensor, part: Part) -> Tensor:
    """A part of a matrix [..., Do, Di]: a view."""
    if part.axis is None:
        return weight
    return weight.narrow(-2 + part.axis, part.start, part.stop - part.start)


def _refuse_overlap(slot: Slot) -> None:
    for place, one in enumerate(slot.parts):
        for other in slot.parts[place + 1 :]:
            apart = one.axis is not None and one.axis == other.axis
            apart = apart and (one.stop <= other.start or other.stop <= one.start)
            if one.level == other.level and not apart:
                raise ValueError(f"slots: {slot.name!r}: level {one.level} owns a part twice")


def _twice(names: list[str]) -> str:
    return next(name for name in names if names.count(name) > 1)
