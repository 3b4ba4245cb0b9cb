"""Real sources: data sets without a network, long files, and memory that stays flat."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from nestling.train import corpus as module
from nestling.train.builtin_text import chronicle
from nestling.train.corpus import Corpus
from nestling.train.packed import prepare
from nestling.train.tokenizer import load_tokenizer

TEXTS = [chronicle(i, 200) for i in range(3)]


@pytest.fixture(scope="module")
def datasets():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("datasets")


@pytest.mark.filterwarnings("ignore")  # the library's own
def test_local_hugging_face_data_sets_are_read_without_a_network(tmp_path, datasets):
    made = datasets.Dataset.from_dict({"text": TEXTS, "number": [0, 1, 2]})
    made.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": made.select([0]), "test": made.select([1, 2])}).save_to_disk(
        tmp_path / "splits"
    )
    folder = tmp_path / "folder"
    folder.mkdir()
    with open(folder / "train.jsonl", "w") as file:
        file.writelines(json.dumps({"body": text}) + "\n" for text in TEXTS)
    assert list(Corpus(source=f"hf:{tmp_path / 'one'}")) == TEXTS
    assert list(Corpus(source=f"hf:{tmp_path / 'splits'}", split="test")) == TEXTS[1:]
    assert list(Corpus(source=f"hf:{folder}", field="body")) == TEXTS
    with pytest.raises(ValueError, match=r"no text field 'number'; has \['number', 'text'\]"):
        list(Corpus(source=f"hf:{tmp_path / 'one'}", field="number"))
    with pytest.raises(ValueError, match=r"no split 'dev'; has \['test', 'train'\]"):
        list(Corpus(source=f"hf:{tmp_path / 'splits'}", split="dev"))
    with pytest.raises(ValueError, match="hf:no/such_set: cannot open this data set"):
        list(Corpus(source="hf:no/such_set"))


def test_a_long_file_is_one_document_however_it_is_cut(tmp_path, monkeypatch):
    text = "".join(chronicle(i, 400) for i in range(4)) + "x" * 300 + "\nend"
    (tmp_path / "book.txt").write_text(text)
    (tmp_path / "empty.txt").write_text("")
    monkeypatch.setattr(module, "_PIECE", 128)
    corpus = Corpus(source=str(tmp_path))
    pieces = list(corpus.pieces())
    assert len(pieces) > 10
    assert max(len(piece) for piece, _ in pieces) < 700
    assert [last for _, last in pieces] == [False] * (len(pieces) - 1) + [True]
    assert list(corpus) == [text]
    encoder = load_tokenizer("bpe:300", [corpus], tmp_path / "cache")
    packed = prepare([corpus], encoder, tmp_path / "cache")
    assert packed.documents == 1
    assert packed.tokens[-1] == encoder.eos_token_id
    assert encoder.tokenizer.decode(packed.tokens[:-1].tolist()) == text


CHILD = """
import sys
from pathlib import Path
import numpy as np
from nestling.train.corpus import Corpus
from nestling.train.packed import prepare


class Bytes:
    vocab_size, eos_token_id = 257, 256

    def encode(self, text):
        return list(text.encode())

    def fingerprint(self):
        return "bytes"


packed = prepare([Corpus(source=sys.argv[1])], Bytes(), Path(sys.argv[2]))
status = dict(line.split(":") for line in open("/proc/self/status"))
print(len(packed.tokens), status["VmHWM"].split()[0])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("kind", ["book.txt", "rows.jsonl"])
def test_preparation_takes_no_more_memory_for_a_larger_corpus(tmp_path, kind):
    """Five times the text, the same peak of a real process to a few megabytes."""
    line = "The valley of Mor is quiet, and the baker keeps a silver bell.\n"
    row = line if kind == "book.txt" else json.dumps({"text": line * 50}) + "\n"
    peaks = []
    for megabytes in (3, 15):
        path = tmp_path / f"{megabytes}-{kind}"
        path.write_text(row * (megabytes * 1_000_000 // len(row)))
        command = [sys.executable, "-c", CHILD, str(path), str(tmp_path / "cache")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        tokens, kilobytes = map(int, said.split())
        assert tokens == pytest.approx(megabytes * 1e6, rel=0.05)
        peaks.append(kilobytes / 1000)
    assert np.diff(peaks) < 8, f"peak memory in MB: {peaks}"
