"""A headless Chromium for the tests of pages, and what every page must stand: no errors, no serious axe findings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = Path(os.environ.get("NISS_CHROMIUM", "/usr/bin/chromium"))
AXE_PLACES = (
    Path(os.environ.get("NISS_AXE", "axe.min.js")),
    Path(__file__).parents[2] / "node_modules" / "axe-core" / "axe.min.js",
)
WIDTHS = (390, 1440)
SCHEMES = ("light", "dark")


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; skips the test where there is none."""
    if not CHROMIUM.exists():
        pytest.skip(f"no Chromium at {CHROMIUM}: install Debian's chromium, or set NISS_CHROMIUM")
    api = pytest.importorskip(
        "playwright.sync_api", reason="Playwright is not installed: pip install playwright"
    )
    with api.sync_playwright() as playwright:
        # Inside a container Chromium cannot build its own sandbox; the pages are ours.
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


# Elements that reach beyond the window, and boxes whose content is wider than they are, of all that can be seen. In a
# drawing the texts count: curves and bars are cut at the axes on purpose.
_CLIPPED = """() => {
  const found = [];
  const hidden = ".unseen, .skip, thead, .reading";
  const seen = (one) => one.checkVisibility({ visibilityProperty: true }) && !one.closest(hidden);
  for (const one of document.querySelectorAll("body *")) {
    const drawn = one instanceof SVGElement && !(one instanceof SVGSVGElement) && one.tagName !== "text";
    if (drawn || !seen(one)) continue;
    const box = one.getBoundingClientRect();
    const name = `${one.tagName} ${one.id || one.getAttribute("class") || one.textContent.slice(0, 30)}`;
    if (box.width && (box.right > innerWidth + 1 || box.left < -1)) found.push(`${name}: ${box.left} to ${box.right}`);
    const [inner, own] = [one.scrollWidth, one.clientWidth];
    if (getComputedStyle(one).overflowX !== "visible" && inner > own + 1) found.push(`${name}: ${inner} in ${own}`);
  }
  return found;
}"""


@dataclass
class Tab:
    """An open page and the errors it has shown."""

    page: Any
    errors: list[str] = field(default_factory=list)

    def check(self, *, clipping: bool = True) -> None:
        """No errors, nothing wider than the window and, unless a theme hides drawers beside it, nothing clipped."""
        assert self.errors == []
        wide = self.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide[0] <= wide[1], f"the page is {wide[0]} wide in a window of {wide[1]}"
        clipped = self.page.evaluate(_CLIPPED) if clipping else []
        assert not clipped, clipped


@contextmanager
def open_tab(browser: Any, url: str, *, width: int = 1440, scheme: str = "light") -> Iterator[Tab]:
    """A page of its own; whatever it asks for outside its origin is an error."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    tab = Tab(page)
    page.on("console", lambda line: line.type in ("error", "warning") and tab.errors.append(line.text))
    page.on("pageerror", lambda error: tab.errors.append(str(error)))
    origin = "/".join(url.split("/")[:3])
    page.on(
        "request",
        lambda request: (
            request.url.startswith((origin, "data:")) or tab.errors.append(f"asked for {request.url}")
        ),
    )
    try:
        page.goto(url)
        yield tab
    finally:
        context.close()


def axe_findings(tab: Tab) -> list[str]:
    """What axe-core finds of serious or critical impact; skips where axe-core is not there."""
    script = next((path for path in AXE_PLACES if path.is_file()), None)
    if script is None:
        pytest.skip("no axe-core: npm install --no-save axe-core, or set NISS_AXE to its axe.min.js")
    tab.page.evaluate(script.read_text(encoding="utf-8"))
    found = tab.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{one['id']}: {one['help']} {[node['target'] for node in one['nodes']][:4]}"
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]


def luminance(tab: Tab) -> float:
    """How bright the ground of the page is, from 0 to 255."""
    colour = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    parts = [float(part) for part in colour.strip("rgba()").split(",")[:3]]
    return sum(parts) / 3
