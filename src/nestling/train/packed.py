"""Tokens on disk: every document encoded once, memory-mapped from then on.

A packed corpus is a folder named by a fingerprint of its sources and tokenizer, with `tokens.bin`
(little-endian uint16 or uint32), `starts.bin` (int64, where each document starts, and the end) and
`packed.json`, the manifest of both (`nestling.files`). It is made in a hidden folder and renamed
when complete, so it is whole or absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from nestling.files import (
    BrokenFileError,
    BusyError,
    FilePart,
    expect,
    locked,
    open_regular,
    read_manifest,
    sync_folder,
    write_manifest,
)
from nestling.train.corpus import Corpus
from nestling.train.tokenizer import TextEncoder

FORMAT = 4
_FACTS = {
    "format": {FORMAT},
    "dtype": {"<u2", "<u4"},
    "tokens": int,
    "documents": int,
    "vocab_size": int,
}
_BLOCK = 1 << 22  # bytes that are verified at once, a multiple of every type's size
_PATIENCE = 24 * 3600.0  # seconds to wait for another process that makes the same corpus


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
    def open(cls, folder: Path, *, verify: bool = True) -> PackedCorpus:
        """Map a packed corpus; an error says what is wrong with the folder.

        With `verify` every byte is read once: both checksums must hold, and no token may lie beyond
        the vocabulary.
        """
        manifest = read_manifest(folder, "packed")
        facts = expect(manifest.meta, _FACTS, f"{folder}: not a packed corpus")
        if [part.file for part in manifest.parts] != ["tokens.bin", "starts.bin"]:
            raise BrokenFileError(f"{folder}: not a packed corpus: it names other files")
        maps = []
        kinds = ((facts["dtype"], facts["tokens"]), ("<i8", facts["documents"] + 1))
        for part, (dtype, count) in zip(manifest.parts, kinds, strict=True):
            with open_regular(folder / part.file) as opened:
                size = os.fstat(opened.fileno()).st_size
                if not size == part.bytes == count * np.dtype(dtype).itemsize or not count:
                    raise BrokenFileError(
                        f"{folder / part.file}: {size} bytes, not {count} numbers: the packed"
                        " corpus is cut short; delete the folder"
                    )
                maps.append(np.memmap(opened, dtype=dtype, mode="r"))
        tokens, starts = maps
        made = cls(folder=folder, tokens=tokens, starts=starts, vocab_size=facts["vocab_size"])
        if verify:
            made._verify(manifest.parts)
        return made

    def _verify(self, parts: Sequence[FilePart]) -> None:
        follows, before = True, 0
        for part, numbers in zip(parts, (self.tokens, self.starts), strict=True):
            digest, largest = hashlib.sha256(), 0
            for block in _blocks(self.folder / part.file, numbers.dtype):
                digest.update(block.data)
                largest = max(largest, int(block.max()))
                if numbers is self.starts:
                    follows &= bool(block[0] >= before) and bool((block[1:] >= block[:-1]).all())
                    before = int(block[-1])
            if digest.hexdigest() != part.sha256:
                raise BrokenFileError(
                    f"{self.folder / part.file}: its SHA-256 is not the saved one: the file was"
                    " altered; delete the folder"
                )
            if numbers is self.tokens and largest >= self.vocab_size:
                raise BrokenFileError(
                    f"{self.folder}: token {largest} is beyond the vocabulary of {self.vocab_size}"
                )
        if self.starts[0] != 0 or self.starts[-1] != len(self.tokens) or not follows:
            raise BrokenFileError(f"{self.folder}: its documents do not follow each other")


def _blocks(path: Path, dtype: Any) -> Iterator[np.ndarray]:
    """A file's numbers, some at a time; read, not mapped, so that memory stays flat."""
    with open_regular(path) as file:
        while data := file.read(_BLOCK):
            yield np.frombuffer(data, dtype=dtype)


def prepare(
    corpora: Sequence[Corpus],
    encoder: TextEncoder,
    cache: Path,
    *,
    workers: int = 1,
    progress: Callable[[int, int], None] | None = None,
    verify: bool = True,
) -> PackedCorpus:
    """Encode the documents of some sources, in order, once; later calls map the result.

    Every document ends with the tokenizer's end-of-text token. `progress(documents, tokens)` is
    called now and then. Memory stays constant: text is encoded in pieces by `workers` processes
    and appended in order. Processes that want the same text at once take turns, and what a killed
    one left is removed.
    """
    folder = cache / _fingerprint(corpora, encoder)
    if not (folder / "packed.json").exists():
        cache.mkdir(parents=True, exist_ok=True)
        _sweep(cache)
        with locked(cache, name=f".{folder.name}.lock", wait=_PATIENCE):
            if not (folder / "packed.json").exists():  # nobody made it meanwhile
                build = partial(
                    _build, corpora=corpora, encoder=encoder, workers=workers, progress=progress
                )
                _make(cache, folder, build)
    return PackedCorpus.open(folder, verify=verify)


def _make(cache: Path, folder: Path, build: Callable[[Path], None]) -> None:
    """Build a folder beside its place and rename it, so that it is there whole or not at all."""
    building = cache / f".{folder.name}.building"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    try:
        build(building)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(building, folder)
        sync_folder(cache)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _sweep(cache: Path) -> None:
    """Remove what killed processes left half made (those at work hold their locks)."""
    for building in cache.glob(".*.building"):
        name = building.name.removesuffix(".building")
        with contextlib.suppress(BusyError), locked(cache, name=f"{name}.lock"):
            shutil.rmtree(building, ignore_errors=True)


def _fingerprint(corpora: Sequence[Corpus], encoder: TextEncoder) -> str:
    facts = [FORMAT, encoder.fingerprint(), [corpus.fingerprint() for corpus in corpora]]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def _build(
    folder: Path,
    corpora: Sequence[Corpus],
    encoder: TextEncoder,
    workers: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    dtype = "<u2" if encoder.vocab_size <= 1 << 16 else "<u4"
    documents = total = 0
    with contextlib.ExitStack() as stack:
        tokens = _Hashed(stack.enter_context(open(folder / "tokens.bin", "wb")))
        starts = _Hashed(stack.enter_context(open(folder / "starts.bin", "wb")))
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
        parts = [tokens.finish(), starts.finish()]
    facts = {
        "format": FORMAT,
        "dtype": dtype,
        "tokens": total,
        "documents": documents,
        "vocab_size": encoder.vocab_size,
    }
    write_manifest(folder, "packed", parts, facts)


class _Hashed:
    """A file that is written and hashed at once."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.digest, self.bytes = file, hashlib.sha256(), 0

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.digest.update(data)
        self.bytes += len(data)

    def finish(self) -> FilePart:
        """Make it durable; returns what a manifest says of it."""
        self.file.flush()
        os.fsync(self.file.fileno())
        return FilePart(Path(self.file.name).name, self.bytes, self.digest.hexdigest())


TextPiece = tuple[str, bool]  # text, and whether it ends its document
Encoded = list[tuple[np.ndarray, bool]]


def _encode_all(
    pieces: Iterable[TextPiece],
    encoder: TextEncoder,
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


def _groups(pieces: Iterable[TextPiece], characters: int = 1 << 18) -> Iterator[list[TextPiece]]:
    group: list[TextPiece] = []
    size = 0
    for text, last in pieces:
        group.append((text, last))
        size += len(text)
        if size >= characters:
            yield group
            group, size = [], 0
    if group:
        yield group


def _encode_group(job: tuple[TextEncoder, str, list[TextPiece]]) -> Encoded:
    encoder, dtype, pieces = job
    return [
        (np.asarray([*encoder.encode(t), *[encoder.eos_token_id] * last], dtype=dtype), last)
        for t, last in pieces
    ]
