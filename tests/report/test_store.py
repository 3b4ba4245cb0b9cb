"""The store of runs: run once, kept by what the run depends on."""

from __future__ import annotations

import pytest

from nestling.report.store import Store


def test_a_run_is_made_once(tmp_path):
    said: list[str] = []
    store = Store(tmp_path, said.append)
    first = store.get("a run/b", lambda: {"loss": 0.5})
    again = store.get("a run/b", lambda: pytest.fail("ran again"))
    assert first == again == {"loss": 0.5}
    assert len(said) == 1
    assert "loss 0.5" in said[0]
    assert [p.name for p in tmp_path.iterdir()] == ["a_run-b.json"]


def test_other_facts_are_another_run(tmp_path):
    store = Store(tmp_path)
    runs = [store.get(("x", "seed0"), lambda: {"y": 1}, {"lr": lr}) for lr in (0.1, 0.2, 0.1)]
    assert runs[0] == runs[2] == {"facts": {"lr": 0.1}, "y": 1}
    assert runs[1]["facts"] == {"lr": 0.2}
    assert len(list(store.read("seed"))) == 2
    assert not list(store.read("tuning"))


def test_a_result_is_replaced(tmp_path):
    store = Store(tmp_path)
    store.put("part", {"a": 1})
    store.put("part", {"a": 2})
    assert list(store.read()) == [{"a": 2}]
