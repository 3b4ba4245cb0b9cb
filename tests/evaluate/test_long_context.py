"""Long-context tasks: texts in the originals' words, fair places, no leaks, scores as by hand."""

from __future__ import annotations

import itertools
import json
import random
import re
import statistics
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
import torch

from nestling.evaluate import babilong, longhealth, qasper, ruler
from nestling.evaluate.samples import (
    PLAIN_WORDS,
    Books,
    Sample,
    Words,
    parse_lengths,
    sentences,
)
from nestling.evaluate.suites import SUITES, Sources, answer, evaluate, samples
from nestling.models import NestlingForCausalLM, byte_tokenizer, presets

ESSAY = " ".join(f"This is sentence number {n} of the first book." for n in range(400))
OTHER = " ".join(f"Another book says {n} things that nobody wants to know." for n in range(400))
BOOKS = Books((lambda: ESSAY, lambda: OTHER))
STORY = babilong.Story(
    ("John went to the hall.", "Mary went to the garden.", "John moved to the office."),
    "Where is John?",
    "office",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """Everything the suites need, made up."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "babi").mkdir()
    for number, task in enumerate(babilong.TASKS):
        label = babilong.LABELS[task][number % 6]
        rows = [f"1 A fact about the {label}.", f"2 Where? \t{label}\t1"] * 60
        (folder / "babi" / f"{task}_made-up_test.txt").write_text("\n".join(rows))
    (folder / "qasper_leval").mkdir()
    paper = {
        "input": "A paper.\nIt ends.",
        "instructions": ["Who?", "Why?"],
        "outputs": ["I", "so"],
    }
    (folder / "qasper_leval" / "papers.jsonl").write_text(json.dumps(paper) + "\n")
    found = Sources.load(folder)
    return Sources(words=PLAIN_WORDS, books=BOOKS, babi=found.babi, qasper=found.qasper)


def one(task: str, length: int, seed: int = 0) -> Sample:
    return ruler.sample(task, length, seed, words=PLAIN_WORDS, books=BOOKS)


# Golden texts: written by hand from the formats, with the random parts filled in.

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def test_a_single_needle_in_noise_word_for_word():
    sample = one("s1", 900)
    (value,) = sample.answers
    key = re.search(r"magic numbers for (\S+) is: ", sample.text())[1]
    assert re.fullmatch(r"[1-9]\d{6}", value)
    assert re.fullmatch(r"[a-z]+-[a-z]+", key)
    lines = sample.text().split("\n")
    assert lines[0] == (
        "A special magic number is hidden within the following text. Make sure to memorize it."
        " I will quiz you about the number afterwards."
    )
    assert sorted(set(lines[1:-1])) == sorted(
        {NOISE, f"One of the special magic numbers for {key} is: {value}."}
    )
    assert lines[-1] == (
        f"What is the special magic number for {key} mentioned in the provided text?"
        f" The special magic number for {key} mentioned in the provided text is"
    )


def test_four_queries_word_for_word():
    sample = one("mq", 2000)
    text = sample.text()
    needles = dict(re.findall(r"One of the special magic numbers for (\S+) is: (\d{7})\.", text))
    *keys, last = list(needles)
    asked = re.search(r"for (\S+), (\S+), (\S+), and (\S+) mentioned", sample.question).groups()
    assert sorted(asked) == sorted([*keys, last])
    assert sample.answers == tuple(needles[key] for key in asked)
    query = f"{asked[0]}, {asked[1]}, {asked[2]}, and {asked[3]}"
    assert text.startswith("Some special magic numbers are hidden within the following text. Make")
    assert sample.question == (
        f"\nWhat are all the special magic numbers for {query} mentioned in the provided text?"
    )
    assert sample.prefix == (
        f" The special magic numbers for {query} mentioned in the provided text are"
    )
    body = text.split("\n")[1]
    left = re.sub(r" ?One of the special magic numbers for \S+ is: \d{7}\.", "", body).strip()
    assert ESSAY.startswith(left)  # the essay from its first word, untouched but for the needles


def test_needles_stand_after_the_sentence_of_their_depth():
    for seed in range(8):
        sample = one("mk1", 3000, seed)
        body = sample.text().split("\n")[1]
        spoken = list(sentences(body))
        plain = [s for s in spoken if "magic" not in s]
        allowed = {int(len(plain) * depth / 100) for depth in ruler.DEPTHS}
        before = 0
        for sentence in spoken:
            if "magic" in sentence:
                assert before in allowed
            else:
                before += 1


def test_multi_value_and_uuid_needles():
    sample = one("mv", 2000)
    assert len(set(sample.answers)) == 4
    assert len(set(re.findall(r"numbers for (\S+) is:", sample.text()))) == 1
    assert sample.text().startswith("Some special magic numbers are")
    form = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
    assert re.fullmatch(form, one("s3", 2000).answers[0])
    hay = one("mk3", 2000)
    lines = hay.text().split("\n")[1:-1]
    assert all(
        re.fullmatch(f"One of the special magic uuids for {form} is: {form}.", x) for x in lines
    )
    assert lines[0] != lines[1]


def test_a_chain_of_variables_word_for_word():
    sample = one("vt", 3000)
    example, text = sample.text().split("\n\n\n\n")
    names = sample.answers
    value = re.search(r"the value (\d{5}) in", sample.question)[1]
    assert all(re.fullmatch("[A-Z]{5}", name) for name in names)
    chain = [
        f"VAR {names[0]} = {value}",
        *(f"VAR {b} = VAR {a}" for a, b in itertools.pairwise(names)),
    ]
    places = [text.index(each) for each in chain]
    assert places == sorted(places)
    for each in chain:
        text = text.replace(each, "")
    assert re.fullmatch(
        "Memorize and track the chain\\(s\\) of variable assignment hidden in the following"
        " text.\n\n"
        f"( *{re.escape(NOISE)}\n)+"
        f"\nQuestion: Find all variables that are assigned the value {value} in the text above."
        " Answer: According to the chain\\(s\\) of variable assignment in the text above,"
        f" 5 variables are assgined the value {value}, they are: ",
        text,
    )
    solved = re.findall(r"VAR ([A-Z]{3}) = ", example)
    assert len(solved) == 5
    assert example.endswith(" they are:  " + " ".join(solved))


@pytest.mark.parametrize(("length", "often", "seldom"), [(2048, 6, 1), (40_000, 30, 3)])
def test_common_words_are_counted_as_told(length, often, seldom):
    sample = one("cwe", length)
    *_, text = sample.text().split("Below is a numbered list of words.")
    listed = re.findall(r"(\d+)\. (\w+)", text.split("\nQuestion: ")[0])
    assert [int(n) for n, _ in listed] == list(range(1, len(listed) + 1))
    counts = Counter(word for _, word in listed)
    assert {word for word, n in counts.items() if n == often} == set(sample.answers)
    assert set(counts.values()) <= {often, seldom}
    assert sample.text().endswith(
        "\nQuestion: What are the 10 most common words in the above list?"
        " Answer: The top 10 words that appear most often in the list are:"
    )


def test_frequent_words_fall_as_the_square_of_their_rank():
    sample = one("fwe", 20_000)
    head, rest = sample.text().split("coded words. ", 1)
    assert head.endswith("Find the three most frequently appeared ")
    words = rest.split("\nQuestion: ")[0].split(" ")
    ranked = Counter(words).most_common()
    assert ranked[0][0] == "..."
    assert tuple(word for word, _ in ranked[1:4]) == sample.answers
    total = ranked[0][1] * 1.6449
    for rank, (_, count) in enumerate(ranked[:6], 1):
        assert abs(count - total / 1.6449 / rank**2) <= 1 + total * 1e-3
    assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked[1:])


def test_facts_keep_their_order_in_a_background_of_exact_length():
    sample = babilong.sample("qa1", 2000, 3, story=STORY, books=BOOKS)
    text = sample.text()
    places = [text.index(fact) for fact in STORY.facts]
    assert places == sorted(places)
    context = text.removeprefix("<context>\n").split("\n</context>\n")[0]
    assert len(" " + context) == 2000 - 300
    for fact in STORY.facts:
        context = context.replace(fact, "")
    book = ESSAY if "sentence number" in context else OTHER
    cut = " ".join(context.split())
    assert cut in book or any(cut.startswith(s) for s in sentences(book))
    assert text.endswith("\n</context>\nQuestion: Where is John?\nAnswer:")
    alone = babilong.sample("qa1", 0, 3, story=STORY, books=BOOKS).text()
    assert alone == (
        "<context>\nJohn went to the hall. Mary went to the garden. John moved to the office.\n"
        "</context>\nQuestion: Where is John?\nAnswer:"
    )


def test_stories_are_cut_at_their_questions():
    text = "1 A went.\n2 B went.\n3 Where is A? \thall\t1\n4 A ran.\n5 Where? \troom\t4\n1 C sat.\n"
    found = list(babilong.parse(text + "2 Who? \tC\t1\n"))
    assert found == [
        babilong.Story(("A went.", "B went."), "Where is A?", "hall"),
        babilong.Story(("A went.", "B went.", "A ran."), "Where?", "room"),
        babilong.Story(("C sat.",), "Who?", "C"),
    ]
    assert babilong.fitting(tuple(found), 300 + 8 * 3) == (found[0], found[2])
    with pytest.raises(ValueError, match="a story of 3 facts does not fit in 310 tokens"):
        babilong.sample("qa1", 310, 0, story=STORY, books=BOOKS)


def test_patients_letters_and_the_real_form(tmp_path):
    sample = longhealth.sample(6000, 1)
    text = sample.text()
    name, date = re.search(r"(?:for|in|on) (\w+ \w+) on ([\d.]+)\?", sample.question).groups()
    letter = next(x for x in text.split("\n\n") if name in x and f"seen on {date}" in x)
    options = dict(re.findall(r"\n([A-E]): (.+)", sample.question))
    assert options[sample.answers[0]] in letter
    body = text.removesuffix(sample.question + sample.prefix)
    assert all(option in body for option in options.values())  # the text names every option
    question = {"question": "Which drug?", "correct": "two"}
    question |= {f"answer_{x}": word for x, word in zip("abcde", "one two three four five".split())}
    patient = {"texts": {"text_0": "Letter.", "text_1": "Another."}, "questions": [question]}
    (tmp_path / "bench.json").write_text(json.dumps({"patient_01": patient}))
    (real,) = longhealth.load(tmp_path / "bench.json")
    assert real.text() == (
        "Letter.\n\nAnother.\n\nQuestion: Which drug?\nA: one\nB: two\nC: three\nD: four\nE: five"
        "\nAnswer:"
    )
    assert real.answers == ("B",)
    question["correct"] = "six"
    (tmp_path / "bench.json").write_text(json.dumps({"patient_01": patient}))
    with pytest.raises(ValueError, match="patient_01: correct='six' is none of the five"):
        list(longhealth.load(tmp_path / "bench.json"))


# Properties

EVERY = [(suite, task) for suite, entry in SUITES.items() for task in entry.tasks]


@pytest.mark.parametrize(("suite", "task"), EVERY)
def test_samples_are_seeded_fit_their_length_and_do_not_leak(suite, task, data):
    length = 6000
    made = list(samples(suite, task, length, data=data, count=4, seed=1))
    again = list(samples(suite, task, length, data=data, count=4, seed=1))
    texts = [sample.text() for sample in made]
    assert texts == [sample.text() for sample in again]  # from the seed
    assert texts[0] == made[0].text()  # and again from the same sample
    if suite != "qasper":
        others = [s.text() for s in samples(suite, task, length, data=data, count=4, seed=2)]
        assert not set(texts) & set(others)
    for sample, text in zip(made, texts):
        assert SUITES[suite].score(sample, " ".join(sample.answers)) == 1
        assert SUITES[suite].score(sample, "") == 0
        end = sample.question + sample.prefix
        if suite == "ruler":
            assert len(text) + sample.answer_tokens <= length
            if task != "cwe":  # for which these word lists are too short
                assert len(text) + sample.answer_tokens > length - 400
            assert all(answer in text.removesuffix(end) for answer in sample.answers)
        if suite != "longhealth":  # whose question lists the options
            words = re.findall(r"\w+", end)
            assert not [a for a in sample.answers if a in words]


def test_the_place_of_a_needle_is_uniform():
    """Depths in ten parts of the text, 400 samples: a chi-square of 9 degrees below its 99.9%."""
    for task in ("s1", "mk2"):
        depths = []
        for seed in range(400):
            sample = one(task, 6000, seed)
            text = sample.text()
            lines = text.split("\n")[1:-1]
            at = next(i for i, line in enumerate(lines) if sample.answers[0] in line)
            depths.append(at / len(lines))
        counts = Counter(min(int(10 * depth), 9) for depth in depths)
        assert sum((counts[i] - 40) ** 2 / 40 for i in range(10)) < 27.9, task
    drawn = Counter()
    for seed in range(400):  # the depth each place came from, four of the forty depths in a part
        body = one("s2", 5000, seed).text().split("\n")[1]
        count, at = body.count("This"), body.split("One of the special magic")[0].count("This")
        (depth,) = (d for d in ruler.DEPTHS if count * d // 100 == at)
        drawn[ruler.DEPTHS.index(depth) // 4] += 1
    assert sum((drawn[i] - 40) ** 2 / 40 for i in range(10)) < 27.9


def test_the_facts_of_a_story_are_uniform():
    depths = []
    for seed in range(300):
        text = babilong.sample("qa1", 3000, seed, story=STORY, books=BOOKS).text()
        depths += [text.index(fact) / len(text) for fact in STORY.facts]
    counts = Counter(min(int(10 * depth), 9) for depth in depths)
    assert sum((counts[i] - 90) ** 2 / 90 for i in range(10)) < 27.9
    assert 0.45 < statistics.mean(depths) < 0.55


def test_the_right_letter_is_uniform():
    counts = Counter(longhealth.sample(4000, seed).answers[0] for seed in range(400))
    assert sum((counts[x] - 80) ** 2 / 80 for x in longhealth.LETTERS) < 18.5


def test_no_distractor_has_a_key_that_is_asked_for():
    few = Words(("red", "blue"), ("cat", "dog", "owl"))
    sample = ruler.sample("mk2", 20_000, 0, words=few, books=BOOKS)
    key = re.search(r"number for (\S+) mentioned", sample.question)[1]
    assert sample.text().count(f"numbers for {key} is:") == 1


def test_a_guess_scores_at_chance(data):
    rng = random.Random(0)
    for task in babilong.TASKS:
        labels = babilong.LABELS[task]
        story = STORY._replace(question="Where?", answer=labels[0])
        sample = babilong.sample(task, 0, 0, story=story, books=BOOKS)
        found = statistics.mean(babilong.score(sample, rng.choice(labels)) for _ in range(3000))
        assert found == pytest.approx(1 / len(labels), abs=0.03)
    made = [longhealth.sample(4000, seed) for seed in range(300)]
    for guess in longhealth.LETTERS:
        found = statistics.mean(longhealth.score(sample, guess) for sample in made)
        assert found == pytest.approx(0.2, abs=0.08)
    found = [ruler.score(one("s1", 1500, s), str(rng.randint(10**6, 10**7))) for s in range(50)]
    assert sum(found) == 0


def test_scores_are_those_counted_by_hand():
    four = one("mq", 2000)
    a, _, c, _ = four.answers
    assert ruler.score(four, f"They are {a}, {c} and 1234567.") == 0.5
    assert ruler.score(one("vt", 3000), " ".join(one("vt", 3000).answers).lower()) == 1
    sample = babilong.sample("qa1", 0, 0, story=STORY, books=BOOKS)
    assert babilong.score(sample, "John is in the OFFICE. Not in the kitchen.") == 1
    assert babilong.score(sample, "office or kitchen") == 0
    assert babilong.score(sample, "in the garage") == 0
    give = STORY._replace(question="Who gave the milk to Bill?", answer="Fred")
    five = babilong.sample("qa5", 0, 0, story=give, books=BOOKS)
    assert babilong.score(five, "Fred gave the milk to Bill") == 1  # the question's do not count
    assert babilong.score(five, "Fred gave the apple to Bill") == 0
    assert qasper.f1("The relu, and a tanh!", "relu, selu, tanh") == pytest.approx(2 * 2 / (3 + 3))
    assert qasper.f1("", "the") == 1
    assert qasper.f1("x", "") == 0
    letter = longhealth.sample(4000, 0)
    assert longhealth.score(letter, f" {letter.answers[0]}: because") == 1
    assert longhealth.score(letter, "ABLE") == 0


def test_bad_requests_are_one_sentence(data, tmp_path):
    with pytest.raises(ValueError, match=r"task must be one of s1, .*got 's4'"):
        one("s4", 1000)
    for task in ruler.TASKS:
        with pytest.raises(ValueError, match=f"{task} does not fit in 150 tokens"):
            one(task, 150)
    with pytest.raises(ValueError, match="letters do not fit in 100 tokens"):
        longhealth.sample(100, 0)
    with pytest.raises(ValueError, match=r"suite must be one of ruler.*got 'rulers'"):
        samples("rulers", "s1", 10, data=data, count=1)
    with pytest.raises(ValueError, match=r"task of ruler must be one of .*got 'qa1'"):
        samples("ruler", "qa1", 10, data=data, count=1)
    with pytest.raises(ValueError, match="this task needs babi"):
        next(samples("babilong", "qa1", 0, data=Sources(books=BOOKS), count=1))
    with pytest.raises(ValueError, match="no adjectivelist"):
        Words.load(tmp_path)
    with pytest.raises(ValueError, match="no books"):
        Books.load(tmp_path)
    with pytest.raises(ValueError, match="got '4kb'"):
        parse_lengths("1k,4kb")
    assert parse_lengths("0k, 512,4k,1M") == [0, 512, 4096, 1024**2]


@pytest.mark.parametrize(
    ("suite", "task"), [("ruler", "s2"), ("ruler", "mk3"), ("babilong", "qa1")]
)
def test_a_long_sample_is_never_in_memory(suite, task, data):
    """Five times the text takes no more of Python's memory."""
    peaks = []
    for length in (100_000, 500_000):
        tracemalloc.start()
        (sample,) = samples(suite, task, length, data=data, count=1)
        size = sum(len(piece) for piece in sample.stream())
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert size > 0.98 * length
    assert peaks[1] < 1.1 * peaks[0] + 10_000


def test_real_data_gives_the_real_tasks(shared_data):
    data = Sources.load(shared_data)
    assert len(data.words.all) == 8166
    (sample,) = samples("babilong", "qa1", 4096, data=data, count=1)
    assert sample.answers[0] in babilong.LABELS["qa1"]
    assert len(babilong.stories(data.babi, "qa1")) == 1000
    assert len(list(qasper.samples(data.qasper))) == 184
    for task in babilong.TASKS:
        answers = {story.answer for story in babilong.stories(data.babi, task)}
        assert answers == set(babilong.LABELS[task])
        asked = babilong.stories(data.babi, task)
        assert not [s for s in asked if s.answer.lower() in re.findall(r"\w+", s.question.lower())]


# Models


@pytest.fixture(scope="module")
def model() -> NestlingForCausalLM:
    torch.manual_seed(0)
    config = presets.tiny(num_hidden_layers=1, intermediate_size=32)
    return NestlingForCausalLM(config).eval()


def test_reading_side_by_side_is_reading_one_by_one(model):
    """And what generate writes after the whole text."""
    tokenizer = byte_tokenizer()
    given = [one("s1", 700), one("s1", 1500, 1), one("vt", 1900)]
    found = answer(model, given, tokenizer, piece=256, tokens=6)
    for sample, text in zip(given, found, strict=True):
        assert answer(model, [sample], tokenizer, piece=999, tokens=6) == [text]
        ids = torch.tensor([list(sample.text().encode())])
        made = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        assert text == tokenizer.decode(made[made != tokenizer.eos_token_id])


def test_levels_learn_from_the_sample_they_read():
    """A learning model answers as `generate` does after learning from the whole text."""
    torch.manual_seed(1)
    levels = [{"name": "fast", "chunk": 32, "rate": 2.0}]
    config = presets.tiny(num_hidden_layers=1, intermediate_size=32, levels=levels)
    learner, tokenizer = NestlingForCausalLM(config).eval(), byte_tokenizer()
    given = [one("s1", 700), one("s1", 900, 1)]
    found = answer(learner, given, tokenizer, piece=128, tokens=6)
    for sample, text in zip(given, found, strict=True):
        ids = torch.tensor([list(sample.text().encode())])
        made = learner.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        assert text == tokenizer.decode(made[made != tokenizer.eos_token_id])
    still = learner(ids, learn=False).logits[0, -1]
    assert not torch.allclose(still, learner(ids).logits[0, -1], atol=1e-3)


def test_a_model_that_knows_the_answer_scores_full_marks(model, monkeypatch, data):
    """One that always goes on with the needle's value scores 100, an untrained one 0."""
    monkeypatch.setattr(
        "nestling.evaluate.suites.answer",
        lambda model, given, tokenizer: [" ".join(sample.answers) for sample in given],
    )
    tokenizer = byte_tokenizer()
    told = list(
        evaluate(model, tokenizer, "ruler", [1500], data=data, tasks=["s1", "mk2"], count=5)
    )
    assert [(r.task, r.length, r.score, r.samples) for r in told] == [
        ("s1", 1500, 100.0, 5),
        ("mk2", 1500, 100.0, 5),
    ]
    monkeypatch.undo()
    (untrained,) = evaluate(model, tokenizer, "ruler", [800], data=data, tasks=["s1"], count=2)
    assert untrained.score == 0


@pytest.mark.filterwarnings("ignore")  # the harness's own
def test_the_harness_runs_the_suites(model, shared_data, tmp_path):
    pytest.importorskip("lm_eval")
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    import nestling.evaluate

    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    facts = {"data": str(shared_data), "samples": 2, "tokenizer": str(tmp_path)}
    facts["max_seq_lengths"] = [1024]
    folder = Path(nestling.evaluate.__file__).parent / "lm_eval_tasks"
    manager = TaskManager(include_path=str(folder), include_defaults=False, metadata=facts)
    names = ["nestling_ruler_s1", "nestling_babilong_qa1"]
    found = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=2048),
        tasks=names,
        task_manager=manager,
        gen_kwargs="max_gen_toks=4",
        log_samples=True,
    )
    assert [found["results"][name]["score,none"] for name in names] == [0, 0]
    document = found["samples"]["nestling_ruler_s1"][0]
    text = document["arguments"][0][0] if isinstance(document["arguments"], list) else str(document)
    assert "special magic number" in text
    assert {"nestling_ruler", "nestling_babilong"} <= set(manager.all_groups)


def test_every_task_has_a_file_for_the_harness():
    import nestling.evaluate

    folder = Path(nestling.evaluate.__file__).parent / "lm_eval_tasks"
    names = {path.stem.removeprefix("nestling_") for path in folder.glob("*.yaml")}
    wanted = {task if suite == task else f"{suite}_{task}" for suite, task in EVERY}
    assert names == wanted | {"ruler", "babilong"}
