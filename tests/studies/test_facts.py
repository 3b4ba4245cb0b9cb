"""Study C: its texts are in no other table, and its curves are read as the protocol says."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nestling.evaluate.facts import make_questions
from studies import facts
from studies.adapt import tuned
from studies.adapt.texts import Base, book
from studies.tasks.made_up import FORMS, made_up, passage

BEFORE = {"recall": 0.25, "new": 4.0, "old": 3.0}


def point(recall: float, new: float, old: float) -> dict[str, float]:
    return {"recall": recall, "new": new, "old": old}


def test_made_up_texts_are_the_same_every_time_and_full_of_facts():
    for form in range(len(FORMS)):
        text = made_up(3, form)
        assert text == made_up(3, form) != made_up(4, form)
        assert "{" not in text
        assert len(make_questions(text)) >= facts.Protocol().questions
    with pytest.raises(ValueError, match="form must be from 0 to 5; got 6"):
        made_up(0, len(FORMS))


def test_the_form_of_tuning_and_other_texts_are_in_no_table():
    protocol = facts.Protocol()
    shown = {facts.text_of("made up", seed, facts.Path()) for seed in protocol.seeds}
    assert len(shown) == len(protocol.seeds)
    tuning = facts.text_of("made up", protocol.tuning_seed, facts.Path())
    assert tuning.startswith("The clockmaker of")
    assert not any(text.startswith("The clockmaker of") for text in shown)
    assert not shown & {made_up(1_000 + 10 * s + n, n) for s in protocol.seeds for n in (1, 2)}


def test_passages_are_whole_sentences_with_names(shared_data):
    text = passage(shared_data, 0)
    assert text == passage(shared_data, 0)
    assert text.endswith(".")
    assert 300 < len(text) <= 1100
    assert len(make_questions(text)) >= 8


def test_the_rise_is_interpolated_where_the_curve_first_reaches_a_share():
    points = [point(0.5, 3.0, 3.1), point(0.75, 1.0, 3.3), point(0.7, 0.5, 4.0)]
    assert facts.reached(BEFORE, points, "recall", 0.625) == pytest.approx(0.2)
    assert facts.reached(BEFORE, points, "recall", 0.2) == 0.0
    assert facts.reached(BEFORE, points, "new", 2.0) == pytest.approx(0.2)
    assert math.isnan(facts.reached(BEFORE, points, "recall", 0.8))


def test_every_arm_has_as_many_rates_and_variants():
    assert {len(arm.rates) for arm in facts.ARMS.values()} == {4}
    assert {len(arm.variants) for arm in facts.ARMS.values()} == {3}
    assert set(facts.study().arms) == {"ours", "dynamic", "lora", "full", "ewc", "replay"}
    assert len(facts.study().tasks) * len(facts.study().seeds) >= 8


def test_findings_compare_texts_that_both_arms_reach():
    study = facts.study()

    def run(rise: float, top: float) -> dict:
        return {"before": BEFORE, "points": [point(top, 1.0, 3.0 + rise)], "judged": rise}

    ours = {("made up", seed): run(0.1 + 0.001 * seed, 1.0) for seed in range(4)}
    other = {("made up", seed): run(0.3 + 0.002 * seed, 1.0) for seed in range(3)}
    other["made up", 3] = run(0.0, 0.3)  # never reaches a share, so it does not count
    said = facts._findings(study, {"ours": ours, "dynamic": other})
    assert len(said) == 1
    assert "than with dynamic evaluation: 60%: shown (-" in said[0]
    assert ", 3)" in said[0]


def test_old_text_is_measured_once_for_all_rates(monkeypatch):
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    ids = torch.randint(3, 64, (200,), generator=torch.Generator().manual_seed(0))
    base, made = Base(model, None, ids, ids, book), []
    fisher = tuned._fisher
    monkeypatch.setattr(tuned, "_fisher", lambda *given: made.append(1) or fisher(*given))
    teach = facts.copied(tuned.sgd)
    pupils = [teach(base, rate, 2, decay=0.005) for rate in (0.0, 1e-3)]
    teach(base, 1e-3, 2, decay=0.02)
    assert len(made) == 2
    for pupil in pupils:
        pupil.learn(ids[:70])
    still, moved = (pupil(ids[None, :20]).logits for pupil in pupils)
    assert torch.equal(still, model(ids[None, :20]).logits)
    assert not torch.allclose(moved, still, atol=1e-4)
