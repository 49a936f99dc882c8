"""The screenshots of the docs, light and dark: the pages of `niss ui`, and two figures of a report.

Needs Debian's chromium, Playwright and `runs/demo`, which `make demo` writes. The comparison in progress is the demo's
folder as it was after some of its rounds.

    .venv/bin/python tools/capture_pages.py [--out docs/images] [--only ui-planner ...]
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "runs" / "demo"
ROUNDS_SHOWN = 18
LINES_BEFORE_THE_FIRST_ROUND = {"metrics.jsonl": 0, "timing.jsonl": 0, "ledger.jsonl": 1}
SEEN_WHEN_FINISHED = ("summary.json", "report.html", "result.json", "privacy.json")

PLAN = "?participants=200&clients=1000&rounds=30&collusion=0.1&epsilon=3&parameters=25450"
RECORDS = (
    "?unit=record&participants=8&records=60000&batch=0.05&rounds=600&epsilon=1&collusion=0.2&parameters=26010"
)
CARRY = "?participants=100&clients=1000&rounds=100&carry=true&epsilon=3&parameters=25450"


class Picture(NamedTuple):
    """A page, what must be seen on it first, the window; what stands at its top, or the part of it that is shown."""

    page: str
    seen: str
    window: tuple[int, int]
    top: str = ""
    part: str = ""


def interrupted_demo(folder: Path) -> None:
    """The demo in `folder`, as it was after `ROUNDS_SHOWN` rounds."""
    shutil.copytree(DEMO, folder)
    for path in folder.rglob("*"):
        if path.name in SEEN_WHEN_FINISHED:
            path.unlink()
        elif path.name in LINES_BEFORE_THE_FIRST_ROUND:
            kept = LINES_BEFORE_THE_FIRST_ROUND[path.name] + ROUNDS_SHOWN
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            path.write_text("".join(lines[:kept]), encoding="utf-8")


@contextmanager
def served(runs: Path) -> Iterator[str]:
    """The address of a server that shows these runs."""
    command = [sys.executable, "-m", "niss", "ui", "--runs", str(runs), "--port", "0", "--no-open"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said = ""
        assert process.stdout is not None
        for line in process.stdout:
            said += line
            if found := re.search(r"http://[\d.:]+", line):
                yield found[0]
                return
        raise SystemExit(f"niss ui has ended:\n{said}")
    finally:
        process.terminate()
        process.wait()


PICTURES: dict[str, Picture] = {
    "ui-planner": Picture(PLAN, "#chart svg:visible", (1280, 980)),
    "ui-planner-records": Picture(RECORDS, "#chart svg:visible", (1280, 980)),
    "ui-planner-carry": Picture(CARRY, "#chart svg:visible", (1280, 980), top="#noise-title"),
    "ui-live": Picture("live?run=demo", "#accuracy svg:visible", (1000, 1010)),
    "report-accuracy": Picture("report?run=demo", "figure", (1000, 1400), part="figure"),
    "report-graph": Picture("report?run=demo", "figure", (1000, 1400), part="figure:has(svg.graph)"),
}


def take(page: Page, name: str, address: str, path: Path) -> None:
    """One picture: a whole window, or an element of the page with a margin."""
    picture, clip = PICTURES[name], None
    page.goto(f"{address}/{picture.page}")
    page.wait_for_selector(picture.seen)
    if picture.top:
        page.locator(picture.top).evaluate("one => scrollTo(0, one.offsetTop - 120)")
    if picture.part:
        for folded in page.locator("details").all():
            folded.evaluate("one => { one.open = true }")
        part = page.locator(picture.part).first
        part.evaluate("one => scrollTo(0, one.getBoundingClientRect().top + scrollY - 40)")
        box = part.bounding_box()
        assert box is not None
        clip = {"x": box["x"] - 12, "y": box["y"] - 2}
        clip |= {"width": box["width"] + 24, "height": box["height"] + 14}
        for band in part.locator(".band:visible .catch").all()[7:8]:
            band.hover(force=True)
    page.wait_for_timeout(300)
    page.screenshot(path=path, clip=clip)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--only", nargs="+", choices=PICTURES, default=list(PICTURES))
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    options = parser.parse_args()
    if not DEMO.is_dir():
        raise SystemExit("runs/demo is missing: make demo")
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        # The folder that a page names should not be one of this machine's.
        going = Path(folder) / "runs"
        interrupted_demo(going / "demo")
        browser = playwright.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
        with served(DEMO.parent) as finished, served(going) as unfinished:
            for name in options.only:
                width, height = PICTURES[name].window
                for scheme, suffix in (("light", ""), ("dark", "-dark")):
                    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                    address = unfinished if name == "ui-live" else finished
                    take(page, name, address, options.out / f"{name}{suffix}.png")
                    page.close()
                    print(f"{name}{suffix}.png")
        browser.close()


if __name__ == "__main__":
    main()
