"""Streams: sizes, splits that do not overlap, class orders."""

from __future__ import annotations

import pytest

from studies.continual.streams import (
    STREAMS,
    Dataset,
    Split,
    class_order,
    load,
    shuffled_labels,
    sliced,
)


def made_up(classes: int = 4, each: int = 3) -> Dataset:
    def split(name: str) -> Split:
        labels = [c for c in range(classes) for _ in range(each)]
        return Split(
            texts=tuple(f"{name} {c} {i}" for i, c in enumerate(labels)), labels=tuple(labels)
        )

    names = tuple(f"kind {c}" for c in range(classes))
    splits = {name: split(name) for name in ("train", "valid", "test")}
    return Dataset(name="made-up", classes=names, tasks=2, **splits)


SIZES = {
    "clinc150": (150, 15, 15000, 3000, 4500),
    "banking77": (77, 7, 8539, 1464, 3080),
    "dbpedia70": (70, 7, 10000, 1004, 1000),
    "dbpedia14": (14, 7, 12600, 1400, 1400),
}


@pytest.mark.parametrize("name", STREAMS)
def test_real_streams(name, shared_data):
    found = load(name, shared_data)
    splits = (found.train, found.valid, found.test)
    assert (len(found.classes), found.tasks, *map(len, splits)) == SIZES[name]
    assert all(set(split.labels) == set(range(len(found.classes))) for split in splits)
    train, valid, test = (set(split.texts) for split in splits)
    assert len(train & test) <= 2  # CLINC-150 as published repeats a few sentences
    assert len(train & valid) <= 3
    assert len(valid & test) <= 2


def test_a_class_order_is_a_partition_and_depends_on_the_seed():
    dataset = made_up(5)
    orders = {class_order(dataset, seed) for seed in range(6)}
    assert len(orders) > 3
    assert all(sorted(sum(order, ())) == list(range(5)) for order in orders)
    assert class_order(dataset, 3) == class_order(dataset, 3)


def test_slices_and_shuffled_labels():
    dataset = made_up()
    small = sliced(dataset, classes=2, tasks=2, per_class=1)
    assert small.classes == ("kind 0", "kind 1")
    assert small.train.labels == (0, 1)
    mixed = shuffled_labels(dataset, 0)
    assert sorted(mixed.train.labels) == sorted(dataset.train.labels)
    assert mixed.train.labels != dataset.train.labels
    assert mixed.test == dataset.test


def test_wrong_names_and_folders_are_named(tmp_path):
    with pytest.raises(ValueError, match="unknown stream 'clinc'"):
        load("clinc", tmp_path)
    with pytest.raises(FileNotFoundError, match="--data names the folder"):
        load("clinc150", tmp_path)
