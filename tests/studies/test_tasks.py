"""The synthetic tasks are what their descriptions say."""

from __future__ import annotations

import pytest
import torch

from studies.tasks.formal import BIN0, BIN1, IGNORE, LANGUAGES, merge, score, strings
from studies.tasks.recall import accuracy, mqar


def rows(name, lengths=BIN0, count=60):
    drawn = strings(LANGUAGES[name], count, lengths, seed=1)
    for tokens, targets in zip(drawn.tokens, drawn.targets, strict=True):
        real = targets != IGNORE
        yield tokens[real].tolist(), targets[real].tolist()


@pytest.mark.parametrize("name", LANGUAGES)
@pytest.mark.parametrize("lengths", [BIN0, BIN1])
def test_lengths_symbols_and_classes(name, lengths):
    language = LANGUAGES[name]
    for tokens, targets in rows(name, lengths):
        assert lengths[0] <= len(tokens) <= lengths[1]
        assert len(targets) == len(tokens)
        assert 0 <= min(tokens) <= max(tokens) < language.symbols
        assert 0 <= min(targets) <= max(targets) < language.classes


def test_parity_counts_ones_and_ends_even():
    for tokens, targets in rows("parity"):
        assert targets == [int(sum(tokens[: i + 1]) % 2 == 0) for i in range(len(tokens))]
        assert targets[-1] == 1


@pytest.mark.parametrize(("name", "word"), [("(aa)*", "aa"), ("(abab)*", "abab")])
def test_repeated_words(name, word):
    for tokens, targets in rows(name):
        text = "".join("ab"[t] for t in tokens)
        assert text == word * (len(text) // len(word))
        assert targets == [int((i + 1) % len(word) == 0) for i in range(len(text))]


@pytest.mark.parametrize(("name", "letters"), [("a^n b^n", 2), ("a^n b^n c^n", 3)])
def test_blocks_of_letters(name, letters):
    for tokens, targets in rows(name):
        n = len(tokens) // letters
        assert tokens == [i for i in range(letters) for _ in range(n)]
        assert targets[:n] == [0] * n  # a or b
        assert targets[n:-1] == tokens[n + 1 :]  # what must follow
        assert targets[-1] == letters  # the end


def test_shuffled_brackets_say_what_may_close():
    for tokens, targets in rows("shuffle-2"):
        depth = [0, 0]
        for token, target in zip(tokens, targets, strict=True):
            depth[token // 2] += -1 if token % 2 else 1
            assert min(depth) >= 0
            assert target == (depth[0] > 0) + 2 * (depth[1] > 0)
        assert depth == [0, 0]


def test_a_string_counts_only_if_every_position_is_right():
    targets = torch.tensor([[1, 0, IGNORE], [1, 1, 1]])
    assert score(torch.tensor([[1, 0, 5], [1, 0, 1]]), targets) == (0.5, 0.8)


@pytest.mark.parametrize("name", LANGUAGES)
def test_merged_strings_stand_for_all(name):
    given = strings(LANGUAGES[name], 40, (2, 12), seed=3)
    few = merge(given)
    for tokens, targets, row in zip(given.tokens, given.targets, few.row.tolist(), strict=True):
        real = targets != IGNORE
        size = int(real.sum())
        assert few.tokens[row, :size].tolist() == tokens[real].tolist()
        assert few.targets[row, :size].tolist() == targets[real].tolist()
    assert few.weight.sum() == (given.targets != IGNORE).sum()
    assert (few.weight > 0).equal(few.targets != IGNORE)
    # a causal "model": the share of symbol 0 so far; both ways to weigh its sum agree
    model = [(t == 0).double().cumsum(1) for t in (given.tokens, few.tokens)]
    whole = (model[0] * (given.targets != IGNORE)).sum()
    assert torch.isclose(whole, (model[1] * few.weight).sum())


@pytest.mark.parametrize(("name", "rows"), [("(aa)*", 1), ("(abab)*", 1), ("a^n b^n", 6)])
def test_strings_that_begin_others_are_merged(name, rows):
    assert len(merge(strings(LANGUAGES[name], 300, (2, 12), seed=3)).tokens) == rows


def test_same_seed_same_strings():
    one, other = (strings(LANGUAGES["parity"], 9, BIN0, seed=4) for _ in range(2))
    assert torch.equal(one.tokens, other.tokens)


def test_recall_asks_every_key_once_for_its_value():
    task = mqar(5, pairs=7, vocabulary=40, seed=0)
    for tokens, targets in zip(task.tokens.tolist(), task.targets.tolist(), strict=True):
        bound = dict(zip(tokens[:14:2], tokens[1:14:2], strict=True))
        assert len(bound) == 7
        assert max(bound) < 20 <= min(bound.values())
        assert sorted(tokens[14:]) == sorted(bound)
        assert targets == [IGNORE] * 14 + [bound[key] for key in tokens[14:]]
    assert accuracy(task.targets, task.targets) == 1.0
    with pytest.raises(ValueError, match="between 1 and 20"):
        mqar(1, pairs=21, vocabulary=40, seed=0)


def test_recall_among_noise_asks_every_key_once_at_an_even_place():
    task = mqar(5, pairs=7, vocabulary=40, seed=0, length=40)
    assert task.tokens.shape == task.targets.shape == (5, 40)
    assert task.tokens.max() < 40
    for tokens, targets in zip(task.tokens.tolist(), task.targets.tolist(), strict=True):
        bound = dict(zip(tokens[:14:2], tokens[1:14:2], strict=True))
        asked = [place for place, target in enumerate(targets) if target != IGNORE]
        assert min(asked) >= 14
        assert all(place % 2 == 0 for place in asked)
        assert {tokens[place]: targets[place] for place in asked} == bound
    noise = task.tokens[:, 14:][task.targets[:, 14:] == IGNORE]
    assert (noise < 20).any()
    assert (noise >= 20).any()
    for length in (26, 41):
        with pytest.raises(ValueError, match=f"even and at least 28.*got {length}"):
            mqar(1, pairs=7, vocabulary=40, seed=0, length=length)
