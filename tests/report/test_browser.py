"""The report in a real browser: laid out without overlaps, nothing sticks out, and not blank.

Skipped where there is no Chromium; the same is checked from the SVG alone in test_demo_page.py.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch

from nestling.cli import learn
from nestling.description import describe
from nestling.levels import LevelUpdate
from nestling.models import NestlingForCausalLM, presets
from nestling.report.demo import demo_page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync --hide-scrollbars --window-size=1000,1400"
).split()
LOOK = """<script>
const texts = [...document.querySelectorAll('svg text, h1, h2, p, pre, table, figcaption')]
  .filter(e => e.textContent.trim());
const boxes = texts.map(e => [e.getBoundingClientRect(), e.textContent.trim().slice(0, 40)]);
const bad = [];
for (let i = 0; i < boxes.length; i++) for (let j = i + 1; j < boxes.length; j++) {
  const [a, s] = boxes[i], [b, t] = boxes[j];
  const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
  const tall = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
  if (wide > 1 && tall > 2) bad.push(s + ' | ' + t);
}
const out = boxes.filter(([b]) => b.left < 0 || b.right > innerWidth).map(([, t]) => t);
const size = e => parseFloat(getComputedStyle(e).fontSize);
const scale = m => m ? Math.hypot(m.a, m.b) : 1;
const letters = Math.min(...texts.map(e => size(e) * scale(e.getScreenCTM?.())));
const wide = document.documentElement.scrollWidth;
const said = {texts: texts.length, bad, out, wide, letters};
document.body.dataset.said = JSON.stringify(said);
</script>"""


@pytest.fixture
def chromium(tmp_path):
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser on this machine (looked for {', '.join(BROWSERS)})")

    def look(*arguments: str) -> str:
        command = [found, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return look


def look_at(page, chromium, *arguments: str) -> dict:
    """The findings of the script `LOOK` on a page."""
    with_look = page.with_name("look.html")
    text = page.read_text()
    end = "</body>" if "</body>" in text else "</html>"
    with_look.write_text(text.replace(end, LOOK + end))
    dom = chromium("--dump-dom", *arguments, with_look.as_uri())
    said = re.search(r'data-said="([^"]*)"', dom).group(1)
    return json.loads(said.replace("&quot;", '"').replace("&lt;", "<").replace("&amp;", "&"))


def levels_page(folder):
    model = NestlingForCausalLM(presets.tiny())
    return describe(model, torch.optim.AdamW(model.parameters())).draw(folder / "levels.html")


def timeline_page(folder):
    levels = ("fast", 64, 1), ("middle", 512, 8), ("slow", 4096, 64)
    drift = [
        SimpleNamespace(level=name, chunk=chunk, updates=64 // pace, drift=0.0123 * pace)
        for name, chunk, pace in levels
    ]
    history = [
        LevelUpdate(64 * step, name, 3.0, 1.0, 0.1, 0.1 * step)
        for step in range(1, 65)
        for name, _, pace in levels
        if step % pace == 0
    ]
    learner = SimpleNamespace(history=history, drift=drift, position=4096, receiving=("slow",))
    memory = folder / ("a_memory_with_a_long_name" * 3)
    told = ["diary.txt: 4,096 tokens learned; loss 1.9 -> 1.5"]
    return learn._draw(learner, folder / "timeline.html", memory, told)


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("make", [levels_page, timeline_page])
def test_pages_fit_every_screen(make, width, tmp_path, chromium):
    """Nothing sticks out, so nobody scrolls sideways, and no text lies on another."""
    found = look_at(make(tmp_path), chromium, f"--window-size={width},1000")
    assert found["texts"] > 5
    assert found["bad"] == []
    assert found["out"] == []
    assert found["wide"] <= max(width, 500)  # what this browser makes its narrowest window


def test_wide_pictures_can_be_read_and_fit_every_screen(results, tmp_path, chromium):
    page = demo_page(results).save(tmp_path / "report.html")
    for width, least in ((1280, 10), (390, 0)):
        found = look_at(page, chromium, f"--window-size={width},1000")
        assert found["out"] == []
        assert found["wide"] <= max(width, 500)
        assert found["letters"] >= least


def test_the_report_in_a_real_browser(results, tmp_path, chromium):
    page = demo_page(results).save(tmp_path / "report.html")
    shot = tmp_path / "report.png"
    chromium(f"--screenshot={shot}", page.as_uri())
    found = look_at(page, chromium)
    assert found["texts"] > 90
    assert found["bad"] == []
    assert found["out"] == []
    assert found["wide"] <= 1000
    image = pytest.importorskip("PIL.Image")
    with image.open(shot) as picture:
        assert picture.size == (1000, 1400)
        colours = picture.convert("RGB").getcolors(1 << 20)
    most = max(count for count, _ in colours) / (1000 * 1400)
    assert most < 0.97, "the page is blank"
    assert len(colours) > 100
