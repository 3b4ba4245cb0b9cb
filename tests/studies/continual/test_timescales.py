"""Levels in a chain: each is a ridge regression on what slower ones leave; streams that move."""

from __future__ import annotations

import math

import pytest
import torch

from studies.continual import timescales
from studies.continual.timescales import (
    ARMS,
    LESIONS,
    TASKS,
    Chain,
    Protocol,
    domains,
    moving_labels,
    width_of,
)
from studies.harness.tuning import same_number


def chain(halves, width=12, seed=0) -> Chain:
    return Chain(4, 3, halves, width=width, keep=0.1, seed=seed)


def data(rows: int, seed: int = 1):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=draw), torch.randint(3, (rows,), generator=draw)


def test_one_level_that_never_forgets_is_the_ridge_regression_on_all_of_it():
    made, (x, y) = chain([math.inf]), data(50)
    for a, b in zip(x.split(7), y.split(7), strict=True):
        made.learn(a, b)
    rows = made.rows(x)[0].double()
    target = torch.nn.functional.one_hot(y, 3).double()
    eye = 0.1 * torch.eye(12).double()
    wanted = torch.linalg.solve(rows.T @ rows + eye, rows.T @ target)
    assert torch.allclose(made.weights[0].double(), wanted, atol=1e-3)


def test_a_level_halves_what_it_holds():
    made, (x, y) = chain([8.0]), data(16)
    made.learn(x[:8], y[:8])
    before = made.squares.clone()
    made.learn(x[8:], y[8:])
    rows = made.rows(x[8:])[0]
    assert torch.allclose(made.squares[0], 0.5 * before[0] + rows.T @ rows, atol=1e-5)


def test_the_fast_level_learns_what_the_slow_one_left_before_the_chunk():
    made, (x, y) = chain([math.inf, 100.0]), data(20)
    made.learn(x[:10], y[:10])
    said, held = made.answers(x[10:])[0], made.products[1].clone()
    made.learn(x[10:], y[10:])
    left = torch.nn.functional.one_hot(y[10:], 3) - said
    stay = 0.5 ** (10 / 100)
    wanted = stay * held + made.rows(x[10:])[1].T @ left
    assert torch.allclose(made.products[1], wanted, atol=1e-4)


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_arms_keep_the_same_number_of_numbers(levels):
    width = width_of(levels, 200_000, 77)
    made = Chain(4, 77, [100.0] * levels, width=width, keep=0.1, seed=0)
    assert 0.98 * 200_000 < made.numbers() <= 200_000


def test_every_arm_has_as_many_trials_and_one_level_may_take_any_scale():
    settings = Protocol().settings()
    assert same_number(settings) == Protocol().trials
    alone = {each["slow"] for each in settings["one"]}
    for arm in ("two", "three"):
        for each in settings[arm]:
            assert set(each.values()) <= alone
            assert list(each.values()) == sorted(each.values(), reverse=True)


def test_some_labels_stay_and_the_others_move():
    y = torch.arange(12).repeat(12)
    x = torch.nn.functional.one_hot(y, 12).float()
    phases = moving_labels((x, y), (x, y), 12, 5)
    assert len(phases) == 6
    meanings: dict[int, set[int]] = {}
    taught: dict[int, list[int]] = {}
    for number, phase in enumerate(phases):
        for row, label in zip(phase.x.argmax(1).tolist(), phase.y.tolist(), strict=True):
            meanings.setdefault(row, set()).add(label)
            taught.setdefault(row, []).append(number)
        tested = phase.tests["moves"][0].argmax(1)
        pairs = set(zip(tested.tolist(), phase.tests["moves"][1].tolist(), strict=True))
        now = set(zip(phase.x.argmax(1).tolist(), phase.y.tolist(), strict=True))
        assert pairs <= now, "what moves is tested as it is now"
    stay = [c for c in meanings if meanings[c] == {c} and len(set(taught[c])) == 2]
    assert len(stay) == 6
    assert sum(len(meanings[c]) > 2 for c in meanings) >= 5
    assert sum(len(phase.y) for phase in phases) == len(y)  # every example once


def test_two_levels_keep_what_stays_and_follow_what_moves():
    """On clouds, two levels together reach more than one does, as the study measures it."""
    draw = torch.Generator().manual_seed(2)
    centres, y = torch.randn(12, 8, generator=draw), torch.arange(12).repeat(60)
    x = centres[y] + 0.2 * torch.randn(len(y), 8, generator=draw)

    def score(halves) -> float:
        made = Chain(8, 12, halves, width=width_of(len(halves), 8_000, 12), keep=0.1, seed=0)
        total = 0.0
        for phase in moving_labels((x, y), (x, y), 12, 3):
            for a, b in zip(phase.x.split(16), phase.y.split(16), strict=True):
                made.learn(a, b)
            for inputs, labels in phase.tests.values():
                right = made.answers(inputs).sum(0).argmax(1) == labels
                total += float(right.double().mean()) / 12
        return total

    alone = max(score([half]) for half in (math.inf, 25.0, 50.0, 100.0, 200.0))
    assert score([math.inf, 50.0]) > alone


def test_domains_are_new_text_tested_on_what_follows(shared_data):
    phases = domains(shared_data, 300, 7, tuning=True)
    assert len(phases) == 5
    assert "stays" not in phases[0].tests
    assert all(phase.x.shape == (300, 96) for phase in phases)
    assert len(phases[-1].tests["stays"][1]) == 4 * len(phases[-1].tests["moves"][1])


def test_the_study_names_its_streams():
    study = timescales.study(True)
    assert set(study.tasks) == set(TASKS)
    assert set(study.arms) == set(ARMS)
    with pytest.raises(ValueError, match="halves must be above 0"):
        chain([0.0])


def test_the_page_answers_its_question_first(tmp_path):
    study = timescales.study(False)
    runs = {}
    for seed in study.seeds:
        for arm, score in (("one", 0.60), ("two", 0.65), ("three", 0.55)):
            run = {"task": "domains", "arm": arm, "seed": seed, "setting": {}, "parameters": 9}
            run |= {"seconds": 1.0, "score": score + 0.001 * (seed % 2) * (arm == "two")}
            for kind in ("stays", "moves"):
                lesions = {f"{kind} {each}": score / 2 for each in LESIONS.values()}
                run |= {kind: score if kind == "stays" else 0.5, **lesions}
            runs[f"run/domains/{arm}/{seed}"] = run
    first, second, third = study.page(study, runs).findings
    assert "Two levels" in first
    assert "ahead on 1 of 1 streams (domains: **shown** +5" in first
    assert first.endswith("What moves alone: ahead on 0, behind on 0.")
    assert "ahead on 0 of 1 streams (domains: **refuted** -5.0" in second
    assert "both levels 65.0 on what stays and 50.0" in third
    assert "without the slow one 32.5" in third
