"""The store of runs: run once, kept by what the run depends on."""

from __future__ import annotations

import pytest

from studies.harness.store import Store


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


def test_the_copy_stands_in_for_a_lost_folder(tmp_path):
    copy = tmp_path / "docs" / "runs.json"
    store = Store(tmp_path / "runs", copy=copy)
    facts = {"lr": 0.1234567891}
    store.get(("x", "seed0"), lambda: {"loss": 1 / 3, "matrix": [[2 / 3, 1]]}, facts)
    store.get(("x", "tuning"), lambda: {"loss": 0.5})
    assert store.gather() == 2
    lost = Store(tmp_path / "elsewhere", copy=copy)
    again = lost.get(("x", "seed0"), lambda: pytest.fail("ran again"), facts)
    assert again == {"facts": facts, "loss": 0.333333, "matrix": [[0.666667, 1]]}
    assert list(lost.read("seed")) == [again]
    lost.get(("x", "seed1"), lambda: {"loss": 0.25}, facts)
    lost.put(("x", "tuning"), {"loss": 0.75})  # the folder's is newer
    assert [run["loss"] for run in lost.read()] == [0.333333, 0.25, 0.75]
    before = copy.read_bytes()
    assert lost.gather() == 3
    assert lost.gather() == 3
    assert Store(tmp_path / "nowhere", copy=copy).gather() == 3
    assert copy.read_bytes() != before


def test_the_copy_keeps_what_it_is_told_to(tmp_path):
    store = Store(tmp_path / "runs", copy=tmp_path / "runs.json")
    for i in range(3):
        store.put(f"run{i}", {"i": i, "long": [i] * 100})
    store.gather(lambda run: {"i": run["i"]} if run["i"] else None)
    assert list(Store(tmp_path / "x", copy=tmp_path / "runs.json").read()) == [{"i": 1}, {"i": 2}]


def test_a_store_without_a_copy_says_so(tmp_path):
    with pytest.raises(ValueError, match="copy=FILE"):
        Store(tmp_path).gather()
