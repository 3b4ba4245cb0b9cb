"""Pages stand alone, and what users wrote cannot break them."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

pytest.importorskip("matplotlib", reason="plots need nestling[report]")

from nestling.report import Line, Page, lines


class Balance(HTMLParser):
    """Fails on tags that do not match."""

    void = frozenset({"meta", "br", "img", "link"})

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_page_is_whole_and_needs_nothing_else(tmp_path):
    page = Page("A <title> & more", "lead")
    page.heading("Results")
    page.text("5 < 6")
    page.table(["", "loss"], [("Hope", 1.5), ("<b>", "2 & 3")])
    svg = lines([Line("Hope", [1, 2, 4], [3, 2, 1], [2, 1, 0], [4, 3, 2])], x="x", y="y")
    page.figure(svg, "a caption")
    page.code("print('<hi>')")
    page.footer("end")
    text = page.save(tmp_path / "deep" / "report.html").read_text()
    parser = Balance()
    parser.feed(text)
    assert parser.open == []
    assert "5 &lt; 6" in text
    assert "<b>" not in text
    outside = re.findall(r'(?:src|href)="([^"#]+)', text)
    assert outside == []
    assert ">Hope</text>" in text, "the line is labelled by its name"


def test_the_same_picture_is_the_same_text():
    drawn = [Line("Hope", [1, 2, 4], [3, 2, 1], [2, 1, 0], [4, 3, 2])]
    assert lines(drawn, x="x", y="y") == lines(drawn, x="x", y="y")


def test_labels_of_lines_that_end_together_do_not_overlap():
    drawn = [Line(f"line {i}", [0, 1], [0, 1 + i * 1e-3]) for i in range(4)]
    svg = lines(drawn, x="x", y="y")
    heights = [
        float(re.search(r'y="([-\d.]+)"|translate\([-\d.]+ ([-\d.]+)\)', part).group(1) or 0)
        for part in re.findall(r"<text[^>]*>line \d</text>", svg)
    ]
    gaps = [abs(a - b) for a, b in zip(sorted(heights), sorted(heights)[1:], strict=False)]
    assert len(heights) == 4
    assert min(gaps) > 8
