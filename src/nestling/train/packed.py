"""Tokens on disk: every document encoded once, memory-mapped from then on.

A packed corpus is a folder named by a fingerprint of its sources and tokenizer, with `tokens.bin`
(little-endian uint16 or uint32), `starts.bin` (int64, where each document starts, and the end) and
`packed.json`. It is made in a temporary folder and renamed when complete, so it is whole or absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from nestling.files import sync_folder
from nestling.train.corpus import Corpus

__all__ = ["Encoder", "PackedCorpus", "prepare"]

FORMAT = 2


class Encoder(Protocol):
    """What packing needs of a tokenizer."""

    vocab_size: int
    eos_token_id: int

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without special tokens."""

    def fingerprint(self) -> str:
        """Changes whenever `encode` could give other tokens."""


@dataclass(frozen=True, kw_only=True)
class PackedCorpus:
    """A packed corpus, memory-mapped: document i is `tokens[starts[i]:starts[i + 1]]`."""

    folder: Path
    tokens: np.ndarray
    starts: np.ndarray
    vocab_size: int

    @property
    def documents(self) -> int:
        return len(self.starts) - 1

    @classmethod
    def open(cls, folder: Path) -> PackedCorpus:
        """Map a packed corpus; an error says what is wrong with the folder."""
        try:
            facts = json.loads((folder / "packed.json").read_text())
            tokens = np.memmap(folder / "tokens.bin", dtype=facts["dtype"], mode="r")
            starts = np.memmap(folder / "starts.bin", dtype="<i8", mode="r")
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{folder}: not a packed corpus: {error}") from error
        if len(tokens) != facts["tokens"] or len(starts) != facts["documents"] + 1:
            raise ValueError(f"{folder}: the packed corpus is cut short; delete the folder")
        return cls(folder=folder, tokens=tokens, starts=starts, vocab_size=facts["vocab_size"])


def prepare(
    corpora: Sequence[Corpus],
    encoder: Encoder,
    cache: Path,
    *,
    workers: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> PackedCorpus:
    """Encode the documents of some sources, in order, once; later calls map the result.

    Every document ends with the tokenizer's end-of-text token. `progress(documents, tokens)` is
    called now and then. Memory stays constant: text is encoded in pieces by `workers` processes
    and appended in order.
    """
    folder = cache / _fingerprint(corpora, encoder)
    if (folder / "packed.json").exists():
        return PackedCorpus.open(folder)
    cache.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=cache, prefix=f".{folder.name}."))
    try:
        _build(building, corpora, encoder, workers, progress)
        try:
            os.rename(building, folder)
        except OSError:  # another process was quicker
            if not (folder / "packed.json").exists():
                raise
        sync_folder(cache)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return PackedCorpus.open(folder)


def _fingerprint(corpora: Sequence[Corpus], encoder: Encoder) -> str:
    facts = [FORMAT, encoder.fingerprint(), [corpus.fingerprint() for corpus in corpora]]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def _build(
    folder: Path,
    corpora: Sequence[Corpus],
    encoder: Encoder,
    workers: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    dtype = "<u2" if encoder.vocab_size <= 1 << 16 else "<u4"
    documents = total = 0
    with contextlib.ExitStack() as stack:
        tokens = stack.enter_context(open(folder / "tokens.bin", "wb"))
        starts = stack.enter_context(open(folder / "starts.bin", "wb"))
        starts.write(np.int64(0).tobytes())
        pieces = (piece for corpus in corpora for piece in corpus.pieces())
        for encoded in _encode_all(pieces, encoder, dtype, workers, stack):
            for ids, last in encoded:
                tokens.write(ids.tobytes())
                total += len(ids)
                if last:
                    documents += 1
                    starts.write(np.int64(total).tobytes())
            if progress is not None:
                progress(documents, total)
        if documents == 0:
            raise ValueError(f"no text in {', '.join(c.source for c in corpora) or 'no sources'}")
        _flush(tokens, starts)
    facts = {
        "format": FORMAT,
        "dtype": dtype,
        "tokens": total,
        "documents": documents,
        "vocab_size": encoder.vocab_size,
    }
    with open(folder / "packed.json", "w") as file:
        json.dump(facts, file)
        file.flush()
        os.fsync(file.fileno())


def _flush(*files: IO[Any]) -> None:
    for file in files:
        file.flush()
        os.fsync(file.fileno())


Piece = tuple[str, bool]  # text, and whether it ends its document
Encoded = list[tuple[np.ndarray, bool]]


def _encode_all(
    pieces: Iterable[Piece],
    encoder: Encoder,
    dtype: str,
    workers: int,
    stack: contextlib.ExitStack,
) -> Iterator[Encoded]:
    groups = _groups(pieces)
    if workers <= 1:
        return (_encode_group((encoder, dtype, group)) for group in groups)
    pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(workers))
    return _bounded(pool, ((encoder, dtype, group) for group in groups), workers * 4)


def _bounded(pool: Any, jobs: Iterator[Any], ahead: int) -> Iterator[Encoded]:
    """Results in order with at most `ahead` jobs in flight (imap would read the whole corpus)."""
    waiting = [pool.apply_async(_encode_group, (job,)) for job in islice(jobs, ahead)]
    while waiting:
        yield waiting.pop(0).get()
        waiting.extend(pool.apply_async(_encode_group, (job,)) for job in islice(jobs, 1))


def _groups(pieces: Iterable[Piece], characters: int = 1 << 18) -> Iterator[list[Piece]]:
    group: list[Piece] = []
    size = 0
    for text, last in pieces:
        group.append((text, last))
        size += len(text)
        if size >= characters:
            yield group
            group, size = [], 0
    if group:
        yield group


def _encode_group(job: tuple[Encoder, str, list[Piece]]) -> Encoded:
    encoder, dtype, pieces = job
    return [
        (np.asarray([*encoder.encode(t), *[encoder.eos_token_id] * last], dtype=dtype), last)
        for t, last in pieces
    ]
