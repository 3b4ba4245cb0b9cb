"""Questions made from a text, and whether a model answers them."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nestling.evaluate.facts import likelihoods, make_questions, recall
from nestling.models.tokenizer import byte_tokenizer

TEXT = """The lighthouse keeper is called Marta Quill. She was born in Eastwick on a Friday in 1931.
Her boat, the old ferry of Captain Rowan, cost 250 crowns. Every Sunday she sails to the island near
Bellhaven and buys 14 eggs from Piers Nolan. The lamp was lit by Doctor Amsel in March."""


def told(text: str = TEXT, **options):
    return {(q.prompt.split()[-1], q.answer): q for q in make_questions(text, **options)}


def test_names_places_dates_and_numbers_are_asked_for():
    asked = told()
    assert asked["called", "Marta Quill"].kind == "name"
    assert asked["in", "Eastwick"].kind == "place"
    assert asked["a", "Friday"].kind == "date"
    assert asked["in", "1931"].kind == "number"
    assert asked["near", "Bellhaven"].kind == "place"
    assert asked["from", "Piers Nolan"].prompt.endswith("and buys 14 eggs from")


def test_a_question_never_tells_its_answer_and_distractors_are_of_its_kind():
    for question in make_questions(TEXT):
        options = (question.answer, *question.distractors)
        assert len(set(options)) == 4
        assert not any(option in question.prompt for option in options)
        if question.kind == "number":
            assert all(option.isdecimal() for option in options)
            assert {len(option) for option in options} == {len(question.answer)}
        else:
            assert not any(option.isdecimal() for option in options)
        assert not any(set(other.split()) & set(question.answer.split()) for other in options[1:])


def test_questions_are_the_same_every_time_and_can_be_fewer():
    assert make_questions(TEXT) == make_questions(TEXT)
    assert make_questions(TEXT) != make_questions(TEXT, seed=1)
    assert len(make_questions(TEXT, most=3)) <= 3
    assert make_questions("nothing here has a name or a number.") == []


@pytest.mark.parametrize("options", [{"distractors": 0}, {"most": 0}])
def test_wrong_counts_are_named(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
        make_questions(TEXT, **options)


def test_recall_counts_what_the_scorer_prefers_per_byte():
    questions = make_questions(TEXT)
    knows = recall(questions, lambda _, options: [0.0, *[-9.0] * (len(options) - 1)])
    assert (knows.right, knows.asked, knows.share) == (len(questions), len(questions), 1.0)
    assert knows.margin > 0
    wrong = recall(questions, lambda _, options: [-9.0, *[0.0] * (len(options) - 1)])
    assert wrong.right == 0
    assert wrong.by_kind.keys() == {q.kind for q in questions}
    # Equal chances per byte: a longer answer is less likely as a whole, and still no worse.
    even = recall(questions, lambda _, options: [-float(len(o.encode())) for o in options])
    assert even.right == 0
    assert even.margin == pytest.approx(0.0)


def test_likelihoods_are_the_sum_over_the_option_alone():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.3,
    )
    model, tokenizer = LlamaForCausalLM(config).double().eval(), byte_tokenizer()
    found = likelihoods(model, tokenizer)("Where is", ["home", "Rome now"])
    for option, score in zip(["home", "Rome now"], found):
        start = len(tokenizer("Where is").input_ids)
        ids = torch.tensor([tokenizer(f"Where is {option}").input_ids])
        with torch.no_grad():
            chances = model(ids).logits[0].double().log_softmax(-1)
        places = range(start, ids.shape[1])
        expected = sum(float(chances[place - 1, ids[0, place]]) for place in places)
        assert score == pytest.approx(expected, rel=1e-9)
