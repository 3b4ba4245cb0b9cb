"""A marked test must really run what it claims: a symbol citing each equation in its mark."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from types import FrameType

import pytest

from nestling.equations import PACKAGE, Symbol, symbols


@cache
def cited() -> list[Symbol]:
    return symbols()


def missing(numbers: set[int], executed: set[tuple[str, int]]) -> dict[int, list[str]]:
    """The equations no citing symbol of which was executed, with those symbols' names.

    `executed` holds the file and first line of each function called; one defined inside a symbol
    (a method, the step of a rule factory, the lambda of a constant) counts as that symbol.
    """
    ran = {
        n
        for symbol in cited()
        for path, line in executed
        if path == str(symbol.path) and symbol.first <= line <= symbol.last
        for n in symbol.equations
    }
    return {n: [s.name for s in cited() if n in s.equations] for n in sorted(numbers - ran)}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    numbers = {n for mark in item.iter_markers("equation") for n in mark.args}
    if not numbers:
        return (yield)
    executed: set[tuple[str, int]] = set()

    def record(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            executed.add((code.co_filename, code.co_firstlineno))

    before = sys.getprofile()
    sys.setprofile(record)
    try:
        result = yield
    finally:
        sys.setprofile(before)
    for number, names in missing(numbers, executed).items():
        pytest.fail(
            f"the mark claims Eq. {number}, but the test called no symbol that cites it"
            f" ({', '.join(names) or 'none exists in the package'})",
            pytrace=False,
        )
    return result
