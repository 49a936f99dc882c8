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
from typing import Any

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "runs" / "demo"
ROUNDS_SHOWN = 18
LINES_BEFORE_THE_FIRST_ROUND = {"metrics.jsonl": 0, "timing.jsonl": 0, "ledger.jsonl": 1}
SEEN_WHEN_FINISHED = ("summary.json", "report.html", "result.json", "privacy.json")

PLAN = "?participants=200&rounds=30&participations=6&collusion=0.1&epsilon=3&parameters=25450"
CARRY = "?participants=100&clients=1000&rounds=100&carry=true&epsilon=3&parameters=25450"


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


def planner(page: Page, address: str) -> dict[str, Any]:
    page.goto(f"{address}/{PLAN}")
    page.wait_for_selector("#chart svg:visible")
    return {}


def planner_carry(page: Page, address: str) -> dict[str, Any]:
    page.goto(f"{address}/{CARRY}")
    page.wait_for_selector("#chart svg:visible")
    page.locator("#noise-title").evaluate("one => scrollTo(0, one.offsetTop - 120)")
    return {}


def live(page: Page, address: str) -> dict[str, Any]:
    page.goto(f"{address}/live?run=demo")
    page.wait_for_selector("#accuracy svg:visible")
    return {}


def report_accuracy(page: Page, address: str) -> dict[str, Any]:
    page.goto(f"{address}/report?run=demo")
    figure = page.locator("figure").first
    clip = _around(figure)
    figure.locator(".band:visible .catch").nth(20).hover(force=True)
    return {"clip": clip}


def report_graph(page: Page, address: str) -> dict[str, Any]:
    page.goto(f"{address}/report?run=demo")
    for closed in page.locator("details").all():
        closed.evaluate("one => { one.open = true }")
    graph = page.locator("figure:has(svg.graph)").first
    graph.scroll_into_view_if_needed()
    return {"clip": _around(graph)}


def _around(box: Any) -> dict[str, float]:
    """Of an element, with a margin."""
    box.evaluate("one => scrollTo(0, one.getBoundingClientRect().top + scrollY - 40)")
    found = box.bounding_box()
    return {
        "x": found["x"] - 12,
        "y": found["y"] - 12,
        "width": found["width"] + 24,
        "height": found["height"] + 24,
    }


PICTURES = {
    "ui-planner": (planner, 1280, 980, False),
    "ui-planner-carry": (planner_carry, 1280, 980, False),
    "ui-live": (live, 1000, 1010, True),
    "report-accuracy": (report_accuracy, 1000, 1400, False),
    "report-graph": (report_graph, 1000, 1400, False),
}


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
                take, width, height, in_progress = PICTURES[name]
                for scheme, suffix in (("light", ""), ("dark", "-dark")):
                    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                    shot = take(page, unfinished if in_progress else finished)
                    page.wait_for_timeout(300)
                    page.screenshot(path=options.out / f"{name}{suffix}.png", **shot)
                    page.close()
                    print(f"{name}{suffix}.png")
        browser.close()


if __name__ == "__main__":
    main()
