"""Where text comes from: files, folders, JSON lines, Hugging Face data sets, the built-in corpus.

Every source is read as a stream of pieces of documents, so memory grows neither with the corpus
nor with its longest text file.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from nestling.train.builtin_text import chronicles

__all__ = ["BUILTIN", "Corpus", "read_text"]

BUILTIN = "builtin"
TEXT = (".txt", ".text", ".md", ".rst", ".py", ".tex")
LINES = (".jsonl", ".ndjson")
_OPEN = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_PIECE = 1 << 20  # characters of a text file that are held at once
_LINE = 1 << 26  # characters of one JSON line, at most


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents from one source.

    `source` is a text file, a `.jsonl` file, a folder of them (each may be compressed with gz, bz2
    or xz), `hf:NAME` or `hf:NAME:CONFIG` for a streamed Hugging Face data set,
    `hf:FOLDER` for a local one, or `builtin` for the generated chronicles (`builtin:COUNT` or
    `builtin:FIRST-LAST` for other documents than 0-299).
    A text file is one document unless `separator` cuts it. `field` holds the text of JSON lines.
    """

    source: str = BUILTIN
    separator: str | None = None
    field: str = "text"
    split: str = "train"

    def __iter__(self) -> Iterator[str]:
        """Whole documents."""
        held: list[str] = []
        for text, last in self.pieces():
            held.append(text)
            if last:
                yield "".join(held)
                held = []

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """The documents in pieces of bounded size, each with whether it ends its document.

        A text file without separator is one document; its pieces end at line ends where there are
        any, so that a tokenizer sees whole words.
        """
        name = self.source
        if name == BUILTIN or name.startswith(BUILTIN + ":"):
            first, last = _builtin_range(name)
            yield from _whole(chronicles(last - first + 1, first=first))
        elif name.startswith("hf:"):
            yield from _whole(self._hub(name[3:]))
        else:
            for path in self.files():
                yield from self._file(path)

    def check(self) -> None:
        """Refuse a source that does not exist or is not written as one."""
        name = self.source
        if name == BUILTIN or name.startswith(BUILTIN + ":"):
            _builtin_range(name)
        elif name.startswith("hf:"):
            if not name[3:].strip(" :"):
                raise ValueError(f"{name!r}: expected hf:NAME, hf:NAME:CONFIG or hf:FOLDER")
        else:
            self.files()

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
        """An identity of the content without reading it: names, sizes and times of change."""
        facts: list[object] = [self.source, self.separator, self.field, self.split]
        if not self.source.startswith((BUILTIN, "hf:")):
            for path in self.files():
                stat = path.stat()
                facts.append([str(path.resolve()), stat.st_size, stat.st_mtime_ns])
        return facts

    def _file(self, path: Path) -> Iterator[tuple[str, bool]]:
        with _unpacked(path), _open(path) as file:
            if _kind(path) == "lines":
                yield from _whole(self._json_lines(path, file))
            elif self.separator is None:
                yield from _pieces(file)
            else:
                yield from _whole(_split(file, self.separator))

    def _json_lines(self, path: Path, file: IO[str]) -> Iterator[str]:
        for number, line in enumerate(iter(lambda: file.readline(_LINE + 1), ""), start=1):
            if not line.strip():
                continue
            if len(line) > _LINE:
                raise ValueError(f"{path}, line {number}: more than {_LINE} characters")
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
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
                f"hf:{name} needs the package 'datasets': pip install 'nestling[eval]'"
            ) from error
        try:
            rows = _rows(datasets, name, self.split)
        except (OSError, ValueError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ValueError(f"hf:{name}: cannot open this data set: {reason}") from error
        for row in rows:
            if not isinstance(row.get(self.field), str):
                raise ValueError(f"hf:{name}: no text field {self.field!r}; has {sorted(row)}")
            yield row[self.field]


def _rows(datasets: Any, name: str, split: str) -> Any:
    """The rows of a data set: on the hub, in a folder of files, or saved with `save_to_disk`."""
    if not (Path(name) / "state.json").exists() and not (Path(name) / "dataset_dict.json").exists():
        return datasets.load_dataset(*name.split(":"), split=split, streaming=True)
    found = datasets.load_from_disk(name)
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise ValueError(f"no split {split!r}; has {sorted(found)}")
        return found[split]
    return found


def _builtin_range(name: str) -> tuple[int, int]:
    _, _, span = name.partition(":")
    try:
        if not span:
            return 0, 299
        first, dash, last = span.partition("-")
        low, high = (int(first), int(last)) if dash else (0, int(first) - 1)
        if not 0 <= low <= high:
            raise ValueError
        return low, high
    except ValueError:
        raise ValueError(
            f"{name!r}: expected builtin, builtin:COUNT or builtin:FIRST-LAST"
        ) from None


def _kind(path: Path) -> str | None:
    suffix = path.suffix if path.suffix not in _OPEN else Path(path.stem).suffix
    return "lines" if suffix in LINES else "text" if suffix in TEXT else None


def _open(path: Path, errors: str = "replace") -> IO[str]:
    opener = _OPEN.get(path.suffix, open)
    return opener(path, "rt", encoding="utf-8", errors=errors)  # type: ignore[operator]


def read_text(path: Path) -> str:
    """A whole text file, unpacked where its name says so; ValueError unless it is UTF-8."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        with _unpacked(path), _open(path, errors="strict") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text in UTF-8: {error.reason}") from error


@contextlib.contextmanager
def _unpacked(path: Path) -> Iterator[None]:
    """Inside, a compressed file that is broken is a ValueError that names it."""
    try:
        yield
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if getattr(error, "errno", None) is not None:  # the system's own names the file
            raise
        raise ValueError(f"{path}: cannot be unpacked: {error}") from error


def _whole(texts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    return ((text, True) for text in texts if text)


def _pieces(file: IO[str]) -> Iterator[tuple[str, bool]]:
    """One document in pieces that end at line ends; nothing if it is empty."""
    rest, begun = "", False
    while block := file.read(_PIECE):
        text = rest + block
        cut = text.rfind("\n") + 1 or len(text)
        rest, begun = text[cut:], True
        yield text[:cut], False
    if begun:
        yield rest, True


def _split(file: IO[str], separator: str) -> Iterator[str]:
    """Cut a text at a separator, holding one document at a time."""
    rest = ""
    while piece := file.read(1 << 16):
        *whole, rest = (rest + piece).split(separator)
        yield from (text for text in whole if text.strip())
    if rest.strip():
        yield rest
