"""The guards listed in `benchmarks/breaks.py` stay true; the command takes them out one by one."""

from __future__ import annotations

import pytest

from tests.scripts import benchmark

breaks = benchmark("breaks")


@pytest.mark.parametrize("number", range(len(breaks.BREAKS)))
def test_every_guard_stands_once_and_its_test_exists(number):
    """A guard that was moved or renamed would no longer be taken out by the command."""
    assert breaks.standing(breaks.BREAKS[number]) == ""
    one = breaks.BREAKS[number]
    text = (breaks.ROOT / one.file).read_text().replace(one.guard, one.broken)
    if one.file.endswith(".py"):
        compile(text, one.file, "exec")


def test_every_point_has_a_guard():
    assert {one.point for one in breaks.BREAKS} == set(range(1, 25))


def test_an_entry_that_is_not_true_is_named():
    one = breaks.BREAKS[0]
    assert "stands there 0 times" in breaks.standing(one._replace(guard="if 1 == 2:"))
    assert "no test" in breaks.standing(one._replace(test="tests/test_breaks.py::test_x"))
