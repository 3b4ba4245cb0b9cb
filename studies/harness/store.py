"""Stored runs: one JSON file each, so that a study that was stopped goes on where it was.

The folder of a study is scratch. A copy of its runs in one file lies beside the page made from
them; where the folder lacks a run, the copy has it, so the page can be made again on any machine.

A file says which study and which run it holds and carries a checksum. What is read is checked:
a file that was altered, cut, swapped with another, or that names a place outside its folder is
refused with a sentence. Numbers are finite; one that is not is stored by its name ("NaN"), so that
it was meant. Writes are atomic, and a killed one leaves nothing that stays.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nestling.files import BrokenFileError, expect, read_json, write_atomic

__all__ = ["Run", "Store", "checked_key", "key_of", "with_facts"]

Say = Callable[[str], None]
Run = dict[str, Any]
FORMAT = 1
DIGITS = 9
"""Significant digits of a stored number: what a float32 has."""
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def key_of(*parts: str) -> str:
    """A key from free texts: spaces become `_`, slashes inside a part `-`."""
    return "/".join(part.replace(" ", "_").replace("/", "-") for part in parts)


def with_facts(key: str, facts: Any) -> str:
    """A key that tells runs of different facts (what a run depends on) apart."""
    packed = json.dumps(facts, sort_keys=True).encode()
    return f"{key}-{hashlib.sha256(packed).hexdigest()[:10]}"


def checked_key(key: Any, where: object = "a store") -> str:
    """The key, or a ValueError: parts between slashes, none of them empty, `.` or `..`."""
    parts = key.split("/") if isinstance(key, str) else []
    if not parts or any(
        part in ("", ".", "..") or len(quote(part)) > 200 or not part.isprintable()
        for part in parts
    ):
        raise BrokenFileError(
            f"{where}: a run is named {key!r}; names are parts of 1 to 200 printable characters"
            " between slashes, none of them '.' or '..'"
        )
    return str(key)


class Store:
    """The runs of a study in a folder; delete a file to run it again.

    study: its name; files of another study are refused.
    copy: the file that `gather` writes, and that is asked for runs the folder lacks.
    needs: what every run must hold.
    say: told the key and the seconds of every run that was made now.
    """

    def __init__(
        self,
        folder: Path,
        *,
        study: str,
        copy: Path | None = None,
        needs: Collection[str] = (),
        say: Say | None = None,
    ) -> None:
        self.folder, self.study, self.copy, self.say = folder, study, copy, say
        self.needs = frozenset(needs)
        self._copied: dict[str, Run] | None = None

    def path(self, key: str) -> Path:
        """Where the run of this key lies, or would."""
        *folders, name = (quote(part, safe=" ()+,;=^~@") for part in checked_key(key).split("/"))
        return self.folder.joinpath(*folders, f"{name}.json")

    def __contains__(self, key: str) -> bool:
        return self.path(key).exists() or key in self.copied()

    def get(self, key: str, make: Callable[[], Run] | None = None, facts: Any = None) -> Run:
        """The stored run, or the run made now; without `make` it must be there.

        `facts` are kept beside the result, and other facts are another run.
        """
        if facts is not None:
            key = with_facts(key, facts)
        path = self.path(key)
        if path.exists():
            return self._read(path)[1]
        if (copied := self.copied().get(key)) is not None:
            return copied
        if make is None:
            raise KeyError(f"{self.study}: the run {key!r} is not stored")
        begin = time.perf_counter()
        result = self.put(key, make() if facts is None else {"facts": facts, **make()})
        if self.say is not None:
            seconds = time.perf_counter() - begin
            self.say(f"{key:56} {seconds:7.1f} s  {_brief(result)}")
        return result

    def put(self, key: str, run: Run) -> Run:
        """Keep a run, replacing an old one; returns it as it will be read again."""
        path = self.path(key)
        run = {name: _rounded(value, name) for name, value in run.items()}
        self._check(key, run, path)
        write_atomic(path, _written({"study": self.study, "key": key}, "run", _text(_named(run))))
        return run

    def runs(self) -> dict[str, Run]:
        """All runs by key: those of the copy alone, then the folder's, the newest last."""
        found = {path: self._read(path) for path in self._files()}
        order = sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name))
        mine = dict(found[path] for path in order)
        return {key: run for key, run in self.copied().items() if key not in mine} | mine

    def named(self, prefix: str) -> Iterator[Run]:
        """All runs whose last part begins so."""
        found = self.runs().items()
        return (run for key, run in found if key.rpartition("/")[2].startswith(prefix))

    def gather(self, pack: Callable[[Run], Run | None] = lambda run: run) -> dict[str, Run]:
        """Write the copy anew with what `pack` leaves of each run; returns what it holds."""
        if self.copy is None:
            raise ValueError("this store has no copy; make it with copy=FILE")
        packed = ((key, pack(run)) for key, run in self.runs().items())
        runs = {key: run for key, run in packed if run is not None}
        if not runs and not self.copy.exists():
            return {}
        named = {key: _named(run) for key, run in runs.items()}
        write_atomic(self.copy, _written({"study": self.study}, "runs", _lines(named)))
        self._copied = None
        return self.copied()

    def copied(self) -> dict[str, Run]:
        """The runs of the copy."""
        if self._copied is None:
            self._copied = {}
            if self.copy is not None and self.copy.exists():
                self._copied = self._load_copy(self.copy)
        return self._copied

    def _files(self) -> list[Path]:
        found = self.folder.rglob("*.json")
        return [p for p in found if not p.name.startswith(".") and p != self.copy]

    def _read(self, path: Path) -> tuple[str, Run]:
        held = _json(path, {"study": {self.study}, "key": str}, "run", _text)
        key = checked_key(held["key"], path)
        if self.path(key) != path:
            raise BrokenFileError(f"{path}: holds the run {key!r}, which belongs elsewhere")
        self._check(key, held["run"], path)
        return key, _numbered(held["run"])

    def _load_copy(self, path: Path) -> dict[str, Run]:
        runs: dict[str, Run] = _json(path, {"study": {self.study}}, "runs", _lines)["runs"]
        for key, run in runs.items():
            checked_key(key, path)
            self._check(key, run, path)
        return {key: _numbered(run) for key, run in runs.items()}

    def _check(self, key: str, run: Any, path: Path) -> None:
        if not isinstance(run, dict):
            raise BrokenFileError(f"{path}: the run {key!r} is no object")
        if missing := self.needs - set(run):
            raise BrokenFileError(f"{path}: the run {key!r} lacks {', '.join(sorted(missing))}")


def _json(path: Path, head: dict[str, Any], part: str, text: Callable[[Any], str]) -> Any:
    """A file's object, if it is to the byte what `_written` makes of its head and its `part`."""
    found, data = read_json(path)
    form = {"format": {FORMAT}, **head, "check": str, part: dict}
    expect(found, form, path)
    try:
        same = _written({key: found[key] for key in head}, part, text(found[part])) == data
    except ValueError as error:  # a number that is not finite
        raise BrokenFileError(f"{path}: not a JSON file of finite numbers: {error}") from error
    if not same:
        raise BrokenFileError(
            f"{path}: its checksum does not match: the file was altered; delete it to run it again"
        )
    return found


def _written(head: dict[str, Any], part: str, body: str) -> bytes:
    told = {"format": FORMAT, **head, "check": hashlib.sha256(body.encode()).hexdigest()}
    held = f"{{\n{body}\n}}" if part == "runs" else body
    return f'{_text(told)[:-1]}, "{part}": {held}}}\n'.encode()


def _lines(runs: dict[str, Any]) -> str:
    """Several runs in JSON, one on each line."""
    return ",\n".join(f" {_text(key)}: {_text(run)}" for key, run in runs.items())


def _text(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def _rounded(value: Any, name: str = "") -> Any:
    """Numbers to a few digits; the facts of a run stay exact."""
    if isinstance(value, dict) and name != "facts":
        return {str(key): _rounded(part, key) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(part) for part in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _named(value: Any) -> Any:
    """A number that is not finite by its name."""
    if isinstance(value, dict):
        return {key: _named(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_named(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value


def _numbered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbered(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_numbered(part) for part in value]
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


def _brief(result: Run) -> str:
    return "  ".join(f"{k} {v:.4f}" for k, v in result.items() if isinstance(v, float))[:100]
