"""From text to batches: every token once, in order, the same for any number of processes."""

from __future__ import annotations

import dataclasses
import gzip
import json

import numpy as np
import pytest
import torch

from nestling.losses import IGNORE
from nestling.train.batches import Sequential, Shuffled
from nestling.train.builtin_text import chronicle
from nestling.train.corpus import Corpus
from nestling.train.packed import PackedCorpus, prepare


class Bytes:
    """The smallest encoder."""

    vocab_size, eos_token_id = 257, 256

    def encode(self, text):
        return list(text.encode())

    def fingerprint(self):
        return "bytes"


def pack(tmp_path, *texts, **options):
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return prepare([Corpus(source=str(file))], Bytes(), tmp_path / "cache", **options)


def test_sources_are_read_alike(tmp_path):
    (tmp_path / "a.txt").write_text("one<|>two<|>")
    with gzip.open(tmp_path / "b.txt.gz", "wt") as file:
        file.write("three")
    (tmp_path / "c.jsonl").write_text('{"text": "four"}\n\n{"text": "five"}\n')
    (tmp_path / "ignored.bin").write_bytes(b"\x00")
    texts = list(Corpus(source=str(tmp_path), separator="<|>"))
    assert texts == ["one", "two", "three", "four", "five"]
    assert list(Corpus(source="builtin:3-4")) == [chronicle(3), chronicle(4)]


def test_bad_sources_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.txt: no such file"):
        list(Corpus(source=str(tmp_path / "nowhere.txt")))
    with pytest.raises(ValueError, match="no text in this folder"):
        list(Corpus(source=str(tmp_path)))
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "ok"}\n{"body": "x"}\n')
    with pytest.raises(ValueError, match=r"line 2: no text field 'text'; has \['body'\]"):
        list(Corpus(source=str(bad)))
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    with pytest.raises(ValueError, match=r"no text in .*empty\.txt"):
        prepare([Corpus(source=str(empty))], Bytes(), tmp_path / "cache")
    with pytest.raises(ValueError, match="expected builtin"):
        list(Corpus(source="builtin:x"))


@pytest.mark.parametrize("workers", [1, 2])
def test_packing_is_exact_and_done_once(tmp_path, workers):
    texts = ["abc", "", "de" * 500_000, "f"]
    seen = []
    packed = pack(tmp_path, *texts, workers=workers, progress=lambda d, t: seen.append((d, t)))
    full = [t for t in texts if t]
    assert packed.documents == len(full)
    for i, text in enumerate(full):
        ids = packed.tokens[packed.starts[i] : packed.starts[i + 1]]
        assert bytes(ids[:-1].astype(np.uint8)) == text.encode()
        assert ids[-1] == 256
    assert seen[-1] == (3, len(packed.tokens))
    again = prepare(
        [Corpus(source=str(tmp_path / "corpus.jsonl"))],
        Bytes(),
        tmp_path / "cache",
        progress=lambda *_: pytest.fail("encoded twice"),
    )
    assert again.folder == packed.folder
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [packed.folder.name]


def test_a_cut_packed_corpus_is_refused(tmp_path):
    packed = pack(tmp_path, "abcdef")
    file = packed.folder / "tokens.bin"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(ValueError, match="cut short"):
        PackedCorpus.open(packed.folder)


@pytest.mark.parametrize("cross", [True, False])
def test_shuffled_windows_cover_an_epoch_once_and_predict_the_next_token(tmp_path, cross):
    packed = pack(tmp_path, *(chronicle(i, 200) for i in range(6)))
    batches = Shuffled(packed=packed, rows=4, length=16, cross=cross)
    steps = batches.windows // 4
    targets = []
    for step in range(steps):
        batch = batches(step)
        for ids, after, mask in zip(batch.ids, batch.targets, batch.mask, strict=True):
            n = int(mask.sum())
            assert torch.equal(ids[1:n], after[: n - 1])
            assert bool((after[n:] == IGNORE).all())
            targets += after[:n].tolist()
        assert cross is False or bool(batch.mask.all())
    assert len(targets) >= len(packed.tokens) - packed.documents - 4 * 16
    assert not torch.equal(batches(0).ids, batches(steps + 1).ids)


def test_sequential_rows_read_documents_in_order(tmp_path):
    texts = [chronicle(i, 150 + 60 * i) for i in range(5)]
    packed = pack(tmp_path, *texts)
    batches = Sequential(packed=packed, rows=2, length=32, seed=3)
    for row in range(2):
        heard: list[list[int]] = []
        for step in range(batches.steps_per_epoch):
            batch = batches(step)
            n = int(batch.mask[row].sum())
            if batch.fresh[row]:
                heard.append([int(batch.ids[row, 0])])
            heard[-1] += batch.targets[row, :n].tolist()
        whole = [[*t.encode(), 256] for t in texts]
        assert all(h in whole for h in heard[1:-1])
        assert any(heard[-1] == w[: len(heard[-1])] for w in whole)


@pytest.mark.parametrize("kind", [Shuffled, Sequential])
def test_ranks_share_one_batch(tmp_path, kind):
    packed = pack(tmp_path, *(chronicle(i, 300) for i in range(4)))
    batches = kind(packed=packed, rows=4, length=16)
    for step in (0, 5, 1000):
        whole = batches(step)
        parts = [batches(step, rank, 2) for rank in range(2)]
        for field, name in enumerate(whole._fields):
            assert torch.equal(torch.cat([p[field] for p in parts]), whole[field]), name
    with pytest.raises(ValueError, match="4 rows cannot be split over 3"):
        batches(0, 0, 3)


def test_too_small_corpora_are_named(tmp_path):
    packed = pack(tmp_path, "abc")
    with pytest.raises(ValueError, match="one window needs 17"):
        Shuffled(packed=packed, rows=1, length=16)
    with pytest.raises(ValueError, match="fewer than the 2 rows"):
        Sequential(packed=packed, rows=2, length=16)


def test_a_packed_corpus_is_verified_and_leaves_nothing_behind(tmp_path):
    """Bits, ids beyond the vocabulary, cuts; and what a killed process half made is removed."""
    from nestling.files import BrokenFileError, read_manifest, write_manifest
    from nestling.models.tokenizer import byte_tokenizer
    from nestling.train.corpus import Corpus
    from nestling.train.packed import PackedCorpus, prepare
    from nestling.train.tokenizer import TextEncoder

    killed = tmp_path / ".0123.building"
    killed.mkdir()
    (killed / "tokens.bin").write_bytes(bytes(100))
    corpora, encoder = [Corpus(source="builtin:1")], TextEncoder(byte_tokenizer())
    made = prepare(corpora, encoder, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [made.folder.name]
    for name in ("tokens.bin", "starts.bin", "packed.json"):
        path = made.folder / name
        whole = path.read_bytes()
        for bad in (
            whole[:-8],
            whole + bytes(8),
            b"",
            bytes([whole[0] ^ 1]) + whole[1:],
            whole[:-1] + bytes([whole[-1] ^ 128]),
        ):
            path.unlink()  # not in place: the corpus is mapped
            path.write_bytes(bad)
            with pytest.raises(BrokenFileError):
                PackedCorpus.open(made.folder)
        path.unlink()
        path.write_bytes(whole)
    assert PackedCorpus.open(made.folder).documents == 1
    parts, facts = read_manifest(made.folder, "packed")
    for bad in ([], {}, {**facts, "dtype": "<U2"}, {**facts, "tokens": -1}, {**facts, "x": 1}):
        write_manifest(made.folder, "packed", parts, bad)
        with pytest.raises(BrokenFileError):
            PackedCorpus.open(made.folder)
    write_manifest(made.folder, "packed", parts, facts)
    beyond = dataclasses.replace(made, vocab_size=3)
    with pytest.raises(BrokenFileError, match="beyond the vocabulary of 3"):
        beyond._verify(read_manifest(made.folder, "packed").parts)
