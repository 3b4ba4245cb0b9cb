"""The store of runs: run once, kept by what the run depends on, and checked when read."""

from __future__ import annotations

import json
import math
import os
import random
import re
from pathlib import Path

import pytest

from nestling.files import BrokenFileError
from studies.harness.store import Store, key_of


def make(folder: Path, **options) -> Store:
    return Store(folder, study="s", **options)


def test_a_run_is_made_once(tmp_path):
    said: list[str] = []
    store = make(tmp_path, say=said.append)
    first = store.get(key_of("a run/b"), lambda: {"loss": 0.5})
    again = store.get(key_of("a run/b"), lambda: pytest.fail("ran again"))
    assert first == again == {"loss": 0.5}
    assert len(said) == 1
    assert "loss 0.5" in said[0]
    assert [p.name for p in tmp_path.iterdir()] == ["a_run-b.json"]


def test_other_facts_are_another_run(tmp_path):
    store = make(tmp_path)
    runs = [store.get("x/seed0", lambda: {"y": 1}, {"lr": lr}) for lr in (0.1, 0.2, 0.1)]
    assert runs[0] == runs[2] == {"facts": {"lr": 0.1}, "y": 1}
    assert runs[1]["facts"] == {"lr": 0.2}
    assert len(list(store.named("seed"))) == 2
    assert not list(store.named("tuning"))


def test_a_result_is_replaced(tmp_path):
    store = make(tmp_path)
    store.put("part", {"a": 1})
    store.put("part", {"a": 2})
    assert store.runs() == {"part": {"a": 2}}


def test_the_copy_may_lie_among_the_runs(tmp_path):
    """As in quick runs, whose pages are in their folder."""
    store = make(tmp_path, copy=tmp_path / "pages" / "page.json")
    store.put("part", {"a": 1.0})
    for _ in range(2):
        assert store.gather() == {"part": {"a": 1.0}}


def test_keys_are_found_again(tmp_path):
    store = make(tmp_path / "runs", copy=tmp_path / "page.json")
    store.put("hope/(aa)*/0", {"bin0": 1.0})
    store.put("hope/(abab)*/0", {"bin0": 0.5})
    assert "hope/(aa)*/0" in store
    assert "hope/(aa)*/1" not in store
    assert store.gather()["hope/(abab)*/0"] == {"bin0": 0.5}
    again = make(tmp_path / "elsewhere", copy=tmp_path / "page.json")  # the copy is enough
    assert again.runs() == store.runs()
    with pytest.raises(KeyError, match="not stored"):
        again.get("hope/(aa)*/1")


def test_the_copy_stands_in_for_a_lost_folder(tmp_path):
    copy = tmp_path / "docs" / "runs.json"
    store = make(tmp_path / "runs", copy=copy)
    facts = {"lr": 0.1234567891234}
    store.get("x/seed0", lambda: {"loss": 1 / 3, "matrix": [[2 / 3, 1]]}, facts)
    store.get("x/tuning", lambda: {"loss": 0.5})
    assert len(store.gather()) == 2
    lost = make(tmp_path / "elsewhere", copy=copy)
    again = lost.get("x/seed0", lambda: pytest.fail("ran again"), facts)
    assert again == {"facts": facts, "loss": 0.333333333, "matrix": [[0.666666667, 1]]}
    assert list(lost.named("seed")) == [again]
    assert list(store.named("seed")) == [again]  # folder and copy say the same to the last digit
    lost.get("x/seed1", lambda: {"loss": 0.25}, facts)
    lost.put("x/tuning", {"loss": 0.75})  # the folder's is newer
    assert [run["loss"] for run in lost.runs().values()] == [0.333333333, 0.25, 0.75]
    before = copy.read_bytes()
    assert len(lost.gather()) == 3
    assert len(lost.gather()) == 3
    assert len(make(tmp_path / "nowhere", copy=copy).gather()) == 3
    assert copy.read_bytes() != before


def test_the_copy_keeps_what_it_is_told_to(tmp_path):
    store = make(tmp_path / "runs", copy=tmp_path / "runs.json")
    for i in range(3):
        store.put(f"run{i}", {"i": i, "long": [i] * 100})
    store.gather(lambda run: {"i": run["i"]} if run["i"] else None)
    kept = make(tmp_path / "x", copy=tmp_path / "runs.json").runs()
    assert list(kept.values()) == [{"i": 1}, {"i": 2}]


def test_a_store_without_a_copy_says_so(tmp_path):
    with pytest.raises(ValueError, match="copy=FILE"):
        make(tmp_path).gather()


def test_no_runs_make_no_copy(tmp_path):
    assert make(tmp_path / "runs", copy=tmp_path / "c.json").gather() == {}
    assert not (tmp_path / "c.json").exists()


def test_a_number_that_is_none_is_stored_by_its_name(tmp_path):
    store = make(tmp_path / "runs", copy=tmp_path / "c.json")
    store.put("x", {"loss": math.inf, "list": [math.nan, -math.inf]})
    for found in (store.get("x"), store.gather()["x"]):
        assert found["loss"] == math.inf
        assert math.isnan(found["list"][0])
    for path in (store.path("x"), tmp_path / "c.json"):
        assert json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))


@pytest.mark.parametrize(
    "key", ["../x", "a/../../x", "/x", "a//b", ".", "", "a\nb", "a/" + 300 * "x", "x/.."]
)
def test_names_stay_inside_the_folder(tmp_path, key):
    with pytest.raises(BrokenFileError, match="names are parts"):
        make(tmp_path / "runs").put(key, {"a": 1})
    copy = tmp_path / "c.json"
    store = make(tmp_path / "runs", copy=copy)
    store.put("good", {"a": 1})
    store.gather()
    held = json.loads(copy.read_text())
    held["runs"] = {key: {"a": 1}}
    copy.write_text(json.dumps(held))
    with pytest.raises(BrokenFileError):
        make(tmp_path / "other", copy=copy).runs()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.json", "runs"]


def test_every_changed_byte_is_seen(tmp_path):
    """Bits flipped and bytes cut, in a run's file and in a copy: refused, never another number."""
    store = make(tmp_path / "runs", copy=tmp_path / "c.json", needs=("loss",))
    for seed in range(3):
        store.put(f"run/hope/{seed}", {"loss": 1.25 + seed, "curve": [0.5, 0.25]})
    right = store.gather()
    chance = random.Random(0)
    for path in (store.path("run/hope/1"), tmp_path / "c.json"):
        whole = path.read_bytes()
        for trial in range(200):
            data = bytearray(whole)
            if trial % 4 == 0:
                data = data[: chance.randrange(len(data))]
            else:
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            path.write_bytes(bytes(data))
            with pytest.raises(BrokenFileError, match=re.escape(str(path))):
                make(tmp_path / "runs", copy=tmp_path / "c.json").runs()
        path.write_bytes(whole)
    assert make(tmp_path / "runs", copy=tmp_path / "c.json").runs() == right


def test_swapped_files_are_refused(tmp_path):
    store = make(tmp_path / "runs", copy=tmp_path / "c.json")
    store.put("run/hope/1", {"loss": 1.0})
    store.put("run/linear/1", {"loss": 2.0})
    store.gather()
    one, two = store.path("run/hope/1"), store.path("run/linear/1")
    a, b = one.read_bytes(), two.read_bytes()
    one.write_bytes(b)
    two.write_bytes(a)
    with pytest.raises(BrokenFileError, match="belongs elsewhere"):
        store.get("run/hope/1")
    other = Store(tmp_path / "empty", study="t", copy=tmp_path / "c.json")
    with pytest.raises(BrokenFileError, match="study: 's' is not one of t"):
        other.runs()


def test_a_run_without_its_numbers_is_refused(tmp_path):
    make(tmp_path).put("a", {"x": 1.0})
    with pytest.raises(BrokenFileError, match="'a' lacks loss"):
        make(tmp_path, needs=("loss",)).get("a")
    with pytest.raises(BrokenFileError, match="lacks loss"):
        make(tmp_path, needs=("loss",)).put("b", {"x": 1.0})


def test_what_is_no_file_of_runs_is_refused(tmp_path):
    copy = tmp_path / "c.json"
    for content, word in (
        (b"", "not a JSON file"),
        (b"[" * 100_000, "recursion"),
        (b'{"format": 1}', "expected the keys"),
        (
            b'{"format": 1, "study": "s", "check": "", "runs": {"a": {"x": NaN}}}',
            "not a JSON file of finite numbers",
        ),
        (b'{"format": 2, "study": "s", "check": "", "runs": {}}', "format: '2' is not one of 1"),
        (b'{"format": 1, "study": "s", "check": "", "runs": []}', "runs: expected dict"),
        (b"\xff\xfe", "not a JSON file"),
    ):
        copy.write_bytes(content)
        with pytest.raises(BrokenFileError, match=word):
            make(tmp_path / "runs", copy=copy).runs()
    copy.unlink()
    os.mkfifo(copy)
    with pytest.raises(BrokenFileError, match="not a regular file"):
        make(tmp_path / "runs", copy=copy).runs()


def test_what_a_kill_left_behind_is_gone_after_the_next_write(tmp_path):
    store = make(tmp_path)
    path = store.path("run/(aa)*/1")
    path.parent.mkdir(parents=True)
    left = path.parent / f".{path.name}.tmp"
    left.write_bytes(b"half of a file that is longer than the whole" * 100)
    assert store.runs() == {}
    store.put("run/(aa)*/1", {"a": 1})
    assert [p.name for p in path.parent.iterdir()] == [path.name]
