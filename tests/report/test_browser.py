"""The report in a real browser, opened from disk."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from niss.report import write_report
from report.conftest import write_attack, write_graph_run
from report.test_charts import FOUND
from ui.browser import SCHEMES, WIDTHS, axe_findings, chromium, luminance, open_tab


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(demo: Path, tmp_path: Path) -> str:
    """The report on a comparison with an attack, a run with a graph, colluders and a ledger, and an attack alone."""
    write_attack(demo)
    run = write_graph_run(tmp_path / "graph", clients=20, collusion=0.1)
    attack = write_attack(tmp_path / "attack")
    return write_report([demo, run, attack], tmp_path / "page.html").as_uri()


@pytest.fixture
def attacks(tmp_path: Path) -> str:
    """The report on one attack of every kind."""
    folders = [write_attack(tmp_path / kind, attack=kind, **found) for kind, found in FOUND.items()]
    return write_report(folders, tmp_path / "attacks.html").as_uri()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_pages_fit_and_are_accessible(
    browser: Any, page: str, attacks: str, width: int, scheme: str
) -> None:
    for url in (page, attacks):
        with open_tab(browser, url, width=width, scheme=scheme) as tab:
            tab.page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
            tab.check()
            assert (luminance(tab) > 200) == (scheme == "light")
            assert axe_findings(tab) == []


@pytest.mark.parametrize("width", WIDTHS)
def test_charts_of_attacks_are_read_under_the_pointer(browser: Any, attacks: str, width: int) -> None:
    with open_tab(browser, attacks, width=width) as tab:
        charts = tab.page.locator("svg:visible:has(.band)")
        assert charts.count() == sum(len(found["charts"]) for found in FOUND.values())
        for number in range(charts.count()):
            band = charts.nth(number).locator(".band").last
            assert not band.locator(".reading").is_visible()
            band.locator(".catch").hover(force=True)
            assert band.locator(".reading").is_visible()
            card, chart = band.locator(".card").bounding_box(), charts.nth(number).bounding_box()
            assert chart["x"] <= card["x"]
            assert card["x"] + card["width"] <= chart["x"] + chart["width"]


@pytest.mark.parametrize(
    ("figure", "said"),
    [
        ("Test accuracy", "niss-kappa-4"),
        ("Noise in a round", "in a round, measured: 4.4e-8"),
        ("spent at most", "worst-off client"),
    ],
)
def test_every_chart_is_read_under_the_pointer_alone(browser: Any, page: str, figure: str, said: str) -> None:
    with open_tab(browser, page) as tab:
        bands = tab.page.locator(f'svg[aria-label*="{figure}"] .band:visible')
        shown = []
        for number in range(min(bands.count(), 8)):
            reading = bands.nth(number).locator(".reading")
            assert not reading.is_visible()
            bands.nth(number).locator(".catch").hover(force=True)
            assert reading.is_visible()
            shown.append(reading.text_content())
        assert any(said in words for words in shown), shown
        tab.check()


def test_a_phone_gets_drawings_of_its_own(browser: Any, page: str) -> None:
    with open_tab(browser, page, width=390) as tab:
        texts = tab.page.locator("figure svg text:visible")
        sizes = [texts.nth(number).bounding_box()["height"] for number in range(0, texts.count(), 7)]
        assert min(sizes) > 8.0
        assert tab.page.locator(".on-wide svg:visible").count() == 0
        assert tab.page.locator(".on-narrow svg:visible").count() >= 3


def test_a_comparison_is_printed_on_six_pages_at_most(browser: Any, demo: Path) -> None:
    with open_tab(browser, write_report(demo).as_uri()) as tab:
        pages = re.findall(rb"/Type\s*/Page[^s]", tab.page.pdf(format="A4", prefer_css_page_size=True))
        assert 1 <= len(pages) <= 6


def test_it_prints_on_white(browser: Any, page: str) -> None:
    with open_tab(browser, page, scheme="dark") as tab:
        tab.page.emulate_media(media="print", color_scheme="dark")
        assert (
            tab.page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--paper')")
            == "#fdfdfb"
        )
        assert tab.page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light"
        assert len(tab.page.pdf()) > 20_000
        tab.check()
