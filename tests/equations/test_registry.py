"""The index equation -> symbol -> test is complete, honest and up to date."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from nestling.paper.registry import EQUATIONS, citations, document, executions, find, index, symbols

ROOT = Path(__file__).resolve().parents[2]
REQUIRED = {1, 3, 4, 5}  # sections whose equations must all be executed


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("one step (Eq. 57).", {57}),
        ("Eq. 54-57 and the rest", {54, 55, 56, 57}),
        ("Eq. 1, 7-9, see there", {1, 7, 8, 9}),
        ("Eq. 3 and 5; Eqs. 10, and 12", {3, 5, 10, 12}),
        ("wrapped: Eq.\n    71", {71}),
        ("Eq. 57/120; Eq. 83-84/88", {57, 120, 83, 84, 88}),
        ("Eq. 53's surface, 1000 steps", {53}),
        ("Equation 4, eq 5, Seq. 6", set()),
        (None, set()),
    ],
)
def test_citations_are_read_from_text(text, numbers):
    assert citations(text) == numbers


def test_symbols_are_functions_methods_classes_and_documented_constants(tmp_path):
    package = tmp_path / "toy"
    package.mkdir()
    (package / "room.py").write_text(
        textwrap.dedent(
            '''
            """A module's docstring is no claim: Eq. 1."""
            def outer():
                """Eq. 2."""
                def inner():
                    """Eq. 3."""
            class Thing:
                """Eq. 4."""
                @property
                def part(self):
                    """Eq. 5."""
            value = 1
            """Eq. 6."""
            '''
        )
    )
    found = {s.name: set(s.equations) for s in symbols(package)}
    assert found == {
        "toy.room.outer": {2},
        "toy.room.outer.inner": {3},
        "toy.room.Thing": {4},
        "toy.room.Thing.part": {5},
        "toy.room.value": {6},
    }


def test_there_are_121_equations_each_in_one_section():
    assert list(EQUATIONS) == list(range(1, 122))
    assert all(equation.statement for equation in EQUATIONS.values())


def test_find_names_symbols_and_rejects_unknown_numbers():
    assert "nestling.levels.due" in find(71)
    with pytest.raises(ValueError, match="from 1 to 121; got 122"):
        find(122)


def test_every_cited_equation_exists_and_has_a_test():
    tested = frozenset().union(*(test.equations for test in executions()))
    orphans = {s.name: sorted(s.equations - tested) for s in symbols() if s.equations - tested}
    assert not orphans, "cited in a docstring, but no test carries the mark"


def test_every_mark_names_an_equation():
    for test in executions():
        assert test.equations <= EQUATIONS.keys(), test.name


def test_the_required_sections_are_executed():
    pending = [
        entry.equation.number
        for entry in index()
        if entry.equation.section in REQUIRED and not entry.executed
    ]
    assert not pending


def test_the_document_is_up_to_date():
    stored = (ROOT / "docs" / "equations.md").read_text(encoding="utf-8")
    assert stored == document(index()), "run: make docs"


def test_a_mark_that_calls_nothing_fails(missing):
    """The runtime check itself: see tests/conftest.py."""
    unrun = missing({71}, set())
    assert list(unrun) == [71]
    assert "nestling.levels.due" in unrun[71]
    due = next(s for s in symbols() if s.name == "nestling.levels.due")
    assert not missing({71}, {(str(due.path), due.first)})
    assert missing({71}, {(str(due.path), due.last + 1)})


@pytest.fixture
def missing(request):
    return next(
        plugin.missing
        for plugin in request.config.pluginmanager.get_plugins()
        if getattr(plugin, "__file__", None) == str(ROOT / "tests" / "conftest.py")
    )


def test_computed_marks_are_refused(tmp_path):
    bad = "import pytest\n\n@pytest.mark.equation(*NUMBERS)\ndef test_x(): ...\n"
    (tmp_path / "test_bad.py").write_text(bad)
    with pytest.raises(ValueError, match="whole numbers"):
        executions(tmp_path)
