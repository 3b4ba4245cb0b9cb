"""There is one Hope: what a study changes of it is width, depth, heads, vocabulary or length."""

from __future__ import annotations

import pytest

from nestling.models import presets
from studies import (
    ablations,
    babilong,
    default,
    formal,
    levels_chunks,
    lm,
    mad,
    niah,
    queue,
    recall,
)
from studies.__main__ import STUDIES
from studies.older import formal as older_formal
from studies.older import lm as older_lm
from studies.older import recall as older_recall

NEW = {
    "lm": (default.ARMS, lm.SIZES["3M"]),
    "formal": (formal.ARMS, formal.SIZE),
    "recall": (default.ARMS, recall.FORMS["noise, state 64x64"].size),
    "mad": (default.ARMS, mad.Protocol().size(mad.TASKS["copying"])),
    "ablations": (ablations.ARMS, lm.SIZES["1M"]),
    "babilong": (default.ARMS, babilong.SIZE),
    "niah": (default.ARMS, niah.SIZE),
    "context": (default.ARMS, lm.SIZES["1M"]),
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
    size = lm.SIZES["1M"]
    assert default.deviations(presets.configure(size, "hope", topology="parallel")) == {
        "topology": "parallel"
    }
    other = presets.configure(size, "hope", mixer_options={"self_modifying": {"chunk": 1}})
    assert set(default.deviations(other)) == {"mixer_options"}
    wide = presets.configure(size, "hope", hidden_size=64, vocab_size=99, num_hidden_layers=2)
    assert default.deviations(wide) == {}


def test_every_study_of_the_queue_is_compared():
    assert set(queue.QUEUE) - set(NEW) == {"optimizers", "facts"}  # which have no Hope
    assert {name for name in STUDIES if name.startswith("older.")} == set(default.OLDER)


def older_arms(study: str) -> dict[str, dict]:
    """What each Hope of an older study changes."""
    if study == "older.lm":
        given = {a: f for a, (name, f) in older_lm.ARMS.items() if name == "hope"}
        size, tied = older_lm.SIZE, {}
    elif study == "older.formal":
        given = {
            arm: {"mixer_options": {"self_modifying": _without(options, "heads")}}
            for arm, (name, options) in older_formal.MODELS.items()
            if name == "hope"
        }
        size, tied = older_formal.SIZE, {"tie_word_embeddings": False}
    else:
        given = {
            arm: {"mixer_options": {"self_modifying": options}, **fields}
            for arm, (name, _, options, fields) in older_recall.ARMS.items()
            if name == "hope"
        }
        size, tied = older_recall.BARE.size, {}
    made = {a: presets.configure(size, "hope", **{**tied, **f}) for a, f in given.items()}
    return {arm: default.deviations(config) for arm, config in made.items()}


def _without(options: dict, name: str) -> dict:
    return {key: value for key, value in options.items() if key != name}


@pytest.mark.parametrize("study", default.OLDER)
def test_the_list_of_older_forms_can_only_become_shorter(study):
    known = {
        "older.formal": {"hope", "hope_two", "hope_erasing", "hope_forgetting", "hope_printed"},
        "older.recall": {"hope_values", "hope_static", "hope_steered", "hope", "hope_small"},
        "older.lm": {"hope_parallel", "hope_gated", "hope_parallel_gated", "hope_printed"},
    }
    listed = set(default.OLDER[study])
    assert listed <= known[study], "an older study cannot gain another form of Hope"
    assert {arm for arm, changed in older_arms(study).items() if changed} == listed
