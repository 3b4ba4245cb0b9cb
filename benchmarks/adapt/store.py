"""One JSON file per run, so that a study that was stopped goes on where it was."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Store:
    """The stored results of a study; delete a file to run it again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, key: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The stored result of a run, or the run."""
        path = self.folder / f"{key.replace(' ', '_').replace('/', '-')}.json"
        if path.exists():
            return json.loads(path.read_text())
        begin = time.perf_counter()
        result = run()
        part = path.with_suffix(".part")
        part.write_text(json.dumps(result))
        os.replace(part, path)
        print(f"{key:56} {time.perf_counter() - begin:7.1f} s  {_brief(result)}", flush=True)
        return result

    def put(self, key: str, result: dict[str, Any]) -> None:
        """Keep what a part came to; replaces the old."""
        path = self.folder / f"{key.replace(' ', '_')}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(result))
        os.replace(part, path)


def _brief(result: dict[str, Any]) -> str:
    return "  ".join(f"{k} {v:.4f}" for k, v in result.items() if isinstance(v, float))[:100]
