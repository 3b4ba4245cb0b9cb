"""Pictures: well-formed, every text inside its box, no two texts on top of each other."""

from __future__ import annotations

import itertools
import json
import math
import xml.etree.ElementTree as ET

import pytest
import torch
from described import hope
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from nestling.description import Component, Description, describe
from nestling.description.svg import CHAR, COLOURS, fit
from nestling.description.timeline import Timeline
from nestling.levels import Level, LevelUpdate
from nestling.optim import NestedOptimizer
from nestling.paper.nested import NestedSystem
from nestling.paper.nested.training import momentum_problems, sgd_problem
from nestling.report import plots

SVG = "{http://www.w3.org/2000/svg}"


def parse(path):
    root = ET.fromstring(path.read_text(encoding="utf-8"))
    return root, float(root.get("width")), float(root.get("height"))


def extents(root):
    """Every text's rectangle, with letters as wide as the drawing assumes."""
    for node in root.iter(f"{SVG}text"):
        size, x, y = float(node.get("font-size")), float(node.get("x")), float(node.get("y"))
        width = len(node.text) * CHAR * size
        left = x - width / 2 if node.get("text-anchor") == "middle" else x
        yield left, y - 0.8 * size, left + width, y + 0.2 * size, node.text


def check(path):
    root, width, height = parse(path)
    texts = list(extents(root))
    for left, top, right, bottom, words in texts:
        assert left >= 0 and right <= width and top >= 0 and bottom <= height, words  # noqa: PT018
    for a, b in itertools.combinations(texts, 2):
        apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        assert apart, (a[4], b[4])
    for group in root.iter(f"{SVG}g"):
        rect = group.find(f"{SVG}rect")
        x, y = float(rect.get("x")), float(rect.get("y"))
        for left, top, right, bottom, words in extents(group):
            assert left >= x and top >= y, words  # noqa: PT018
            assert right <= x + float(rect.get("width")), words
            assert bottom <= y + float(rect.get("height")), words
    return root


def component(level, place):
    return Component(
        name=f"model.layers.0-99.a_rather_long_name_{level}.part_{place}",
        kind="non-parametric" if place == 2 else "weights",
        clock="step",
        chunk=4**level,
        parameters=10**level,
        state=7,
        objective="an objective that is told at such length that it has to be wrapped",
        context="a context of several words",
        transfer="backpropagation through whatever is there, and beyond",
        copies=100,
    )


@pytest.mark.parametrize("levels", range(1, 9))
@pytest.mark.parametrize("width", [1, 4, 11])
def test_text_does_not_overlap(levels, width, tmp_path):
    parts = [component(i, j) for i in range(levels) for j in range(width)]
    description = Description("a title " * 30, parts, ["a note " * 60])
    root = check(description.draw(tmp_path / "x.svg"))
    titles = [node.text for node in root.iter(f"{SVG}text") if node.text.startswith("Level ")]
    assert titles == [f"Level {n}" for n in range(levels, 0, -1)]


def test_a_hundred_layers_are_one_box(tmp_path):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(100)))
    description = describe(nn.ModuleDict({"layers": model}), torch.optim.AdamW(model.parameters()))
    root = check(description.draw(tmp_path / "x.svg"))
    assert len(list(root.iter(f"{SVG}g"))) == 3  # two moments, one row of layers
    assert [c.copies for c in description.levels[0].components] == [100]


def test_a_page_holds_picture_and_table(tmp_path):
    model = nn.Linear(2, 2)
    page = describe(model, torch.optim.AdamW(model.parameters())).draw(tmp_path / "x.html")
    text = page.read_text()
    assert text.count("<svg") == 1
    assert text.count("<tr>") == 4  # head, two moments, the layer
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")  # nothing is fetched


def test_names_are_escaped(tmp_path):
    description = Description("<b>", [Component(name="<i>&", kind="x", clock="step")])
    check(description.draw(tmp_path / "x.svg"))
    assert "<i>" not in description.draw(tmp_path / "x.html").read_text()


@given(
    words=st.text(alphabet=st.sampled_from("ab ._-,/"), max_size=80),
    width=st.floats(30, 300),
    lines=st.integers(1, 3),
)
def test_fitted_text_fits_and_loses_nothing_it_does_not_say(words, width, lines):
    made = fit(words, width, 12, lines)
    room = max(int(width / (CHAR * 12)), 4)
    assert len(made) <= lines
    assert all(len(line) <= room for line in made)
    if not (made and made[-1].endswith("…")):
        assert "".join("".join(made).split()) == "".join(words.split())


# ------------------------------------------------------------------ the timeline


def test_a_timeline_of_a_nested_system_counts_what_describe_says(tmp_path):
    def loss(own, item):
        return (own["w"] - item).square().sum()

    fast = sgd_problem("fast", {"w": torch.zeros(2)}, loss, rate=0.1)
    slow = momentum_problems(
        sgd_problem("slow", {"w": torch.zeros(2)}, loss, rate=0.1, chunk=8), decay=0.5, rate=0.1
    )
    system = NestedSystem([fast, *slow])
    _, ticks = system.run(torch.randn(64, 2))
    timeline = Timeline()
    timeline.extend(update for tick in ticks for update in tick.updates)
    for part in describe(system).components:
        assert timeline.frequency(part.name) == part.frequency
    assert timeline.levels[0] == "fast"
    check(timeline.draw(tmp_path / "x.svg"))
    with pytest.raises(ValueError, match=r"must end in .svg"):
        timeline.draw(tmp_path / "x.png")


def test_a_timeline_notices_by_itself_who_changed(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = NestedOptimizer(
        [
            (Level(name="fast", chunk=1), model[0].parameters(), lambda p: torch.optim.SGD(p, 0.1)),
            (Level(name="slow", chunk=4), model[1].parameters(), lambda p: torch.optim.SGD(p, 0.1)),
        ]
    )
    timeline = Timeline()
    first = [p.detach().clone() for p in model[1].parameters()]
    watch = timeline.watch({"fast": model[0].parameters(), "slow": model[1].parameters()})
    for step in range(1, 13):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        before = [p.detach().clone() for p in model[1].parameters()]
        optimizer.step()
        changed = watch(step)
        assert changed == (["fast", "slow"] if step % 4 == 0 else ["fast"])
        if step % 4 == 0:
            way = [(p - b).square().sum() for p, b in zip(model[1].parameters(), before)]
            update = timeline.of("slow")[-1]
            assert update.step == pytest.approx(float(sum(way).sqrt().detach()), rel=1e-5)
            assert update.grad_norm > 0
    assert [m.position for m in timeline.of("slow")] == [4, 8, 12]
    assert timeline.frequency("slow") == 0.25
    far = [(p - b).square().sum() for p, b in zip(model[1].parameters(), first)]
    assert timeline.of("slow")[-1].distance == pytest.approx(sum(far).sqrt().item(), rel=1e-5)
    check(timeline.draw(tmp_path / "x.svg"))
    assert timeline.to_json().count('"level": "slow"') == 3


def test_a_timeline_survives_divergence_and_emptiness(tmp_path):
    timeline = Timeline()
    check(timeline.draw(tmp_path / "empty.svg"))
    for position in range(1, 6000):
        timeline.record(
            LevelUpdate(position, "a level with a long name.momentum", 1.0, 2.0, 0.1, math.nan)
        )
    timeline.record(LevelUpdate(6000, "b", math.inf, 1.0, math.nan, math.nan))
    path = timeline.draw(tmp_path / "x.svg")
    check(path)
    assert "nan" not in path.read_text()
    assert "1 not finite" in path.read_text()
    assert json.loads(timeline.to_json())[-1]["loss"] is None
    assert path.stat().st_size < 300_000


def test_the_levels_of_hope_are_boxes_of_their_own(tmp_path):
    """Each with its name and the pace it declares, however the optimizer steps them."""
    model = hope(levels=[{"name": "fast", "chunk": 8}, {"name": "slow", "chunk": 64}])
    description = describe(model, torch.optim.AdamW(model.parameters()))
    for name, pace in (("fast", "every 8 tokens"), ("slow", "every 64 tokens")):
        component = description[f"model.layers.0-1.channel level {name}"]
        assert component.context == f"training batches; declared: {pace}"
        assert component.copies == 2
    picture = description.draw(tmp_path / "x.svg").read_text()
    assert "level fast" in picture
    assert "level slow" in picture


def test_a_level_that_never_moved_says_so():
    timeline = Timeline()
    for position in range(1, 5):
        timeline.record(LevelUpdate(position, "fast", 1.0, 0.0, 0.0, 0.0))
    assert "path 0" in timeline.picture()
    assert "path 0" not in timeline.picture({"fast": "drift 0.0%"})
    assert "drift 0.0%" in timeline.picture({"fast": "drift 0.0%"})


def test_a_level_that_only_receives_has_a_way_of_its_own():
    """A slow level that only receives takes no step, but its picture shows where it went."""
    timeline = Timeline()
    for step in range(1, 9):
        timeline.record(LevelUpdate(8 * step, "fast", 3.0, 1.0, 0.5, 0.5))
        if step % 4 == 0:
            timeline.record(LevelUpdate(8 * step, "slow", 3.0, 0.0, 0.0, 0.25 * step))
    lines = ET.fromstring(timeline.picture()).findall(f"{SVG}polyline")
    heights = [[float(p.split(",")[1]) for p in line.get("points").split()] for line in lines]
    for fall in heights:
        assert fall[0] - fall[-1] > 40
    assert "path 2" in timeline.picture()


def lab(colour: str) -> tuple[float, ...]:
    """A colour as eyes see it (CIE Lab), where distances are alike everywhere."""
    red, green, blue = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    )
    x, y, z = (
        c ** (1 / 3) if c > 0.008856 else 7.787 * c + 16 / 116
        for c in (
            (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505,
            0.2126 * red + 0.7152 * green + 0.0722 * blue,
            (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.0888,
        )
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("colours", [COLOURS, plots.COLOURS], ids=["levels", "curves"])
def test_neighbours_in_a_legend_have_distinct_colours(colours):
    """2 is a difference that trained eyes just see, 14 two shades of brown."""
    far = [math.dist(lab(a), lab(b)) for a, b in itertools.pairwise(colours)]
    assert min(far) > 40
    first = [math.dist(lab(a), lab(b)) for a, b in itertools.combinations(colours[:4], 2)]
    assert min(first) > 25
