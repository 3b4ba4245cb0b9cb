"""A page: headings, text, figures and tables in one HTML file without outside references."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from nestling.files import write_atomic

_STYLE = """
:root { --ink: #1d2433; --soft: #5c667a; --line: #e3e7ee; --paper: #fbfbf9; --accent: #0b6e6e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaf0; --soft: #9aa5b8; --line: #2c3444; --paper: #141821; --accent: #4cc2b8; }
  figure { background: #fbfbf9; }
}
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 17px/1.6 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 46rem; margin: 0 auto; padding: 3rem 1.25rem 5rem; }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; margin: 2.5rem 0 .5rem; }
p.lead { color: var(--soft); font-size: 1.1rem; margin-top: 0; }
figure { margin: 1.5rem 0; padding: .5rem; border-radius: .5rem; overflow-x: auto; }
figure svg { width: 100%; height: auto; display: block; }
figure.wide { width: min(74rem, 100vw - 3rem); position: relative; left: 50%;
  transform: translateX(-50%); box-sizing: border-box; }
figcaption { color: #5c667a; font-size: .9rem; padding: .25rem .5rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .45rem .75rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
@media (max-width: 40rem) {
  th, th:first-child, td { padding: .35rem .25rem; font-size: .75rem; line-height: 1.3; }
}
th { color: var(--soft); font-weight: 600; font-size: .9rem; }
pre { background: color-mix(in srgb, var(--line) 55%, transparent); padding: 1rem; overflow-x: auto;
  border-radius: .5rem; white-space: pre-wrap; font-size: .9rem; }
p.marked { line-height: 1.9; border-left: 3px solid var(--line); padding-left: 1rem; }
p.marked b { display: block; color: var(--soft); font-size: .85rem; font-weight: 600; }
p.marked span { border-radius: .2rem; padding: .1rem 0; }
footer { color: var(--soft); font-size: .85rem; margin-top: 3rem; }
"""


class Page:
    """Collects parts in order; `save` writes them as one file that needs nothing else."""

    def __init__(self, title: str, lead: str = "") -> None:
        self.title = title
        self._parts = [f"<h1>{html.escape(title)}</h1>"]
        if lead:
            self._parts.append(f'<p class="lead">{html.escape(lead)}</p>')

    def heading(self, text: str) -> None:
        """Add a section's heading."""
        self._parts.append(f"<h2>{html.escape(text)}</h2>")

    def text(self, text: str) -> None:
        """Add a paragraph."""
        self._parts.append(f"<p>{html.escape(text)}</p>")

    def code(self, text: str) -> None:
        """Add text as it is: a sample, a command."""
        self._parts.append(f"<pre>{html.escape(text)}</pre>")

    def figure(self, svg: str, caption: str, *, wide: bool = False) -> None:
        """Add a picture (SVG) with a caption that says what to see in it.

        wide: it may be wider than the text, where the screen has room.
        """
        body = svg[svg.index("<svg") :]
        label, kind = html.escape(caption), ' class="wide"' if wide else ""
        self._parts.append(f"<figure{kind}>{body}<figcaption>{label}</figcaption></figure>")

    def table(self, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Add a table; the first column is the name of the row."""
        top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>"
            for row in rows
        )
        self._parts.append(f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>")

    def marked(self, title: str, words: Sequence[tuple[str, float]]) -> None:
        """Add a passage whose words are shaded by a value, the largest darkest."""
        most = max((value for _, value in words), default=0.0) or 1.0
        spans = " ".join(
            f'<span style="background:rgba(209,96,45,{0.85 * max(value, 0.0) / most:.2f})">'
            f"{html.escape(word)}</span>"
            for word, value in words
        )
        self._parts.append(f'<p class="marked"><b>{html.escape(title)}</b>{spans}</p>')

    def footer(self, text: str) -> None:
        """Add small print."""
        self._parts.append(f"<footer>{html.escape(text)}</footer>")

    def __str__(self) -> str:
        head = (
            '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f"<title>{html.escape(self.title)}</title><style>{_STYLE}</style>"
        )
        body = "\n".join(self._parts)
        return f'<!doctype html><html lang="en"><head>{head}</head><body><main>{body}</main></body>'

    def save(self, path: Path) -> Path:
        """Write the page; returns where it is."""
        write_atomic(path, (str(self) + "</html>\n").encode())
        return path
