"""Stored runs: one JSON file each, so that a study that was stopped goes on where it was."""

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


class Store:
    """The runs of a study in a folder; delete a file to run it again.

    say: told the name and the seconds of every run that was made now.
    """

    def __init__(self, folder: Path, say: Say | None = None) -> None:
        self.folder, self.say = folder, say

    def get(
        self, key: str | Sequence[str], run: Callable[[], dict[str, Any]], facts: Any = None
    ) -> dict[str, Any]:
        """The stored result of a run, or the run.

        `key` is a name, or folders and a name. With `facts` (what the run depends on) they are
        kept beside the result, and other facts are another run.
        """
        path = self.path(key, facts)
        if path.is_file():
            return self._load(path)
        begin = time.perf_counter()
        result = run() if facts is None else {"facts": facts, **run()}
        write_atomic(path, (json.dumps(result) + "\n").encode())
        if self.say is not None:
            name = str(path.relative_to(self.folder).with_suffix(""))
            self.say(f"{name:56} {time.perf_counter() - begin:7.1f} s  {_brief(result)}")
        return result

    def put(self, key: str | Sequence[str], result: dict[str, Any]) -> None:
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

    def read(self, name: str = "") -> Iterator[dict[str, Any]]:
        """All results whose name begins so, the newest last."""
        found = self.folder.rglob(f"{name}*.json")
        for path in sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name)):
            yield self._load(path)

    def _load(self, path: Path) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return loaded


def _brief(result: dict[str, Any]) -> str:
    return "  ".join(f"{k} {v:.4f}" for k, v in result.items() if isinstance(v, float))[:100]
