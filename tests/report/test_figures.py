from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from niss.report import read_report_input, save_png
from niss.report.method_charts import accuracy_figure, noise_figure

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize("draw", [accuracy_figure, noise_figure])
def test_a_figure_is_named_themed_and_the_same_each_time(demo: Path, draw: Callable[..., str]) -> None:
    report = read_report_input(demo)
    svg = draw(report)
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img"
    assert "niss-kappa-4" in (root.get("aria-label") or "")
    assert root[0].tag == f"{SVG}title"
    assert "currentColor" in svg
    assert "var(--series-1" in svg
    assert not re.search(r"fill: #(ffffff|000000)", svg), (
        "a fixed black or white is lost in one of the themes"
    )
    assert set(re.findall(r"https?://[^\"' >]+", svg)) == {"http://www.w3.org/2000/svg"}
    assert svg == draw(report)


def test_every_colour_has_its_place_in_both_themes_and_in_the_browser() -> None:
    from importlib.resources import files

    from niss.methods import METHODS
    from niss.report.canvas import SERIES

    for room, name in (("niss.report", "style.css"), ("niss.ui", "assets/style.css")):
        style = files(room).joinpath(name).read_text()
        for number, colour in enumerate(SERIES, start=1):
            assert f"--series-{number}: {colour};" in style
            assert room == "niss.report" or f".line.series-{number} " in style
    assert {method.look.colour for method in METHODS.values() if method.private} <= set(SERIES)


def test_ids_are_unique_across_both_figures_and_every_reference_has_its_target(demo: Path) -> None:
    report = read_report_input(demo)
    ids, targets = [], set()
    for svg in (accuracy_figure(report), noise_figure(report)):
        for element in ElementTree.fromstring(svg).iter():
            ids += [element.attrib["id"]] if "id" in element.attrib else []
            targets |= {element.attrib["href"].removeprefix("#")} if "href" in element.attrib else set()
            targets |= set(re.findall(r"url\(#([^)]+)\)", " ".join(element.attrib.values())))
    assert len(ids) == len(set(ids))
    assert targets
    assert targets <= set(ids)


def test_curves_carry_their_names_and_last_values(demo: Path) -> None:
    shown = texts(accuracy_figure(read_report_input(demo)))
    assert "niss-kappa-4  82.1 %" in shown
    # Below an axis that is cut to where the others differ.
    assert "dp-fedavg  21.0 % ↓" in shown
    assert any(text.startswith("fedavg (unprotected)  ") for text in shown)
    assert {"Round", "Test accuracy (%)"} <= set(shown)


def test_bars_show_values_and_methods_without_noise_say_none(demo: Path) -> None:
    shown = texts(noise_figure(read_report_input(demo)))
    assert "8.2e-07" in shown
    assert shown.count("none") == 1
    assert "none beyond rounding (3e-19)" in shown
    assert {"measured", "predicted"} <= set(shown)


def test_a_comparison_without_any_noise_is_drawn(compare: Callable[..., Path]) -> None:
    gone = dict.fromkeys(("central-dp", "dp-fedavg", "niss-kappa-1", "niss-kappa-4", "niss-as-printed"))
    assert texts(noise_figure(read_report_input(compare(gone)))).count("none") == 1


@pytest.mark.parametrize("label", ["$x^$ <b>", "_hidden", "名前", "a" * 80, 'id="x" -- & url(#y)'])
def test_any_label_can_be_drawn(compare: Callable[..., Path], label: str) -> None:
    report = read_report_input(compare({"dp-fedavg": {"label": label}}))
    assert any(text.startswith(label[:20]) for text in texts(accuracy_figure(report)))
    assert any(text.startswith(label[:20]) for text in texts(noise_figure(report)))


def test_png_files_are_written(demo: Path, tmp_path: Path) -> None:
    written = save_png(read_report_input(demo), tmp_path / "images")
    assert [path.name for path in written] == ["accuracy.png", "noise.png"]
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 5000
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == ["accuracy.png", "noise.png"]
