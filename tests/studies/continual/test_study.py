"""The study: tuning sees the validation split only, runs are kept, the page says what was found."""

from __future__ import annotations

import math

import pytest

from studies.continual.page import compare, summary, write_page
from studies.continual.streams import Dataset, Split
from studies.continual.study import TUNING_SEED, Plan, Study, packed
from studies.harness.store import Store
from studies.harness.verdict import Interval, verdict

PLAN = Plan(rows=4, prompt_sample=4)


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    def split(each: int, word: str) -> Split:
        pairs = [(f"{name} {word} {i}", c) for c, name in enumerate("abcd") for i in range(each)]
        return Split(texts=tuple(t for t, _ in pairs), labels=tuple(c for _, c in pairs))

    return Dataset(
        name="letters",
        classes=("a one", "b two", "c three", "d four"),
        tasks=2,
        train=split(6, "x"),
        valid=split(3, "y"),
        test=split(3, "z"),
    )


def test_a_study_is_resumed_not_repeated(transformer, dataset, tmp_path, monkeypatch):
    store = Store(tmp_path / "results", study="continual")
    study = Study(transformer, dataset, tmp_path, store, PLAN)
    found = [study.run(method, seed) for seed in (0, 1) for method in ("lda", "sequential")]
    files = sorted((tmp_path / "results").rglob("*.json"))
    assert len([f for f in files if f.name.startswith("tuning")]) == 10 + 10
    again = Study(transformer, dataset, tmp_path, store, PLAN)
    monkeypatch.setattr(again, "_run", lambda *_: pytest.fail("ran again"))
    assert [again.run(m, s) for s in (0, 1) for m in ("lda", "sequential")] == found
    assert "sequential" in summary(found)


def test_tuning_never_sees_the_test_split(transformer, dataset, tmp_path, monkeypatch):
    study = Study(
        transformer, dataset, tmp_path, Store(tmp_path / "results", study="continual"), PLAN
    )
    seen = []
    real = study._run

    def watch(method, setting, seed, split):
        seen.append((seed, split))
        return real(method, setting, seed, split)

    monkeypatch.setattr(study, "_run", watch)
    study.run("ewc", 0)
    assert seen[-1] == (0, "test")
    assert set(seen[:-1]) == {(TUNING_SEED, "valid")}
    with pytest.raises(ValueError, match="tuning seed"):
        study.run("ewc", TUNING_SEED)


def test_tuning_looks_around_the_best_two(transformer, dataset, tmp_path, monkeypatch):
    """A close second may gain more from what is tried next: it is not dropped at once."""
    study = Study(
        transformer, dataset, tmp_path, Store(tmp_path / "results", study="continual"), PLAN
    )
    seen = []

    def score(method, setting):
        seen.append(setting)
        first = {(0.003, 0.0): 0.44, (0.01, 1e-4): 0.43}.get((setting["lr"], setting["adam"]), 0.1)
        gain = 0.2 if setting["adam"] and setting["epochs"] > 1 else 0.0
        return first + gain if setting["loss"] == "present" else 0.0

    monkeypatch.setattr(study, "_try", score)
    chosen = study.setting("sequential")
    assert chosen["adam"] == 1e-4
    assert chosen["epochs"] > 1
    assert len({str(setting) for setting in seen}) == 10


def made_up(method: str, seed: int, last: float) -> dict:
    return {
        "facts": {
            "base": "b", "stream": "s", "readout": "head", "classes": 4, "examples": 9,
            "method": method, "setting": {"lr": 0.1}, "seed": seed,
        },
        "matrix": [[0.9, 0.0], [last, 0.8]],
        "untrained": [0.25, 0.25],
        "seconds": 1.0,
        "passes": 10,
        "stored": 100,
    }  # fmt: skip


def test_the_page_states_verdicts(tmp_path):
    store = Store(
        tmp_path / "results", copy=tmp_path / "docs" / "continual.json", study="continual"
    )
    for seed in range(3):
        for method, last in (("cms-4", 0.7), ("sequential", 0.1), ("ewc", 0.7), ("lda", 0.9)):
            store.put(f"{method}/seed{seed}-x", made_up(method, seed, last + 0.01 * seed))
    for seed in range(2):
        store.put(f"lora/seed{seed}-x", made_up("lora", seed, 0.2))
    text = write_page(store, tmp_path / "docs").read_text()
    line = {r.split("|")[1].strip(): r for r in text.splitlines() if r.startswith("| CMS beats")}
    assert line["CMS beats sequential fine-tuning"].count("**shown**") == 3
    assert line["CMS beats EWC"].count("**inconclusive**") == 3
    assert line["CMS beats frozen features + LDA"].count("**refuted**") == 3
    assert "CMS beats experience replay" not in line  # was not run
    assert "unfinished: 2 seeds" in line["CMS beats LoRA"]
    assert list((tmp_path / "docs").glob("*.svg"))
    assert len(store.gather(packed)) == 14
    lost = Store(
        tmp_path / "nowhere", copy=store.copy, study="continual"
    )  # the runs are gone, their copy is not
    assert write_page(lost, tmp_path / "again").read_text() == text


def test_verdicts():
    assert verdict(Interval(0.1, 0.05)) == "shown"
    assert verdict(Interval(0.1, 0.05), higher=False) == "refuted"
    assert verdict(Interval(0.1, 0.2)) == "inconclusive"
    assert verdict(Interval(0.1, math.nan)) == "inconclusive"
    with pytest.raises(ValueError, match="no seed"):
        compare({0: made_up("a", 0, 0.1)}, {1: made_up("b", 1, 0.1)}, "accuracy")


def test_an_empty_store_has_no_page(tmp_path):
    assert write_page(Store(tmp_path, study="continual"), tmp_path) is None


def test_the_copy_of_a_trial_is_short():
    trial = made_up("ewc", TUNING_SEED, 0.5)
    assert packed(trial)["matrix"] == [[0.5, 0.8]]
    assert packed(made_up("ewc", 10, 0.5))["matrix"] == [[0.9, 0.0], [0.5, 0.8]]
    trial["facts"]["base"] = "transformer-quick"
    assert packed(trial) is None
