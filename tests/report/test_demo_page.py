"""The demo's report: everything is in it, nothing is fetched, and no two texts share a place."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET

from nestling.description.svg import COLOURS
from nestling.report.demo import demo_page

SVG = "{http://www.w3.org/2000/svg}"
WIDE = 0.56  # of the font size, a letter on average


def pictures(text: str) -> list[ET.Element]:
    return [ET.fromstring(found) for found in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def boxes(root: ET.Element):
    """Every text's rectangle (left, top, right, bottom) and words, as the browser places it."""
    for node in root.iter(f"{SVG}text"):
        words = "".join(node.itertext()).strip()
        if not words:
            continue
        style = node.get("style") or ""
        found = re.search(r"([\d.]+)px", style)
        size = float(node.get("font-size") or (found.group(1) if found else 0))
        assert size > 0, f"no font size: {words}"
        turn = node.get("transform") or ""
        if node.get("x") is not None:
            x, y = float(node.get("x")), float(node.get("y"))
        else:
            x, y = map(float, re.search(r"translate\(([-\d.]+) ([-\d.]+)\)", turn).groups())
        anchor = node.get("text-anchor") or (
            m.group(1) if (m := re.search(r"text-anchor: (\w+)", style)) else "start"
        )
        width = len(words) * WIDE * size
        left = x - {"start": 0, "middle": 0.5, "end": 1}[anchor] * width
        box = (left, y - 0.75 * size, left + width, y + 0.2 * size)
        if re.search(r"rotate\(-90", turn):  # the label of a vertical axis
            box = (x - 0.75 * size, y - width / 2, x + 0.2 * size, y + width / 2)
        yield *box, words


def test_the_report_tells_everything_and_fetches_nothing(results):
    text = str(demo_page(results))
    pace = "Levels, each at its own pace"
    for heading in ("Two models, one diet", "Reading on", "What surprised it", pace):
        assert f"<h2>{heading}</h2>" in text
    assert text.index("Hope, learning 1.003") < text.index("<h2>"), "the result comes first"
    assert len(pictures(text)) == 6
    assert "996,088" in text
    assert re.search(r"<td>fast</td><td>64 bytes</td><td>0.1</td><td>64</td>", text)
    for name, points in results.distances.items():  # picture and table say the same
        (row,) = re.findall(rf"<td>{name}</td>(?:<td>[^<]*</td>){{3}}<td>([^<]*)</td>", text)
        assert row == f"{points[-1][1]:.3f}"
        assert f">distance {row}<" in text
    assert ">path" not in text
    assert ">1 update<" in text
    assert "&lt;rained&gt;" in text
    assert re.findall(r'(?:src|href)="([^"#]+)', text) == []
    assert "https:" not in text
    assert set(re.findall(r"http://[\w./-]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


def test_a_level_has_one_colour_in_every_picture(results):
    text = str(demo_page(results))
    for place, name in enumerate(results.levels):
        inks = re.findall(rf'<text[^>]*?(?:fill="|fill: )(#\w+)[^>]*>{name}</text>', text)
        assert inks == [COLOURS[place]] * 2, name


def overlaps(root: ET.Element) -> list[tuple[str, str]]:
    return [
        (a[4], b[4])
        for a, b in itertools.combinations(boxes(root), 2)
        if not (a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1])
    ]


def test_no_two_texts_of_a_picture_overlap(results):
    seen = 0
    for root in pictures(str(demo_page(results))):
        assert overlaps(root) == []
        seen += len(list(boxes(root)))
    assert seen > 60


def test_overlaps_are_found():
    text = '<text x="{}" y="9" font-size="9">abc</text>'
    two = f'<svg xmlns="{SVG[1:-1]}">{text.format(0)}{text.format(14)}</svg>'
    assert overlaps(ET.fromstring(two)) == [("abc", "abc")]
    assert overlaps(ET.fromstring(two.replace('"14"', '"16"'))) == []


def test_a_report_without_passages_and_samples_is_shorter(results):
    import dataclasses

    short = str(demo_page(dataclasses.replace(results, passages=(), samples={})))
    assert "What surprised it" not in short
    assert "What they write" not in short
