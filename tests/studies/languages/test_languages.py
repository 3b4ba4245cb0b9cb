"""Languages: loaders, invented languages, chrF, levels in a language model."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from nestling.models import NestlingForCausalLM, byte_tokenizer, presets
from nestling.train.recipe import Data, Model, Recipe, Run
from studies.__main__ import main
from studies.harness.store import Store
from studies.languages.base import Base, load_base, recipe
from studies.languages.study import LEARNERS, Problem, packed, run_all, tables, write_page
from studies.languages.translation import (
    Language,
    chrf,
    cipher,
    indonesian,
    kalamang,
    manchu,
    word_tokenizer,
)
from studies.languages.translator import Translator, levels_of


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
    model = NestlingForCausalLM(presets.tiny("hope_attention", hidden_size=16, intermediate_size=8))
    for k in (1, 2, 3):
        groups = levels_of(model, k)
        assert len(groups) == k
        assert all(groups)
        flat = [id(p) for group in groups for p in group]
        assert sorted(flat) == sorted(id(p) for p in model.parameters())
    names = {id(p): name for name, p in model.named_parameters()}
    fast, middle, slow = ([names[id(p)] for p in group] for group in levels_of(model, 3))
    assert fast == ["model.embed_tokens.weight"]
    assert all(".mlps.0." in name or ".mlps.1." in name for name in middle)
    assert {".mlps.2." in name for name in slow} == {True, False}  # mixers and norms as well


def test_levels_learn_by_their_clock_or_by_a_smaller_rate():
    torch.manual_seed(0)
    fields = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
    base = Base(
        name="m",
        model=NestlingForCausalLM(presets.tiny("hope_attention", **fields)),
        tokenizer=byte_tokenizer(),
    )

    def moved(clock, **options):
        made = Translator(base, clock, lr=1e-3, rows=1, **options)
        made.learn((("ba", "cat"), ("ce", "dog")), epochs=1, seed=0)  # two steps
        pairs = zip(levels_of(made.model, 2), levels_of(base.model, 2), strict=True)
        gaps = [torch.cat([(p - q).flatten() for p, q in zip(*g, strict=True)]) for g in pairs]
        return [float(gap.detach().abs().max()) for gap in gaps]

    fast, slow = moved((1, 2))
    assert 1e-3 < fast < 2.1e-3  # two steps of Adam, and one
    assert 0.9e-3 < slow < 1.1e-3
    assert moved((1, math.inf))[1] == 0
    assert moved((1, 4), by_rate=True)[1] < 0.6e-3


def test_every_learner_gets_as_many_trials():
    pair = cipher("A", 0, train=2, test=1), cipher("B", 1, train=2, test=1)
    for rates in ((0.1,), (0.1, 0.2, 0.3, 0.4)):
        problem = Problem(
            name="x",
            base=("x", lambda: None),
            languages=pair,
            epochs=1,
            rows=1,
            rates=rates,
            shots=tuple(range(len(rates))),
        )
        for learner in LEARNERS:
            trials = [str(setting) for setting in problem.trials(learner)]
            assert len(set(trials)) == len(rates)


def test_a_prompt_holds_whole_pairs():
    torch.manual_seed(0)
    model = NestlingForCausalLM(presets.tiny("hope_attention", num_hidden_layers=1)).eval()
    made = Translator(Base(name="m", model=model, tokenizer=byte_tokenizer()), lr=0.0)
    pairs = [("ba", "cat"), ("ce", "dog"), ("di", "cow")]  # nine bytes each: "ba = cat\n"
    assert made.fitting(pairs, 26) == pairs[:2]
    assert made.fitting(pairs, 27) == pairs


def test_a_model_without_a_continuum_is_refused():
    model = NestlingForCausalLM(presets.tiny("transformer", num_hidden_layers=1))
    base = Base(name="m", model=model, tokenizer=byte_tokenizer())
    with pytest.raises(ValueError, match="continuum memory"):
        Translator(base, (1, 2), lr=1e-3)


def test_a_translator_learns_a_pair_by_heart():
    torch.manual_seed(0)
    fields = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32}
    model = NestlingForCausalLM(presets.tiny("hope_attention", **fields))
    made = Translator(Base(name="m", model=model, tokenizer=byte_tokenizer()), (1, 8), lr=1e-2)
    pairs = (("ba", "cat"), ("ce", "dog"))
    made.learn(pairs, epochs=80, seed=0)
    assert made.translate([s for s, _ in pairs]) == ["cat", "dog"]
    assert made.translate(["ba", "ce", "ba ce"])[:2] == ["cat", "dog"]  # lengths apart


def test_after_a_prompt_no_answer_is_empty():
    torch.manual_seed(2)  # a seed at which the long embedding is wanted, not shunned
    model = NestlingForCausalLM(presets.tiny("hope_attention", num_hidden_layers=1)).eval()
    with torch.no_grad():  # a model that always ends the line first
        model.get_input_embeddings().weight[ord("\n")] *= 100
    made = Translator(Base(name="m", model=model, tokenizer=byte_tokenizer()), lr=0.0)
    sentences = ["ba", "ce", "di", "fo", "gu", "ha"]
    assert "" in made.translate(sentences, limit=3)
    assert "" not in made.translate(sentences, [("ba", "cat")], limit=3)


def test_the_quick_study_is_stored(tmp_path, monkeypatch):
    said: list[str] = []
    store = Store(tmp_path, study="languages")
    run_all(tmp_path, tmp_path, store, seeds=1, quick=True, say=said.append)
    assert len(list(store.named("seed"))) == len(LEARNERS) == len(said)
    monkeypatch.setattr("studies.languages.study._words", pytest.fail)  # not needed
    run_all(tmp_path, tmp_path, store, seeds=1, quick=True)
    text = "\n".join(tables(store, quick=True))
    assert "enciphered, quick: A then B | hope-2" in text
    assert tables(store) == []  # a quick run is no result


def test_claims_about_languages_get_a_verdict(tmp_path):
    store = Store(tmp_path / "runs", study="languages")
    for seed in range(3):
        for learner, kept in (("hope-1", 20.0), ("hope-3", 90.0), ("icl", 10.0)):
            facts = {
                "kind": "translation", "problem": "enciphered", "order": "A then B",
                "setting": {"rate": 0.1}, "learner": learner, "seed": seed,
            }  # fmt: skip
            run = {"first alone": 95.0, "second alone": 95.0, "second at the end": 95.0}
            run["first untaught"] = 10.0
            run["first at the end"] = kept + seed
            store.get(f"{learner}/seed{seed}", lambda run=run: run, facts)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "languages_note.md").write_text("by hand")
    text = write_page(store, tmp_path / "docs").read_text().splitlines()
    assert text[-1] == "by hand"
    store.copy = tmp_path / "docs" / "languages.json"
    assert len(store.gather(packed)) == 9
    lost = Store(tmp_path / "nowhere", copy=store.copy, study="languages")
    assert tables(lost) == tables(store)
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


def test_a_half_trained_base_goes_on_however_its_data_is_spelled(
    shared_data, tmp_path, monkeypatch
):
    monkeypatch.chdir(shared_data.parent)
    plain = recipe(Path(shared_data.name), tmp_path)
    assert plain == recipe(shared_data.resolve(), tmp_path)


def test_a_base_killed_while_it_was_exported_is_made_whole(tmp_path):
    """Whatever an export left behind, the next start ends with the same model."""
    plan = Recipe(
        model=Model(preset="tiny", name="hope", fields={"num_hidden_layers": 1}),
        data=Data(
            train=("builtin:20",),
            valid=("builtin:300-302",),
            length=64,
            cache=str(tmp_path / "corpora"),
        ),
        run=Run(steps=4, rows=4, eval_every=4, save_every=4, keep=1),
    )
    made = load_base(plan, tmp_path / "base").model
    first = [weight.detach().clone() for weight in made.parameters()]
    del made  # its weights are read from the file that is harmed below
    folder = tmp_path / "base" / "model"
    wanted = {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "kept.json"}
    weights = next(folder.glob("*.safetensors"))
    for harm in ("cut", "gone", "unsealed"):
        if harm in ("cut", "gone"):
            begin = weights.read_bytes()[:100]
            weights.unlink()
            if harm == "cut":
                weights.write_bytes(begin)
        else:
            (folder / "kept.json").unlink()
        again = load_base(plan, tmp_path / "base")
        assert {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "kept.json"} == wanted
        for one, other in zip(first, again.model.parameters(), strict=True):
            assert torch.equal(one, other), harm


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--seeds", "0"], "--seeds must be at least 1"), (["--report"], "no finished runs yet")],
)
def test_mistakes_end_in_one_line(words, said, capsys, tmp_path):
    places = ["--out", str(tmp_path), "--runs", str(tmp_path)]
    assert main(["languages", *words, *places]) == 2
    assert said in capsys.readouterr().err
