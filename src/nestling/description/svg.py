"""Drawing by hand: text that fits, boxes, waves and arrows as SVG elements."""

from __future__ import annotations

import math
import re
from html import escape

CHAR = 0.6
"""Width of a letter in units of the font size, a little more than a sans-serif font needs."""

INK, QUIET, PAPER = "#1d2733", "#5b6875", "#ffffff"
COLOURS = ("#c2410c", "#0369a1", "#4d7c0f", "#7e22ce", "#0f766e", "#9d174d", "#4338ca", "#b45309")
"""Colours of levels, the fastest first; neighbours are easy to tell apart."""
FONT = "font-family=\"'Helvetica Neue', Helvetica, Arial, 'Liberation Sans', sans-serif\""

TextLine = tuple[str, int, str, bool]
"""One line of text: what, size, colour, bold."""


def fit(words: str, width: float, size: int, lines: int = 2) -> list[str]:
    """Break text into at most `lines` lines that fit; what does not fit ends in an ellipsis."""
    room = max(int(width / (CHAR * size)), 4)
    made, current = [], ""
    for piece in re.findall(r"[^\s./_,-]*[./_,-]*\s*|\s+", words):
        while len(piece.rstrip()) > room:
            made.append((current + piece[: room - len(current)]).rstrip())
            current, piece = "", piece[max(room - len(current), 1) :]
        if len((current + piece).rstrip()) > room:
            made.append(current.rstrip())
            current = ""
        current += piece
    made = [line for line in (*made, current.rstrip()) if line]
    if len(made) <= lines:
        return made
    last = made[lines - 1]
    return [*made[: lines - 1], (last if len(last) < room else last[: room - 1]).rstrip() + "…"]


def text(
    x: float,
    y: float,
    words: str,
    size: int,
    colour: str = INK,
    *,
    bold: bool = False,
    at: str = "start",
) -> str:
    """A line of text with its base line at y."""
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="{at}"'
        f"{weight}>{escape(words)}</text>"
    )


def box(
    x: float,
    y: float,
    width: float,
    height: float,
    lines: list[TextLine],
    colour: str,
    *,
    title: str,
    dashed: bool = False,
) -> str:
    """A box with its lines of text and a coloured edge; `title` is its tooltip."""
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    parts = [
        f"<g><title>{escape(title)}</title>"
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="8"'
        f' fill="{PAPER}" stroke="{colour}" stroke-width="1.6"{dash}/>'
    ]
    place = y + 6.0
    for words, size, ink, bold in lines:
        place += size + 4
        parts.append(text(x + 12, place, words, size, ink, bold=bold))
    return "".join(parts) + "</g>"


def loop(x: float, y: float, colour: str) -> str:
    """A round arrow: this box has a gradient flow of its own."""
    return (
        f'<path d="M {x - 6:.1f} {y - 3:.1f} A 7 7 0 1 1 {x - 6:.1f} {y + 4:.1f}" fill="none"'
        f' stroke="{colour}" stroke-width="2"/>'
        f'<path d="M {x - 9.5:.1f} {y + 1:.1f} l 3.2 5.6 l 4.2 -4.6 z" fill="{colour}"/>'
    )


def arrow(x: float, top: float, bottom: float, colour: str) -> str:
    """An arrow downwards."""
    return (
        f'<path d="M {x:.1f} {top:.1f} V {bottom - 8:.1f}" stroke="{colour}" stroke-width="3"/>'
        f'<path d="M {x - 7:.1f} {bottom - 10:.1f} h 14 l -7 10 z" fill="{colour}"/>'
    )


def wave(x: float, y: float, width: float, height: float, cycles: float, colour: str) -> str:
    """A sine wave, or a flat line for no cycles: how often something changes, at a glance."""
    points = [
        (x + width * i / 120, y - height / 2 * math.sin(2 * math.pi * cycles * i / 120))
        for i in range(121)
    ]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>'


def document(width: float, height: float, parts: list[str], title: str) -> str:
    """The elements as one picture."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}"'
        f' width="{width:.0f}" height="{height:.0f}" role="img" {FONT}>'
        f"<title>{escape(title)}</title>"
        f'<rect width="100%" height="100%" fill="#f6f7f9"/>' + "\n".join(parts) + "</svg>\n"
    )
