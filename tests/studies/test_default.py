"""There is one Hope: what a study changes of it is width, depth, heads, vocabulary or length."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nestling.models import presets
from studies import (
    ablations,
    babilong,
    default,
    formal,
    levels,
    levels_chunks,
    lm,
    mad,
    niah,
    queue,
    recall,
)

NEW = {
    "lm": (default.ARMS, lm.SIZES["3M"]),
    "formal": (formal.ARMS, formal.SIZE),
    "recall": (default.ARMS, recall.FORMS["noise, state 64x64"].size),
    "mad": (default.ARMS, mad.Protocol().size(mad.TASKS["copying"])),
    "ablations": (ablations.ARMS, lm.SIZES["0.3M"]),
    "babilong": (default.ARMS, babilong.SIZE),
    "niah": (default.ARMS, niah.SIZE),
    "context": (default.ARMS, lm.SIZES["0.3M"]),
    "levels_chunks": ({"hope": default.ARMS["hope"]}, levels_chunks.SIZE),
}


@pytest.mark.parametrize("study", NEW)
def test_every_study_has_the_default_hope(study):
    arms, size = NEW[study]
    assert default.deviations(default.configuration(arms["hope"], size)) == {}
    for name, model in arms.items():
        if model.model == "hope" and name != "hope":  # named forms, the same in every study
            assert model in (*default.ARMS.values(), *default.ABLATIONS.values())
            assert default.deviations(default.configuration(model, size))


def test_what_differs_is_seen():
    size = lm.SIZES["0.3M"]
    assert default.deviations(presets.configure(size, "hope", topology="chain")) == {
        "topology": "chain"
    }
    other = presets.configure(size, "hope", mixer_options={"steered": {"clip": 1.0}})
    assert set(default.deviations(other)) == {"mixer_options"}
    wide = presets.configure(size, "hope", hidden_size=64, vocab_size=99, num_hidden_layers=2)
    assert default.deviations(wide) == {}


def test_every_study_of_the_queue_is_compared():
    no_hope, learning = {"optimizers", "facts"}, {"levels", "kept"}  # of the latter below
    assert set(queue.QUEUE) - set(NEW) == no_hope | learning


def test_the_studies_of_levels_have_the_default_hope_and_forms_of_it():
    size = levels.SIZE
    made = {name: default.configuration(arm, size) for name, arm in levels.ARMS.items()}
    for name in ("hope", "hope_bytes", "hope_few"):
        assert default.deviations(made[name]) == {}
    assert default.deviations(made["plain"]) == {"learning": "plain"}
    assert default.deviations(made["every"]) == {"learning_layers": None}
    trained = {name for name, config in made.items() if config.learns_in_training}
    assert trained == {
        "hope", "hope_bytes", "hope_few", "one", "by_rate", "every", "attention",
        "gated_delta_bytes",
    }  # fmt: skip
    for name in ("one", "by_rate"):
        assert set(default.deviations(made[name])) == {"levels"}
    three = made["hope"].memory_levels
    assert len(three) >= 3
    alone, rival = made["one"].memory_levels, made["gated_delta_bytes"].memory_levels
    assert len(alone) == len(rival) == 1
    assert alone == rival
    assert made["gated_delta_bytes"].first_learning == made["hope"].first_learning == 1
    by_rate = made["by_rate"].memory_levels
    assert {level.chunk for level in by_rate} == {three[0].chunk}
    for slow, its in zip(three, by_rate, strict=True):  # as much per token
        assert its.rate / its.chunk == pytest.approx(slow.rate / slow.chunk)
    counts = [presets.parameter_count(config) for config in made.values()]
    assert max(counts) < 1.01 * min(counts)


def test_arms_of_levels_take_equal_compute_and_over_few_books_equal_data():
    protocol = levels.Protocol()
    spent = {n: protocol.steps_of(n, trial=False) * c for n, c in protocol.costs.items()}
    assert set(default.LEVELS) == {
        *protocol.costs, *levels.FROM_LM, "gated_delta_bytes", "attention_plain",
    }  # fmt: skip
    assert protocol.steps_of("gated_delta_bytes", trial=False) == protocol.steps(
        levels.SIZE, trial=False
    )
    assert max(spent.values()) < 1.01 * min(spent.values())
    large = protocol.large_steps("hope") * protocol.large_cost
    assert large == pytest.approx(protocol.large_steps("plain"), rel=0.01)
    few = {protocol.steps_of(name, trial=False) for name in levels.ARMS if name.endswith("_few")}
    assert len(few) == 1


@torch.no_grad()
@pytest.mark.parametrize("arm", ["hope", "gated_delta", "transformer"])
def test_switched_models_have_the_same_weights_and_other_rates(arm):
    torch.manual_seed(0)
    size = replace(levels.SIZE, width=16, layers=1, heads=2, parameters=20_000)
    model = default.build(default.ARMS[arm], size).model.eval()
    ids = torch.randint(0, size.vocabulary, (1, 600))
    still, learning = (default.switched(model, rate)(ids).logits for rate in (0.0, 1.0))
    torch.testing.assert_close(still, model(ids, learn=False).logits)
    first = presets.CONTINUUM["levels"][0]["chunk"]
    torch.testing.assert_close(learning[:, :first], still[:, :first])
    assert not torch.allclose(learning[:, first:], still[:, first:])
    if arm == "hope":
        torch.testing.assert_close(learning, model(ids).logits)


def test_switched_models_may_learn_in_all_layers():
    size = replace(levels.SIZE, width=16, layers=2, heads=2, parameters=20_000)
    model = default.build(default.PLAIN, size).model
    assert default.switched(model, 0.5).config.first_learning == 1
    every = default.switched(model, 0.5, every=True).config
    assert (every.first_learning, every.learning) == (0, "plain")
    rates = [level["rate"] for level in presets.CONTINUUM["levels"]]
    assert [level.rate for level in every.memory_levels] == [rate / 2 for rate in rates]
