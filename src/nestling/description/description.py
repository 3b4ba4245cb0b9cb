"""A model's levels as data: what learns, from what, how often, and how knowledge moves.

A `Description` is made by `nestling.describe`. It can be printed, drawn and turned into JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nestling.checks import one_of
from nestling.levels import rank

CLOCKS = ("token", "step", "item", "never")
"""The units of a component's chunk; a step takes in at least one token, so tokens are faster."""


def short(number: int) -> str:
    """A count for people: 950, 12.3K, 1.24M, 8.03B."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            digits = 2 if number < 10 * size else 1 if number < 100 * size else 0
            return f"{number / size:.{digits}f}{letter}"
    return str(number)


def every(clock: str, chunk: int | float) -> str:
    """How often, in words: "every token", "every 16 steps", "never"."""
    if clock == "never" or chunk == math.inf:
        return "never"
    return f"every {clock}" if chunk == 1 else f"every {chunk} {clock}s"


@dataclass(frozen=True, kw_only=True)
class Component:
    """One part that learns, or the same part of `copies` layers.

    `parameters` counts trained numbers, `state` the numbers this component itself changes when it
    updates (of one sequence, for what lives in a context; None where it is not known). `needs`
    names the components whose state at the same moment it needs (Definition 2).
    """

    name: str
    kind: str
    clock: str
    chunk: int | float = 1
    parameters: int = 0
    state: int | None = 0
    objective: str = ""
    context: str = ""
    transfer: str = ""
    copies: int = 1
    needs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        one_of(f"component {self.name!r}: clock", self.clock, CLOCKS)

    @property
    def frequency(self) -> float:
        """Updates per item of its clock (Definition 2)."""
        return 0.0 if self.clock == "never" or self.chunk == math.inf else 1.0 / self.chunk

    @property
    def pace(self) -> tuple[int, float]:
        """Sorts from fast to slow."""
        if self.frequency == 0:
            return (len(CLOCKS), math.inf)
        return (CLOCKS.index(self.clock), self.chunk)


@dataclass(frozen=True, kw_only=True)
class LevelDescription:
    """Components of one level: equally often, and none needs another's state (Definition 2)."""

    number: int
    components: tuple[Component, ...]

    @property
    def every(self) -> str:
        """How often the level updates, in words."""
        return every(self.components[0].clock, self.components[0].chunk)

    @property
    def frequency(self) -> float:
        """Updates per item of the level's clock."""
        return self.components[0].frequency


class Description:
    """A nested system as its levels; `levels[0]` is level 1, the slowest.

    `str()` and `print` give a table, `rich.print` a coloured one, `to_json()` all of it as data,
    and `draw("x.svg")` or `draw("x.html")` a picture.
    """

    def __init__(self, title: str, components: Iterable[Component], notes: Iterable[str] = ()):
        self.title, self.notes = title, tuple(notes)
        self.levels = order(tuple(components))

    @property
    def components(self) -> Iterator[Component]:
        """All components, from the slowest level to the fastest."""
        return (component for level in self.levels for component in level.components)

    def __getitem__(self, name: str) -> Component:
        for component in self.components:
            if component.name == name:
                return component
        raise KeyError(f"no component {name!r}; there are {[c.name for c in self.components]}")

    def level_of(self, name: str) -> int:
        """The number of the level in which a component is; 1 is the slowest."""
        return next(level.number for level in self.levels if self[name] in level.components)

    def to_json(self, *, indent: int | None = 2) -> str:
        """The description as JSON; an infinite chunk is null."""
        levels = [
            {
                "level": level.number,
                "every": level.every,
                "frequency": level.frequency,
                "components": [
                    {**asdict(c), "chunk": None if c.chunk == math.inf else c.chunk}
                    for c in level.components
                ],
            }
            for level in self.levels
        ]
        whole = {"title": self.title, "levels": levels, "notes": self.notes}
        return json.dumps(whole, indent=indent, ensure_ascii=False)

    def draw(self, path: str | Path) -> Path:
        """Write the picture: `.svg` alone, or `.html` with the table beneath it."""
        from nestling.description.draw import page, picture

        path = Path(path)
        makers = {".svg": picture, ".html": page}
        if path.suffix not in makers:
            raise ValueError(f"path must end in .svg or .html, got {str(path)!r}")
        path.write_text(makers[path.suffix](self), encoding="utf-8")
        return path

    def _repr_html_(self) -> str:
        from nestling.description.draw import picture

        return picture(self)

    def __repr__(self) -> str:
        return f"<Description of {self.title}: {len(self.levels)} levels>"

    def __str__(self) -> str:
        head = ("level", "updates", *COLUMNS)
        rows = [head, *self.rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows]
        return "\n".join([self.title, "", *lines, *("", *self.notes)[: 2 * len(self.notes)]])

    def rows(self) -> Iterator[tuple[str, ...]]:
        """The table's cells, the fastest level first."""
        for level in reversed(self.levels):
            for place, component in enumerate(level.components):
                first = (str(level.number), level.every) if place == 0 else ("", "")
                yield (*first, *cells(component))

    def __rich__(self) -> Any:
        from rich.table import Table
        from rich.text import Text  # names are shown as they are, not read as markup

        caption = Text("\n".join(self.notes)) if self.notes else None
        table = Table(title=Text(self.title), caption=caption)
        for head in ("level", "updates", *COLUMNS):
            table.add_column(head, overflow="fold")
        for row in self.rows():
            if row[0]:
                table.add_section()
            table.add_row(*map(Text, row))
        return table


COLUMNS = ("component", "parameters", "state", "objective", "context", "transfer")


def cells(component: Component) -> tuple[str, ...]:
    """A component as the table's cells."""
    copies = f" (x{component.copies})" if component.copies > 1 else ""
    state = "?" if component.state is None else short(component.state) if component.state else "-"
    return (
        component.name + copies,
        short(component.parameters) if component.parameters else "-",
        state,
        component.objective or "-",
        component.context or "-",
        component.transfer or "-",
    )


def order(components: tuple[Component, ...]) -> tuple[LevelDescription, ...]:
    """Sort components into levels and check Definition 2: nothing needs what is slower than it."""
    paces = {component.name: component.pace for component in components}
    if len(paces) < len(components):
        raise ValueError(f"names must differ: {sorted(c.name for c in components)}")
    for component in components:
        for need in component.needs:
            if need not in paces:
                raise ValueError(f"{component.name!r} needs {need!r}, which is not described")
            if paces[need] > component.pace:
                raise ValueError(
                    f"{component.name!r} needs the state of {need!r} at the same moment, but that"
                    " updates less often: Definition 2's order does not hold"
                )
    equal = {c.name: [n for n in c.needs if paces[n] == c.pace] for c in components}
    ranks = rank(equal)
    keys = sorted({(c.pace, ranks[c.name]) for c in components}, reverse=True)
    return tuple(
        LevelDescription(
            number=number,
            components=tuple(c for c in components if (c.pace, ranks[c.name]) == key),
        )
        for number, key in enumerate(keys, 1)
    )
