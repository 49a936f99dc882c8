"""The charts that compare methods, as the page draws them and as pictures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from xml.etree import ElementTree

import pytest

from niss.charts import Chart
from niss.methods import METHODS
from niss.methods.look import SERIES
from niss.report import read_report_input
from niss.report.run_charts import accuracy_chart, noise_chart, save_charts
from niss.report.svg import MOST_BANDS, NARROW, WIDE, chart_svg
from niss.runs.folder import ReportInput

SVG = "{http://www.w3.org/2000/svg}"


def drawn(chart: Chart, width: float = WIDE) -> ElementTree.Element:
    return ElementTree.fromstring(
        str(chart_svg(chart, width)).replace("<svg", f'<svg xmlns="{SVG[1:-1]}"', 1)
    )


def texts(chart: Chart, width: float = WIDE) -> list[str]:
    return [element.text or "" for element in drawn(chart, width).iter(f"{SVG}text")]


def bands(chart: Chart) -> list[list[str]]:
    groups = [group for group in drawn(chart).iter(f"{SVG}g") if group.get("class") == "band"]
    return [[text.text or "" for text in group.iter(f"{SVG}text")] for group in groups]


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("make", [accuracy_chart, noise_chart])
def test_a_drawing_is_named_themed_and_the_same_each_time(
    demo: Path, make: Callable[[ReportInput], Chart], width: float
) -> None:
    report = read_report_input(demo)
    svg = chart_svg(make(report), width)
    root = drawn(make(report), width)
    assert root.get("role") == "img"
    assert "niss-kappa-4" in (root.get("aria-label") or "")
    assert root[0].tag == f"{SVG}title"
    assert "currentColor" in svg
    assert "var(--series-1" in svg
    assert not re.search(r'(fill|stroke)="(#|black|white)', svg), (
        "a fixed colour is lost in one of the themes"
    )
    assert not re.search(r"\s(id|style|href)=|url\(|https?:", svg), "it fits into any page, and loads nothing"
    assert svg == chart_svg(make(report), width)


def test_every_colour_has_its_place_in_both_themes() -> None:
    style = files("niss.report").joinpath("theme.css").read_text()
    for number, colour in enumerate(SERIES, start=1):
        assert f"--series-{number}: {colour};" in style
    assert {method.look.colour for method in METHODS.values() if method.private} <= set(SERIES)


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_curves_carry_their_names_and_last_values(demo: Path, width: float) -> None:
    shown = texts(accuracy_chart(read_report_input(demo)), width)
    assert "niss-kappa-4  82.1 %" in shown
    # Below an axis that is cut to where the others differ.
    assert "dp-fedavg  21.0 % ↓" in shown
    assert any(text.startswith("fedavg (unprotected)  ") for text in shown)
    assert {"Round", "Test accuracy (%)"} <= set(shown)


def test_bars_show_values_and_methods_without_noise_say_none(demo: Path) -> None:
    shown = texts(noise_chart(read_report_input(demo)))
    assert "8.2e-07" in shown
    assert "measured: 4.4e-08" in shown
    assert "none" in shown
    assert "none beyond rounding (3e-19)" in shown
    assert {"measured", "predicted"} <= set(shown)


def test_a_comparison_without_any_noise_is_drawn(compare: Callable[..., Path]) -> None:
    gone = dict.fromkeys(("central-dp", "dp-fedavg", "niss-kappa-1", "niss-kappa-4", "niss-as-printed"))
    assert "none" in texts(noise_chart(read_report_input(compare(gone))))


@pytest.mark.parametrize("label", ["$x^$ <b>", "_hidden", "名前", "a" * 80, 'id="x" -- & url(#y)'])
def test_any_label_can_be_drawn(compare: Callable[..., Path], tmp_path: Path, label: str) -> None:
    report = read_report_input(compare({"dp-fedavg": {"label": label}}))
    for make in (accuracy_chart, noise_chart):
        assert any(text.startswith(label[:20]) for text in texts(make(report)))
    if label.isascii():
        save_charts(tmp_path / "chart.png", [accuracy_chart(report), noise_chart(report)])


def test_every_evaluated_round_can_be_read_off_the_highest_first(demo: Path) -> None:
    report = read_report_input(demo)
    found = bands(accuracy_chart(report))
    assert len(found) == len(report.methods[0].evaluations)
    last = found[-1]
    assert last[0] == "Round 30"
    assert last[1] == "85.0 %  fedavg (unprotected)"
    shown = [float(line.split(" ")[0]) for line in last[1:]]
    assert shown == sorted(shown, reverse=True)
    assert len(shown) == 6


def test_a_long_run_has_no_more_bands_than_can_be_pointed_at(compare: Callable[..., Path]) -> None:
    folder = compare({})
    lines = [json.dumps({"round": number, "accuracy": 0.5}) for number in range(1, 1001)]
    for path in folder.glob("*/metrics.jsonl"):
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = bands(accuracy_chart(read_report_input(folder)))
    assert len(found) == MOST_BANDS
    assert (found[0][0], found[-1][0]) == ("Round 1", "Round 1000")


@pytest.mark.parametrize("make", [accuracy_chart, noise_chart])
def test_png_files_are_written_the_same_each_time(
    demo: Path, tmp_path: Path, make: Callable[[ReportInput], Chart]
) -> None:
    chart = make(read_report_input(demo))
    path = save_charts(tmp_path / "images" / "chart.png", [chart])
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5000
    assert [one.name for one in path.parent.iterdir()] == ["chart.png"]
    assert save_charts(tmp_path / "again.png", [chart]).read_bytes() == path.read_bytes()
