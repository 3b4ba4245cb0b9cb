"""Stored runs: one JSON file each, so that a study that was stopped goes on where it was.

The folder of a study is scratch; a copy of its runs in one file can lie beside the page made from
them. Where the folder lacks a run, the copy has it: the page can be made again on any machine.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nestling.files import write_atomic

__all__ = ["Store"]

Say = Callable[[str], None]
Run = dict[str, Any]
DIGITS = 6
"""Significant digits of a number in the copy."""


class Store:
    """The runs of a study in a folder; delete a file to run it again.

    say: told the name and the seconds of every run that was made now.
    copy: the file that `gather` writes, and that is asked for runs the folder lacks.
    """

    def __init__(self, folder: Path, say: Say | None = None, *, copy: Path | None = None) -> None:
        self.folder, self.say, self.copy = folder, say, copy

    def get(self, key: str | Sequence[str], run: Callable[[], Run], facts: Any = None) -> Run:
        """The stored result of a run, or the run.

        `key` is a name, or folders and a name. With `facts` (what the run depends on) they are
        kept beside the result, and other facts are another run.
        """
        path = self.path(key, facts)
        if path.is_file():
            return self._load(path)
        if (copied := self._copied().get(self._name(path))) is not None:
            return copied
        begin = time.perf_counter()
        result = run() if facts is None else {"facts": facts, **run()}
        write_atomic(path, (json.dumps(result) + "\n").encode())
        if self.say is not None:
            self.say(
                f"{self._name(path):56} {time.perf_counter() - begin:7.1f} s  {_brief(result)}"
            )
        return result

    def put(self, key: str | Sequence[str], result: Run) -> None:
        """Keep a result; replaces the old."""
        write_atomic(self.path(key), (json.dumps(result) + "\n").encode())

    def path(self, key: str | Sequence[str], facts: Any = None) -> Path:
        """Where the run of this key and these facts lies, or would."""
        *folders, name = [key] if isinstance(key, str) else key
        if facts is not None:
            packed = json.dumps(facts, sort_keys=True).encode()
            name = f"{name}-{hashlib.sha256(packed).hexdigest()[:10]}"
        plain = [part.replace(" ", "_").replace("/", "-") for part in (*folders, name)]
        return self.folder.joinpath(*plain[:-1]) / f"{plain[-1]}.json"

    def read(self, name: str = "") -> Iterator[Run]:
        """All results whose name begins so: those of the copy alone, then the newest last."""
        yield from (run for key, run in self._all().items() if _last(key).startswith(name))

    def gather(self, pack: Callable[[Run], Run | None] = lambda run: run) -> int:
        """Write the copy anew, with what `pack` leaves of each run; how many runs it has."""
        if self.copy is None:
            raise ValueError("this store has no copy; make it with copy=FILE")
        packed = ((key, pack(run)) for key, run in self._all().items())
        runs = {key: _short(run) for key, run in packed if run is not None}
        lines = (f" {json.dumps(key)}: {json.dumps(run)}" for key, run in runs.items())
        write_atomic(self.copy, ("{\n" + ",\n".join(lines) + "\n}\n").encode())
        return len(runs)

    def _all(self) -> dict[str, Run]:
        found = {self._name(path): path for path in self.folder.rglob("*.json")}
        runs = {key: run for key, run in self._copied().items() if key not in found}
        when = {key: (path.stat().st_mtime_ns, path.name) for key, path in found.items()}
        return runs | {key: self._load(found[key]) for key in sorted(found, key=when.__getitem__)}

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).with_suffix("").as_posix()

    def _copied(self) -> dict[str, Run]:
        return self._load(self.copy) if self.copy is not None and self.copy.is_file() else {}

    def _load(self, path: Path) -> Run:
        loaded: Run = json.loads(path.read_text(encoding="utf-8"))
        return loaded


def _last(key: str) -> str:
    return key.rpartition("/")[2]


def _short(value: Any, name: str = "") -> Any:
    """Numbers to a few digits; the facts of a run stay exact."""
    if isinstance(value, dict) and name != "facts":
        return {key: _short(part, key) for key, part in value.items()}
    if isinstance(value, list):
        return [_short(part) for part in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _brief(result: Run) -> str:
    return "  ".join(f"{k} {v:.4f}" for k, v in result.items() if isinstance(v, float))[:100]
