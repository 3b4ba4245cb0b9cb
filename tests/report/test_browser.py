"""The report in a real browser: laid out without overlaps, nothing sticks out, and not blank.

Skipped where there is no Chromium; the same is checked from the SVG alone in test_story.py.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from nestling.report.story import tell

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
const said = {texts: texts.length, bad, out, wide: document.documentElement.scrollWidth};
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


def test_the_report_in_a_real_browser(story, tmp_path, chromium):
    page = tell(story).save(tmp_path / "report.html")
    shot = tmp_path / "report.png"
    chromium(f"--screenshot={shot}", page.as_uri())
    with_look = tmp_path / "look.html"
    with_look.write_text(page.read_text().replace("</body>", LOOK + "</body>"))
    dom = chromium("--dump-dom", with_look.as_uri())
    said = re.search(r'data-said="([^"]*)"', dom).group(1)
    found = json.loads(said.replace("&quot;", '"').replace("&lt;", "<").replace("&amp;", "&"))
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
