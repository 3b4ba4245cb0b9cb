"""Where text comes from: files, folders, JSON lines, Hugging Face data sets, the built-in corpus.

Every source is read as a stream of documents, so memory does not grow with the corpus.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from nestling.train.chronicle import chronicles

__all__ = ["BUILTIN", "Corpus"]

BUILTIN = "builtin"
TEXT = (".txt", ".text", ".md", ".rst", ".py", ".tex")
LINES = (".jsonl", ".ndjson")
_OPEN = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_WHOLE = 1 << 28  # a file without a separator is one document, read in pieces of at most this size


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents from one source.

    `source` is a text file, a `.jsonl` file, a folder of them (each may be compressed with gz, bz2
    or xz), `hf:NAME` or `hf:NAME:CONFIG` for a streamed Hugging Face data set, or `builtin` for the
    generated chronicles (`builtin:COUNT` or `builtin:FIRST-LAST` for other documents than 0-299).
    A text file is one document unless `separator` cuts it. `field` holds the text of JSON lines.
    """

    source: str = BUILTIN
    separator: str | None = None
    field: str = "text"
    split: str = "train"

    def __iter__(self) -> Iterator[str]:
        name = self.source
        if name == BUILTIN or name.startswith(BUILTIN + ":"):
            first, last = _builtin_range(name)
            yield from chronicles(last - first + 1, first=first)
        elif name.startswith("hf:"):
            yield from self._hub(name[3:])
        else:
            for path in self.files():
                yield from self._file(path)

    def files(self) -> list[Path]:
        """The files of a path source, sorted; an error names what is missing."""
        path = Path(self.source).expanduser()
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.is_file() and _kind(p))
            if not found:
                allowed = ", ".join((*TEXT, *LINES))
                raise ValueError(f"{path}: no text in this folder; looked for {allowed} (.gz etc.)")
            return found
        if not path.is_file():
            raise FileNotFoundError(
                f"{path}: no such file or folder; a source is a path, hf:NAME or {BUILTIN}"
            )
        return [path]

    def fingerprint(self) -> list[object]:
        """What identifies the content without reading it: names, sizes and times of change."""
        facts: list[object] = [self.source, self.separator, self.field, self.split]
        if not self.source.startswith((BUILTIN, "hf:")):
            for path in self.files():
                stat = path.stat()
                facts.append([str(path.resolve()), stat.st_size, stat.st_mtime_ns])
        return facts

    def _file(self, path: Path) -> Iterator[str]:
        with _open(path) as file:
            if _kind(path) == "lines":
                yield from self._json_lines(path, file)
            else:
                yield from _split(file, self.separator)

    def _json_lines(self, path: Path, file: IO[str]) -> Iterator[str]:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: not JSON: {error}") from error
            if not isinstance(row, dict) or not isinstance(row.get(self.field), str):
                have = sorted(row) if isinstance(row, dict) else type(row).__name__
                raise ValueError(f"{path}, line {number}: no text field {self.field!r}; has {have}")
            yield row[self.field]

    def _hub(self, name: str) -> Iterator[str]:
        try:
            import datasets
        except ImportError as error:
            raise ValueError(
                f"hf:{name} needs the package 'datasets': pip install nestling[eval]"
            ) from error
        parts = name.split(":")
        for row in datasets.load_dataset(*parts, split=self.split, streaming=True):
            if self.field not in row:
                raise ValueError(f"hf:{name}: no field {self.field!r}; has {sorted(row)}")
            yield row[self.field]


def _builtin_range(name: str) -> tuple[int, int]:
    _, _, span = name.partition(":")
    try:
        if not span:
            return 0, 299
        first, dash, last = span.partition("-")
        return (int(first), int(last)) if dash else (0, int(first) - 1)
    except ValueError:
        raise ValueError(
            f"{name!r}: expected builtin, builtin:COUNT or builtin:FIRST-LAST"
        ) from None


def _kind(path: Path) -> str | None:
    suffix = path.suffix if path.suffix not in _OPEN else Path(path.stem).suffix
    return "lines" if suffix in LINES else "text" if suffix in TEXT else None


def _open(path: Path) -> IO[str]:
    opener = _OPEN.get(path.suffix, open)
    return opener(path, "rt", encoding="utf-8", errors="replace")  # type: ignore[operator]


def _split(file: IO[str], separator: str | None) -> Iterator[str]:
    """Cut a text at a separator, holding one document (or a large piece of it) at a time."""
    if separator is None:
        while text := file.read(_WHOLE):
            yield text
        return
    rest = ""
    while piece := file.read(1 << 16):
        *whole, rest = (rest + piece).split(separator)
        yield from (text for text in whole if text.strip())
    if rest.strip():
        yield rest
