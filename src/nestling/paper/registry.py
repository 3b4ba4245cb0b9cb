"""Every equation of the paper: its statement, the symbols that implement it, the tests that run it.

A symbol (function, class or documented constant) claims an equation by citing it in its docstring,
`Eq. 57`, `Eq. 54-60` or `Eq. 1, 7-9`; a test claims it with `@pytest.mark.equation(57)`. Both are
read from the source (no import), so the index cannot drift from the code:

    python -m nestling.paper.registry                             # print the index
    python -m nestling.paper.registry --write docs/equations.md   # generate the document
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from nestling.paper.statements import SECTIONS, STATEMENTS

PACKAGE = Path(__file__).resolve().parents[1]
TESTS = PACKAGE.parents[1] / "tests"
CITATION = re.compile(r"\bEqs?\.\s+(\d+(?:-\d+)?(?:(?:/|(?:,|,?\s+and)\s+)\d+(?:-\d+)?\b)*)")


class Equation(NamedTuple):
    """One numbered equation: its statement in one line, and its section in the specification."""

    number: int
    statement: str
    section: int


class Symbol(NamedTuple):
    """A documented definition in the package, the lines it occupies, and the equations it cites."""

    name: str  # nestling.rules.momentum.momentum
    path: Path
    first: int
    last: int
    equations: frozenset[int]


class Execution(NamedTuple):
    """A test function and the equations its mark claims."""

    name: str  # tests/equations/test_momentum.py::test_momentum
    equations: frozenset[int]


class Entry(NamedTuple):
    """One row of the index: an equation, who implements it, who runs it."""

    equation: Equation
    symbols: tuple[Symbol, ...]
    tests: tuple[Execution, ...]

    @property
    def executed(self) -> bool:
        """True when a symbol implements the equation and a test runs it."""
        return bool(self.symbols and self.tests)


def _number_equations() -> dict[int, Equation]:
    section = {n: s for s, (_, ranges) in SECTIONS.items() for n in expand(ranges)}
    return {n: Equation(n, STATEMENTS[n], section[n]) for n in sorted(STATEMENTS)}


def expand(ranges: str) -> Iterator[int]:
    """The numbers in `"1, 7-9"`: 1, 7, 8, 9."""
    for low, high in re.findall(r"(\d+)(?:-(\d+))?", ranges):
        yield from range(int(low), int(high or low) + 1)


EQUATIONS: dict[int, Equation] = _number_equations()
"""All numbered equations, 1 to 121."""


def citations(text: str | None) -> frozenset[int]:
    """The equation numbers a docstring cites, in the forms shown in the module's docstring."""
    return frozenset(n for match in CITATION.findall(text or "") for n in expand(match))


@cache
def symbols(package: Path = PACKAGE) -> list[Symbol]:
    """Every symbol of the package that cites an equation, in the order of files and lines.

    Read once per process.
    """
    found: list[Symbol] = []
    for path in sorted(package.rglob("*.py")):
        parts = (package.name, *path.relative_to(package).with_suffix("").parts)
        module = ".".join(part for part in parts if part != "__init__")
        found += _symbols_in(ast.parse(path.read_text(encoding="utf-8")), module, path)
    return found


def _symbols_in(node: ast.AST, prefix: str, path: Path) -> Iterator[Symbol]:
    """Definitions below `node` and what documents them: their own string, or the one after."""
    body: list[ast.stmt] = getattr(node, "body", [])
    for here, after in zip(body, [*body[1:], None], strict=False):
        if isinstance(here, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name, text = f"{prefix}.{here.name}", ast.get_docstring(here)
        elif isinstance(here, ast.Assign | ast.AnnAssign):
            target = here.targets[0] if isinstance(here, ast.Assign) else here.target
            name, text = f"{prefix}.{getattr(target, 'id', '?')}", _string(after)
        else:
            continue
        if numbers := citations(text):
            first = min([here.lineno, *(d.lineno for d in getattr(here, "decorator_list", []))])
            yield Symbol(name, path, first, here.end_lineno or first, numbers)
        if not isinstance(here, ast.Assign | ast.AnnAssign):
            yield from _symbols_in(here, name, path)


def _string(node: ast.stmt | None) -> str | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return node.value.value if isinstance(node.value.value, str) else None
    return None


@cache
def executions(folder: Path = TESTS) -> list[Execution]:
    """Every test function marked with `pytest.mark.equation`; none where there is no folder."""
    found: list[Execution] = []
    for path in sorted(folder.rglob("test_*.py")):
        where = f"{folder.name}/{path.relative_to(folder).as_posix()}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and (numbers := _marked(node)):
                found.append(Execution(f"{where}::{node.name}", numbers))
    return found


def _marked(function: ast.FunctionDef) -> frozenset[int]:
    """The numbers in a function's `@pytest.mark.equation(...)`; `*range(1, 4)` is understood."""
    numbers: set[int] = set()
    for mark in function.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.equation":
            for argument in mark.args:
                numbers.update(_values(argument))
    return frozenset(numbers)


def _values(node: ast.expr) -> Iterator[int]:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield node.value
    elif isinstance(node, ast.Starred) and isinstance(node.value, ast.Call):
        yield from range(*(ast.literal_eval(bound) for bound in node.value.args))
    else:
        raise ValueError(
            "pytest.mark.equation takes whole numbers or *range(a, b), so that the index can be"
            f" read without running the test; got {ast.unparse(node)!r}"
        )


def find(number: int) -> list[str]:
    """The dotted names of the symbols that cite this equation."""
    if number not in EQUATIONS:
        raise ValueError(f"number must be an equation from 1 to {len(EQUATIONS)}; got {number!r}")
    return [symbol.name for symbol in symbols() if number in symbol.equations]


def index() -> list[Entry]:
    """The whole index, one entry per equation."""
    cited, marked = symbols(), executions()
    return [
        Entry(
            equation,
            tuple(symbol for symbol in cited if number in symbol.equations),
            tuple(test for test in marked if number in test.equations),
        )
        for number, equation in EQUATIONS.items()
    ]


def summary(entries: list[Entry]) -> str:
    """One line: how many equations are executed, and which are pending."""
    pending = [entry.equation.number for entry in entries if not entry.executed]
    line = f"{len(entries) - len(pending)} of {len(entries)} equations executed"
    return f"{line}, {len(pending)} pending: {_ranges(pending)}" if pending else line


def _ranges(numbers: list[int]) -> str:
    """Sorted numbers as `1, 7-9`."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def document(entries: list[Entry]) -> str:
    """The index as a Markdown document, one table per section."""
    lines = [
        "# Equations",
        "",
        "Every numbered equation of *Nested Learning: The Illusion of Deep Learning",
        "Architectures*, the symbols that implement it and the tests that execute it. Generated by",
        "`python -m nestling.paper.registry --write docs/equations.md`; a test fails when it is",
        "stale.",
        "",
        f"**{summary(entries)}.**",
    ]
    for section, (title, _) in SECTIONS.items():
        lines += ["", f"## {title}", "", "| Eq. | statement | symbols | tests | status |"]
        lines += ["|---|---|---|---|---|"]
        lines += [_row(entry) for entry in entries if entry.equation.section == section]
    return "\n".join(lines) + "\n"


def _row(entry: Entry) -> str:
    names = " ".join(f"`{s.name.removeprefix('nestling.')}`" for s in entry.symbols)
    runs = " ".join(f"`{t.name.removeprefix('tests/')}`" for t in entry.tests)
    status = "executed" if entry.executed else "pending"
    statement = entry.equation.statement.replace("|", "\\|")
    return f"| {entry.equation.number} | {statement} | {names} | {runs} | {status} |"


def main() -> None:
    """Print the index, or write it to a file."""
    parser = argparse.ArgumentParser(
        prog="python -m nestling.paper.registry", description=main.__doc__
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write Markdown here")
    target: Path | None = parser.parse_args().write
    entries = index()
    if target is not None:
        target.write_text(document(entries), encoding="utf-8")
    else:
        for entry in entries:
            names = ", ".join(symbol.name for symbol in entry.symbols) or "-"
            status = "executed" if entry.executed else "pending"
            number, statement, _ = entry.equation
            print(f"{number:>4}  {status:<9} {statement}\n{'':16}{names}")
    print(summary(entries))


if __name__ == "__main__":
    main()
