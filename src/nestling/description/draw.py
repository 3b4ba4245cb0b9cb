"""The picture of a description: boxes of gradient flow on a frequency axis, the fastest on top."""

from __future__ import annotations

from html import escape

from nestling.description.description import (
    COLUMNS,
    Component,
    Description,
    LevelDescription,
    short,
)
from nestling.description.svg import (
    COLOURS,
    INK,
    QUIET,
    TextLine,
    arrow,
    box,
    document,
    fit,
    loop,
    text,
    wave,
)

WIDTH, LEFT, RIGHT, GAP, BETWEEN = 1180, 190, 24, 14, 34
MIDDLE = LEFT + (WIDTH - LEFT - RIGHT) / 4
PER_LINE, MOST = 4, 8
FROZEN = "#8a94a0"


def picture(description: Description) -> str:
    """The levels as SVG, one row per level, the fastest on top."""
    fast_first = list(reversed(description.levels))
    count = len(fast_first)
    legend = (
        f"{count} level{'s' if count != 1 else ''}, the fastest on top; a round arrow is a gradient"
        " flow of its own, a dashed box has no parameters, an arrow hands state down"
    )
    parts = [
        text(24, 36, fit(description.title, WIDTH - 48, 19, 1)[0], 19, bold=True),
        text(24, 58, legend, 12, QUIET),
    ]
    y = 78.0
    above: set[str] = set()
    for place, level in enumerate(fast_first):
        colour = FROZEN if level.frequency == 0 else COLOURS[place % len(COLOURS)]
        # fewer waves the slower: a picture of the order, not a scale
        cycles = 0.0 if level.frequency == 0 else 14 * 14 ** -(place / max(count - 1, 1))
        drawn, height = _row(level, y, colour, cycles)
        parts += drawn
        if {need for c in level.components for need in c.needs} & above:
            parts.append(arrow(MIDDLE, y - BETWEEN + 4, y - 3, colour))
        above = {component.name for component in level.components}
        y += height + BETWEEN
    for note in description.notes:
        for line in fit(note, WIDTH - 48, 12, 3):
            parts.append(text(24, y, line, 12, QUIET))
            y += 17
    return document(WIDTH, y + 4, parts, description.title)


def _row(level: LevelDescription, y: float, colour: str, cycles: float) -> tuple[list[str], float]:
    shown, hidden = _shown(level)
    columns = min(PER_LINE, max(len(shown) + bool(hidden), 1))
    width = (WIDTH - LEFT - RIGHT - GAP * (columns - 1)) / max(columns, 2)
    contents = [(_lines(c, width), c) for c in shown]
    if hidden:
        contents.append((_more(hidden, width), hidden[0]))
    drawn: list[str] = []
    top = y
    for start in range(0, len(contents), columns):
        line = contents[start : start + columns]
        height = max(sum(size + 4 for _, size, _, _ in lines) for lines, _ in line) + 18
        for place, (lines, component) in enumerate(line):
            x = LEFT + place * (width + GAP)
            dashed = component.kind == "non-parametric"
            drawn.append(
                box(x, top, width, height, lines, colour, title=_tooltip(component), dashed=dashed)
            )
            if component.frequency and not dashed:
                drawn.append(loop(x + width - 18, top + 18, colour))
        top += height + GAP
    drawn += _gutter(level, y, colour, cycles)
    return drawn, max(top - GAP - y, 74)


def _gutter(level: LevelDescription, y: float, colour: str, cycles: float) -> list[str]:
    words = [text(24, y + 18, f"Level {level.number}", 15, colour, bold=True)]
    for place, line in enumerate(fit(level.every, LEFT - 40, 12)):
        words.append(text(24, y + 36 + 15 * place, line, 12, INK))
    return [*words, wave(24, y + 68, LEFT - 54, 12, cycles, colour)]


def _shown(level: LevelDescription) -> tuple[list[Component], list[Component]]:
    """All components, or the largest and the rest."""
    everything = list(level.components)
    if len(everything) <= MOST:
        return everything, []
    largest = sorted(everything, key=lambda c: -(c.parameters + (c.state or 0)))[: MOST - 1]
    return (
        [c for c in everything if c in largest],
        [c for c in everything if c not in largest],
    )


def _lines(component: Component, width: float) -> list[TextLine]:
    room = width - 24
    lines: list[TextLine] = [(line, 13, INK, True) for line in fit(component.name, room - 26, 13)]
    lines += [(line, 11, INK, False) for line in fit(_numbers(component), room, 11)]
    for label, words in (
        ("learns", component.objective),
        ("from", component.context),
        ("transfer", component.transfer),
    ):
        if words:
            lines += [(line, 11, QUIET, False) for line in fit(f"{label}: {words}", room, 11)]
    return lines


def _numbers(component: Component) -> str:
    counts = [f"{component.copies} copies"] if component.copies > 1 else []
    if component.parameters:
        counts.append(f"{short(component.parameters)} parameters")
    elif component.state is None:
        counts.append("state of unknown size")
    elif component.state:
        counts.append(f"{short(component.state)} numbers of state")
    elif component.kind == "non-parametric":
        counts.append("grows with the context")
    return " · ".join(counts)


def _more(hidden: list[Component], width: float) -> list[TextLine]:
    parameters = sum(c.parameters for c in hidden)
    names = ", ".join(c.name for c in hidden)
    return [
        (f"and {len(hidden)} more", 13, INK, True),
        (f"{short(parameters)} parameters", 11, INK, False),
        *((line, 11, QUIET, False) for line in fit(names, width - 24, 11, 3)),
    ]


def _tooltip(component: Component) -> str:
    return "\n".join(
        f"{label}: {words}"
        for label, words in (
            ("component", component.name),
            ("kind", component.kind),
            ("copies", component.copies),
            ("parameters", component.parameters),
            ("state", component.state),
            ("learns", component.objective),
            ("from", component.context),
            ("transfer", component.transfer),
        )
        if words not in ("", 0, None)
    )


def page(description: Description) -> str:
    """The picture and the table as one self-contained HTML page."""
    names = ("level", "updates", *COLUMNS)
    head = "".join(f"<th>{name}</th>" for name in names)
    rows = "".join(
        "<tr>"
        + "".join(
            f'<td data-name="{name}">{escape(cell)}</td>'
            for name, cell in zip(names, row, strict=True)
        )
        + "</tr>"
        for row in description.rows()
    )
    style = (
        "body{font:14px/1.45 'Helvetica Neue',Helvetica,Arial,'Liberation Sans',sans-serif;"
        "margin:2rem auto;max-width:1180px;padding:0 1rem;color:#1d2733}"
        "svg{max-width:100%;height:auto}table{border-collapse:collapse;margin-top:1.5rem;"
        "width:100%}td,th{text-align:left;vertical-align:top;padding:.35rem .6rem;"
        "border-bottom:1px solid #dde2e8}th{color:#5b6875;font-weight:600}"
        "@media(max-width:900px){thead{display:none}tr{display:block;padding:.5rem 0;"
        "border-bottom:1px solid #dde2e8}td{display:block;border:0;padding:.1rem 0;"
        "overflow-wrap:anywhere}td:empty{display:none}"
        "td::before{content:attr(data-name)': ';color:#5b6875}}"
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(description.title)}</title><style>{style}</style></head><body>"
        f"{picture(description)}<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        "</body></html>\n"
    )
