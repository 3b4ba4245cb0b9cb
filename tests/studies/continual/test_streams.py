"""Streams: sizes, splits that do not overlap, class orders; features from the cache."""

from __future__ import annotations

import pytest
import torch

from studies.continual.features import Encoded, Features, encode, features_of
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


def test_features_do_not_depend_on_company_and_are_kept(base, tmp_path):
    dataset = made_up()
    told: list[tuple[int, int]] = []
    made = features_of(base, dataset, tmp_path, progress=lambda *counts: told.append(counts))
    assert len(dataset.test.texts) in [texts for texts, _ in told]
    assert told[0][1] > 0
    alone = encode(base, dataset.test.texts[:1])
    assert torch.allclose(made.test.x[:1], alone, atol=1e-5)
    (file,) = (tmp_path / "features").glob("*.safetensors")
    stamp = file.stat().st_mtime_ns
    told.clear()
    again = features_of(base, dataset, tmp_path, progress=lambda *counts: told.append(counts))
    assert not told, "what is kept is not read again"
    assert torch.equal(again.train.x, made.train.x)
    assert file.stat().st_mtime_ns == stamp
    assert made.labels.shape == (4, 16)


def test_last_token_pooling_is_the_models_own_hidden_state(base):
    """Above the cut, the adapted part of the last token is exactly the language model."""
    from studies.continual.top import make_top

    text = "an owl at night"
    x = encode(base, [text], pool="last")
    ids = base.tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    with torch.no_grad():
        expected = base.model.model(input_ids=ids).last_hidden_state[:, -1]
        empty = Encoded(x=x[:0], y=torch.zeros(0, dtype=torch.long))
        given = Features(train=empty, valid=empty, test=empty, labels=torch.zeros(2, 16))
        top = make_top(base, given)
        assert torch.allclose(top.hidden(x), expected, atol=1e-5)
