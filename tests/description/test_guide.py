"""The guide docs/nested.md: its code runs, prints what it says, and draws its pictures.

`python tests/description/test_guide.py` writes the printed text and the pictures anew.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
GUIDE = DOCS / "nested.md"
BLOCK = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)


def run(folder: Path) -> list[tuple[str, str]]:
    """Run the guide's blocks in this folder: what each was to print, and what it printed."""
    space: dict[str, object] = {}
    found = []
    with contextlib.chdir(folder):
        for code, told in BLOCK.findall(GUIDE.read_text(encoding="utf-8")):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, str(GUIDE), "exec"), space)
            found.append((told, printed.getvalue()))
    return found


def test_the_guide_prints_and_draws_what_it_shows(tmp_path):
    results = run(tmp_path)
    assert len(results) == GUIDE.read_text().count("```python")
    for told, printed in results:
        assert told == printed
    shown = set(re.findall(r"\(pictures/(\S+)\)", GUIDE.read_text()))
    assert shown == {path.name for path in tmp_path.iterdir()}
    for name in shown - {"timeline.svg"}:  # its bars are floating point numbers
        stored = (DOCS / "pictures" / name).read_text(encoding="utf-8")
        assert stored == (tmp_path / name).read_text(encoding="utf-8"), (
            f"{name} is stale: run python {Path(__file__).name}"
        )
    assert (DOCS / "pictures" / "timeline.svg").exists()


if __name__ == "__main__":
    target = DOCS / "pictures"
    target.mkdir(exist_ok=True)
    scratch = target / "scratch"
    scratch.mkdir(exist_ok=True)
    text = GUIDE.read_text(encoding="utf-8")
    for told, printed in run(scratch):
        text = text.replace(told, printed)
    GUIDE.write_text(text, encoding="utf-8")
    for path in scratch.iterdir():
        os.replace(path, target / path.name)
    shutil.rmtree(scratch)
