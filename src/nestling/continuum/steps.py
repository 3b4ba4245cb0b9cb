"""The second clock: the same levels across optimizer steps (Eq. 71).

In context a level changes every `chunk` pairs of a text; across steps its parameters take an
optimizer step every `chunk` training steps. One list of `Level` objects serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from nestling.continuum.core import Slot
from nestling.levels import Level

__all__ = ["REST", "level_parts"]

REST = Level(name="rest", chunk=1)
"""The level of all parameters that belong to no memory: a step every step."""

Factory = Callable[[list[Any]], Any]


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
    taken = set()
    for slot in slots:
        owners = sorted({part.level for part in slot.parts})
        if len(owners) != 1 or any(part.axis is not None for part in slot.parts):
            raise ValueError(
                f"slots: across steps a parameter belongs to one level, as a whole; {slot.name!r}"
                f" belongs to levels {owners}"
            )
        if slot.name not in named or owners[0] >= len(levels):
            raise ValueError(
                f"slots: {slot.name!r} of level {owners[0]} does not fit this model and"
                f" {len(levels)} levels"
            )
        mine[owners[0]].append(named[slot.name])
        taken.add(slot.name)
    rest = [p for name, p in named.items() if name not in taken and p.requires_grad]
    parts = [(level, own, factory) for level, own in zip(levels, mine, strict=True) if own]
    return [*parts, (REST, rest, factory)] if rest else parts
