"""The one page writer: findings and limits first, one picture, tables; the rest in an appendix.

A page has at most 150 lines: sections that do not fit go to `NAME_appendix.md`, the last ones
first. A section without runs keeps the text it has on the page that is there: a page never loses
what it has no runs for.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nestling.files import write_atomic

__all__ = ["LINES", "Page", "Section", "kept", "protocol_table", "sections", "table"]

LINES = 150
"""Lines of a page at most."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a page under its heading; `body` None: there are no runs for it."""

    title: str
    body: Sequence[str] | None
    appendix: bool = False


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]


def protocol_table(protocol: Any) -> list[str]:
    """A frozen dataclass as a table: what was fixed before the first run."""
    found = {f.name: getattr(protocol, f.name) for f in dataclasses.fields(protocol)}
    return table(["fixed before the first run", ""], [(k, _said(v)) for k, v in found.items()])


def sections(text: str) -> dict[str, list[str]]:
    """The lines under each `## title` of a page, without blank ends."""
    found: dict[str, list[str]] = {}
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title, *lines = part.rstrip().split("\n")
        while lines and not lines[0]:
            lines = lines[1:]
        found[title] = lines
    return found


def kept(parts: Mapping[str, Sequence[str] | None], old: str) -> list[str]:
    """Headings and bodies; a body that is None is what the old page has under that heading."""
    there, lines = sections(old), list[str]()
    for title, body in parts.items():
        shown = there.get(title) if body is None else body
        if shown is not None:
            lines += [f"## {title}", "", *shown, ""]
    return lines


@dataclass(frozen=True, kw_only=True)
class Page:
    """The content of a page, in this order."""

    title: str
    command: str
    findings: Sequence[str]
    limits: Sequence[str]
    protocol: Any = None
    picture: str = ""  # SVG
    caption: str = ""
    sections: Sequence[Section] = field(default_factory=tuple)

    def write(self, folder: Path, name: str) -> Path:
        """Write NAME.md, its picture and its appendix; returns the page's path."""
        path, rest = folder / f"{name}.md", folder / f"{name}_appendix.md"
        old = {
            **(sections(rest.read_text("utf-8")) if rest.is_file() else {}),
            **(sections(path.read_text("utf-8")) if path.is_file() else {}),
        }
        shown = [
            (part, body)
            for part in self.sections
            if (body := old.get(part.title) if part.body is None else list(part.body)) is not None
        ]
        here = [(part.title, body) for part, body in shown if not part.appendix]
        there = [(part.title, body) for part, body in shown if part.appendix]
        head = self._head(name)
        while here and len(head) + _lines(here) + (2 if there else 0) > LINES:
            there.insert(0, here.pop())
        if there:
            head.append(f"Full listings are in [the appendix]({rest.name}).")
            head.append("")
        if self.picture:
            write_atomic(folder / f"{name}.svg", self.picture.encode())
        write_atomic(path, _text([*head, *_flat(here)]))
        if there:
            first = [f"# {self.title}: appendix", "", f"[The page]({path.name}).", ""]
            write_atomic(rest, _text([*first, *_flat(there)]))
        elif rest.is_file():
            rest.unlink()
        return path

    def _head(self, name: str) -> list[str]:
        lines = [f"# {self.title}", "", *(f"{i}. {f}" for i, f in enumerate(self.findings, 1)), ""]
        if self.limits:
            lines += ["Limits:", "", *(f"- {limit}" for limit in self.limits), ""]
        if self.picture:
            lines += [f"![{self.caption}]({name}.svg)", ""]
        lines += [f"Written by `{self.command}` from stored runs, which lie beside it.", ""]
        if self.protocol is not None:
            lines += [*protocol_table(self.protocol), ""]
        return lines


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{k}: {_said(v)}" for k, v in value.items())
    if isinstance(value, list | tuple | frozenset):
        return ", ".join(map(_said, value))
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if type(value) is int else str(value)


def _flat(parts: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    return [line for title, body in parts for line in (f"## {title}", "", *body, "")]


def _lines(parts: Iterable[tuple[str, Sequence[str]]]) -> int:
    return sum(3 + sum(line.count("\n") + 1 for line in body) for _, body in parts)


def _text(lines: Sequence[str]) -> bytes:
    return ("\n".join(lines).rstrip() + "\n").encode()
