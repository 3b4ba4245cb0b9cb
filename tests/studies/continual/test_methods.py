"""Sanity of every method: what must hold before a number means anything."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from studies.continual import metrics
from studies.continual.methods import CHUNKS, METHODS, Setup, build
from studies.continual.protocol import accuracies, run_stream

CLASSES = ("cat", "dog", "owl", "eel", "fox", "hen")
TASKS = ((0, 1), (2, 3), (4, 5))
GRADIENT = [n for n, arm in METHODS.items() if "loss" in arm.default]
LEARNING = [n for n, arm in METHODS.items() if arm.group != "prompt" and n not in ("ncm", "lda")]


def setup_of(base, features, **changes):
    given = {"base": base, "features": features, "classes": CLASSES, "rows": 8, "wide": 32}
    return Setup(**{**given, **changes})


def learn(name, setup, setting=None):
    f = setup.features
    return run_stream(build(name, setup, setting), f.train, f.test, TASKS)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_and_reports_its_costs(name, transformer, features):
    result = learn(name, setup_of(transformer, features))
    assert len(result.matrix) == len(result.untrained) == 3
    assert all(0.0 <= v <= 1.0 for row in result.matrix for v in row)
    assert result.stored > 0
    assert (result.passes > 0) == (name in LEARNING)


def test_joint_beats_sequential(transformer, features):
    setup = setup_of(transformer, features)
    setting = {"loss": "seen", "adam": 0.01, "epochs": 6}
    joint = metrics.average_accuracy(learn("joint", setup, {"adam": 0.01}).matrix)
    sequential = metrics.average_accuracy(learn("sequential", setup, setting).matrix)
    assert joint > 0.6
    assert joint > sequential + 0.1


def test_methods_made_to_remember_do(transformer, features):
    setup = setup_of(transformer, features)
    forgets = {"loss": "seen", "adam": 0.01, "epochs": 6}
    sequential = metrics.average_accuracy(learn("sequential", setup, forgets).matrix)
    for name in ("replay", "cms-1", "cms-4", "lda", "ncm"):
        setting = forgets if name == "replay" else {}
        assert metrics.average_accuracy(learn(name, setup, setting).matrix) > sequential + 0.1, name


@pytest.mark.parametrize("name", [n for n in LEARNING if not n.startswith("adapt")])
def test_rate_zero_is_the_frozen_model(name, base, features):
    """With label readout and rate 0 nothing changes, on both base models."""
    setup = setup_of(base, features, readout="label")
    setting = {"joint": {"adam": 0.0}, "cms-0": {}}.get(name, {"lr": 0.0})
    setting |= {"decay": 0.0} if name == "dynamic" else {}
    method = build(name, setup, setting)
    frozen = setup.top()(features.test.x)
    method.learn(features.train, range(6))
    assert torch.allclose(method.scores(features.test), frozen, atol=1e-5)


@pytest.mark.parametrize("name", ["sequential", "cms-4", "lda", "joint"])
def test_shuffled_labels_give_chance(name, transformer, features):
    order = torch.randperm(len(features.train.y), generator=torch.Generator().manual_seed(0))
    train = dataclasses.replace(features.train, y=features.train.y[order])
    setup = setup_of(transformer, dataclasses.replace(features, train=train))
    setting = {"loss": "seen"} if name == "sequential" else {}
    found = metrics.average_accuracy(learn(name, setup, setting).matrix)
    assert found < 0.35  # chance is 1/6 of 240 examples


def test_a_seed_is_reproducible_and_another_differs(transformer, features):
    setup = setup_of(transformer, features)
    again = learn("sequential", setup).matrix
    assert learn("sequential", setup).matrix == again
    other = setup_of(transformer, features, seed=5)
    assert learn("sequential", other).matrix != again


@pytest.mark.parametrize("levels", [1, 2, 3, 4])
def test_levels_split_the_model_without_changing_it(levels, base, features):
    from studies.continual.features import last_channel

    top = setup_of(base, features, readout="label").top(levels)
    with torch.no_grad():
        channel = last_channel(base.model)
        hidden = base.model.model.norm(channel(features.test.x[None])[0])[0]
        assert torch.allclose(top.hidden(features.test.x), hidden, atol=1e-5)
    assert len(top.levels()) == levels == len(CHUNKS[levels])
    one = setup_of(base, features, readout="label").top(1)
    assert sum(p.numel() for p in top.adapted()) == sum(p.numel() for p in one.adapted())


def test_slow_levels_change_on_their_clock_only(transformer, features):
    method = build("cms-4", setup_of(transformer, features), {})
    before = [[w.clone() for w in level] for level in method.network.levels()]
    with torch.no_grad():  # classes are known, and not told apart without error
        method.readout.write(method.network.read(features.test.x), features.test.y)
    method.learn(features.train.at(torch.arange(0, 240, 10)), range(6))  # three steps of eight
    changed = [
        any(not torch.equal(w, b) for w, b in zip(level, old, strict=True))
        for level, old in zip(method.network.levels(), before, strict=True)
    ]
    assert changed == [True, False, False, False]


def test_labels_of_the_test_data_are_not_handed_over(transformer, features):
    from studies.continual.baselines import NearestMean

    class Peeking(NearestMean):
        def scores(self, data):
            assert (data.y == -1).all()
            return super().scores(data)

    run_stream(Peeking(6, 16), features.train, features.test, TASKS)


def test_accuracies_by_hand():
    scores = torch.tensor([[3.0, 2, 1], [1, 2, 3], [3, 1, 2]])
    y = torch.tensor([0, 1, 2])
    tasks = ((0,), (1,), (2,))
    assert accuracies(scores, y, tasks, (0, 1)) == [1.0, 1.0, 0.0]
    assert accuracies(scores, y, tasks, (0, 1, 2)) == [1.0, 0.0, 0.0]


def test_unknown_names_are_refused(transformer, features):
    setup = setup_of(transformer, features)
    with pytest.raises(ValueError, match="unknown method 'cmz'"):
        build("cmz", setup)
    with pytest.raises(ValueError, match=r"unknown settings \['rate'\]"):
        build("ewc", setup, {"rate": 1})


def test_all_tuned_methods_get_the_same_number_of_trials():
    trials = {n: len(arm.first) + 2 * len(arm.second) for n, arm in METHODS.items() if arm.first}
    assert set(trials.values()) == {10}
    assert set(LEARNING) | {"lda"} == set(trials)


def test_every_trial_is_a_setting_of_its_arm():
    for name, arm in METHODS.items():
        assert len(arm.label) in (0, len(arm.first)), name
        for change in (*arm.first, *arm.second, *arm.label):
            assert set(change) <= set(arm.default), name


@pytest.mark.parametrize("rule", ["gd", "retaining"])
def test_adapt_at_rate_zero_answers_as_the_model_does(rule, transformer, features):
    setup = setup_of(transformer, features)
    method = build("adapt-3", setup, {"rule": rule, "rate": 0.0})
    part = features.train.at(torch.arange(12))
    before = method.scores(part)
    method.learn(part, range(6))
    assert torch.equal(method.scores(part), before)
    moved = build("adapt-3", setup, {"rule": rule, "rate": 0.3})
    moved.learn(part, range(6))
    assert not torch.equal(moved.scores(part), before)
    assert torch.equal(method.scores(part), before)  # the model is shared, not changed
