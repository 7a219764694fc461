"""Looks at a page of ``expertwire bench report`` in a browser: is everything drawn that the result holds?

    python tools/look_at_page.py RESULT.json PAGE.html

The result must follow the JSON Schema. Every bar, or the point in its place, and every line must be there with a box of
some size, and every library's colour must be seen. Needs chromium, and the packages jsonschema and matplotlib. The exit
status is 1 if something is missing; the first line says what.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from html import unescape
from pathlib import Path

import numpy as np
from jsonschema import Draft202012Validator
from matplotlib.image import imread

from expertwire.bench import svg
from expertwire.bench.charts import Bars, Chart
from expertwire.bench.figures import charts_of
from expertwire.bench.rows import rows_of
from expertwire.bench.stored import SCHEMA_FILE, read_report

LIMIT_S = 60
WINDOW = (1300, 4000)
#: Pixels that a library must colour to count as seen, and how far from its colour they may be.
LEAST_PIXELS, NEAR = 100, 0.03
#: Added to a copy of the page, which itself has no script: writes the size of everything drawn into the page.
PROBE = """<script>
const all = [...document.querySelectorAll("svg[role] .bar, svg[role] [data-series]")];
const sized = (one, box = one.getBoundingClientRect()) => [one.tagName, box.width, box.height];
document.body.dataset.boxes = JSON.stringify(all.map((one) => sized(one)));
</script></body>"""


def browse(page: Path, *options: str) -> str:
    """Returns what the browser prints. Nothing is loaded from anywhere."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or sys.exit("chromium is not installed")
    with tempfile.TemporaryDirectory() as profile:
        quiet = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
        quiet += ["--disable-component-update", "--disable-sync", "--hide-scrollbars", f"--user-data-dir={profile}"]
        command = [found, "--headless", "--no-sandbox", *quiet, *options, page.resolve().as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    if done.returncode:
        sys.exit(f"chromium ended with status {done.returncode}: {done.stderr[-500:]}")
    return done.stdout


def boxes_drawn(page: Path, folder: Path) -> list[tuple[str, float, float]]:
    """Returns the kind, width and height of each bar and line on the page."""
    probe = folder / "probe.html"
    probe.write_text(page.read_text(encoding="utf-8").replace("</body>", PROBE), encoding="utf-8")
    found = re.search(r'data-boxes="([^"]*)"', browse(probe, "--dump-dom"))
    return [tuple(box) for box in json.loads(unescape(found[1]))] if found else []


def colours_missing(page: Path, folder: Path, charts: list[Chart]) -> list[str]:
    """Returns the colours of bars that are not to be seen on a picture of the page."""
    picture = folder / "page.png"
    browse(page, f"--screenshot={picture}", f"--window-size={WINDOW[0]},{WINDOW[1]}")
    pixels = imread(picture)[:, :, :3]
    named = dict(reversed(re.findall(r"\.c(\d) { color: #(\w{6}); }", svg.STYLE)))  # the first is that of a light page
    missing = []
    for number in sorted({bar.look.number for chart in charts if isinstance(chart, Bars) for bar in chart.bars} - {0}):
        wanted = np.array([int(named[str(number)][place : place + 2], 16) for place in (0, 2, 4)]) / 255
        if (np.abs(pixels - wanted).max(axis=2) < NEAR).sum() < LEAST_PIXELS:
            missing.append(f"#{named[str(number)]}")
    return missing


def main(result: Path, page: Path) -> int:
    """Prints what is wrong, or what was seen; returns the exit status."""
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    Draft202012Validator(schema).validate(json.loads(result.read_text(encoding="utf-8")))
    charts = charts_of(rows_of(read_report(result)))
    wanted = Counter[str]()
    for chart in charts:
        if isinstance(chart, Bars):
            wanted["g" if chart.log else "rect"] += len(chart.bars)
    wanted["path"] = sum(len(chart.series) for chart in charts if not isinstance(chart, Bars))
    with tempfile.TemporaryDirectory() as folder:
        boxes = boxes_drawn(page, Path(folder))
        missing = colours_missing(page, Path(folder), charts)
    # A line may be level, and so is the floor's mark.
    least = {"g": 5, "path": 20}
    drawn = Counter(
        kind for kind, width, height in boxes if (width > 0 and height > 0) or width + height > least.get(kind, np.inf)
    )
    if drawn != wanted or missing:
        print(f"wanted {dict(wanted)}, drawn {dict(drawn)} of {len(boxes)}; colours not seen: {missing}")
        return 1
    marks = f"{drawn['rect']} bars, {drawn['g']} points in place of bars and {drawn['path']} lines"
    print(f"{page}: {marks} are drawn, in all colours; {result} follows the schema")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
