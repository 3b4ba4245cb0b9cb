"""Languages: loaders, invented languages, chrF, levels in a language model."""

from __future__ import annotations

import pytest
import torch

from nestling.continual.base import Base
from nestling.continual.study import Store
from nestling.continual.translation import (
    Language,
    chrf,
    cipher,
    indonesian,
    kalamang,
    manchu,
    word_tokenizer,
)
from nestling.continual.translation_page import translation_part
from nestling.continual.translation_study import run_translation
from nestling.continual.translator import Translator, levels_of
from nestling.models import NestlingForCausalLM, byte_tokenizer, presets


def test_kalamang_and_indonesian(shared_data):
    for language in (kalamang(shared_data), indonesian(shared_data)):
        assert (len(language.train), len(language.test)) == (400, 50)
    held_out = set(kalamang(shared_data, valid=True).test)
    for seed in range(3):
        other = kalamang(shared_data, seed=seed, train=2000)
        assert not held_out & {*other.train, *other.test}
    assert kalamang(shared_data, seed=1) != kalamang(shared_data)


def test_the_manchu_loader_reads_the_users_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="the Manchu set needs"):
        manchu(tmp_path)
    (tmp_path / "train.tsv").write_text("manchu\tenglish\nbi genembi\tI go\nsi jimbi\tyou come\n")
    (tmp_path / "test.tsv").write_text("manchu\tenglish\ni jimbi\the comes\n")
    language = manchu(tmp_path)
    assert language.train[0] == ("bi genembi", "I go")
    assert language.test == (("i jimbi", "he comes"),)
    (tmp_path / "test.tsv").write_text("a\tb\n1\t2\n")
    with pytest.raises(ValueError, match="columns manchu and english"):
        manchu(tmp_path)


def test_an_invented_language_is_a_code_for_english():
    language = cipher("A", 3, train=200, test=20)
    assert language == cipher("A", 3, train=200, test=20)
    assert language != cipher("A", 4, train=200, test=20)
    words: dict[str, int] = {}
    for coded, english in language.train:
        assert len(coded.split()) == len(english.split())
        for word in coded.split():
            words[word] = words.get(word, 0) + 1
    assert len(words) > 40
    english = {w for _, e in language.train for w in e.split()}
    assert len(english) == len(words)


def test_test_sentences_must_be_new():
    with pytest.raises(ValueError, match="among the training"):
        Language(name="x", train=(("a", "b"),), test=(("a", "b"),))


def test_chrf_of_the_truth_is_100():
    assert chrf(["the cat sees", "a b c"], ["the cat sees", "a b c"]) == pytest.approx(100.0)
    assert chrf(["zzzz"], ["the cat"]) == 0.0
    with pytest.raises(ValueError, match="1 translations for 0"):
        chrf(["a"], [])


def test_levels_hold_every_weight_once():
    from nestling.models import NestlingForCausalLM, presets

    model = NestlingForCausalLM(presets.tiny("hope_attention", hidden_size=16, intermediate_size=8))
    for k in (1, 2, 3):
        groups = levels_of(model, k)
        assert len(groups) == k
        assert all(groups)
        flat = [id(p) for group in groups for p in group]
        assert sorted(flat) == sorted(id(p) for p in model.parameters())


def test_a_model_without_a_continuum_is_refused(transformer):
    with pytest.raises(ValueError, match="continuum memory"):
        Translator(transformer, 2, lr=1e-3)


def test_a_translator_learns_a_pair_by_heart():
    torch.manual_seed(0)
    fields = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32}
    model = NestlingForCausalLM(presets.tiny("hope_attention", **fields))
    made = Translator(Base(name="m", model=model, tokenizer=byte_tokenizer()), 2, lr=1e-2)
    pairs = (("ba", "cat"), ("ce", "dog"))
    made.learn(pairs, epochs=80, seed=0)
    assert made.translate([s for s, _ in pairs]) == ["cat", "dog"]
    assert made.translate(["ba", "ce", "ba ce"])[:2] == ["cat", "dog"]  # lengths apart


def test_after_a_prompt_no_answer_is_empty():
    torch.manual_seed(0)
    model = NestlingForCausalLM(presets.tiny("hope_attention", num_hidden_layers=1)).eval()
    with torch.no_grad():  # a model that always ends the line first
        model.get_input_embeddings().weight[ord("\n")] *= 100
    made = Translator(Base(name="m", model=model, tokenizer=byte_tokenizer()), 1, lr=0.0)
    sentences = ["ba", "ce", "di", "fo", "gu", "ha"]
    assert "" in made.translate(sentences, limit=3)
    assert "" not in made.translate(sentences, [("ba", "cat")], limit=3)


def test_the_quick_study_is_stored(tmp_path, monkeypatch):
    monkeypatch.setattr("nestling.continual.translation_study.LEARNERS", ("hope-2", "icl"))
    said: list[str] = []
    store = Store(tmp_path)
    run_translation(tmp_path, tmp_path, store, seeds=1, quick=True, say=said.append)
    assert len(list(store.read("seed"))) == 2 == len(said)
    text = "\n".join(translation_part(store, quick=True))
    assert "enciphered, quick: A then B | hope-2" in text
    assert translation_part(store) == []  # a quick run is no result


def test_claims_about_languages_get_a_verdict(tmp_path):
    store = Store(tmp_path)
    for seed in range(3):
        for learner, kept in (("hope-1", 20.0), ("hope-3", 90.0), ("icl", 10.0)):
            facts = {
                "kind": "translation", "problem": "enciphered", "order": "A then B", "rate": 0.1,
                "learner": learner, "seed": seed,
            }  # fmt: skip
            run = {"first alone": 95.0, "second alone": 95.0, "second at the end": 95.0}
            run["first at the end"] = kept + seed
            store.get((learner, f"seed{seed}"), lambda run=run: run, facts)
    text = translation_part(store)
    verdicts = {line.split(" | ")[0]: line for line in text if "**" in line}
    assert "**shown**" in verdicts["| Hope-3 keeps more of the first language than Hope-1"]
    assert "**shown**" in verdicts["| Hope-3 nearly recovers learning alone (over 90%)"]
    assert "**refuted**" in verdicts["| Hope-1 nearly recovers learning alone (over 90%)"]


def test_the_word_tokenizer_knows_every_word():
    tokenizer = word_tokenizer()
    language = cipher("A", 3, train=50, test=5)
    for sentence, english in language.train:
        line = f"{sentence} = {english}\n"
        ids = tokenizer(line, add_special_tokens=False).input_ids
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == f"{sentence} = {english} \n"
