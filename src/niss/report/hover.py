"""Values that appear beside the curves under the pointer: a band for each round, shown by CSS alone.

The page runs no script, so every reading is in the file from the start and only its visibility changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from xml.etree import ElementTree

from niss.report.svg import SVG

# More bands than pixels help nobody; of a longer run, evenly spaced rounds can be read off.
MOST_BANDS = 120
_LINE = 13.0


@dataclass(frozen=True, slots=True)
class Reading:
    """One curve's value in a round: what is written, its colour as drawn, and where its point lies."""

    text: str
    colour: str
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Band:
    """The readings of one round, the highest first."""

    title: str
    x: float
    readings: tuple[Reading, ...]


@dataclass(frozen=True, slots=True)
class PlotArea:
    """Where the axes lie in the drawing, in its units, from the upper left corner."""

    left: float
    top: float
    right: float
    bottom: float


def add_bands(root: ElementTree.Element, area: PlotArea, bands: list[Band]) -> None:
    """Lay a band over the drawing for each of (at most so many) rounds."""
    chosen = _spread(bands)
    layer = ElementTree.SubElement(root, f"{{{SVG}}}g", {"class": "bands"})
    for number, band in enumerate(chosen):
        before = chosen[number - 1].x if number else area.left - (band.x - area.left)
        after = chosen[number + 1].x if number + 1 < len(chosen) else band.x + (band.x - before)
        left = max(area.left, (before + band.x) / 2)
        right = min(area.right + 8.0, (band.x + after) / 2)
        _add_band(layer, area, band, left, max(right, left + 1.0))


def _spread(bands: list[Band]) -> list[Band]:
    if len(bands) <= MOST_BANDS:
        return bands
    last = len(bands) - 1
    return [bands[round(place * last / (MOST_BANDS - 1))] for place in range(MOST_BANDS)]


def _add_band(layer: ElementTree.Element, area: PlotArea, band: Band, left: float, right: float) -> None:
    group = _child(layer, "g", {"class": "band"})
    catch = {"x": left, "y": area.top, "width": right - left, "height": area.bottom - area.top}
    _child(group, "rect", {"class": "catch", **catch})
    reading = _child(group, "g", {"class": "reading"})
    _child(reading, "line", {"x1": band.x, "x2": band.x, "y1": area.top, "y2": area.bottom})
    for one in band.readings:
        _child(reading, "circle", {"cx": one.x, "cy": one.y, "r": 3.2, "style": f"fill: {one.colour}"})
    wide = 28.0 + 4.9 * max(len(one.text) for one in band.readings)
    tall = 10.0 + _LINE * (len(band.readings) + 1)
    x = band.x + 9.0 if band.x + 9.0 + wide < area.right else max(area.left + 3.0, band.x - 9.0 - wide)
    y = max(area.top, min(area.bottom - tall - 6.0, (area.top + area.bottom - tall) / 2))
    _child(reading, "rect", {"class": "card", "x": x, "y": y, "width": wide, "height": tall, "rx": 4})
    _child(reading, "text", {"x": x + 8.0, "y": y + _LINE + 1.0, "class": "head"}).text = band.title
    for place, one in enumerate(band.readings, start=2):
        line = y + _LINE * place + 1.0
        swatch = {"x": x + 8.0, "y": line - 6.5, "width": 7, "height": 7, "style": f"fill: {one.colour}"}
        _child(reading, "rect", swatch)
        _child(reading, "text", {"x": x + 20.0, "y": line}).text = one.text


def _child(parent: ElementTree.Element, tag: str, attributes: dict[str, object]) -> ElementTree.Element:
    shown = {
        name: f"{value:.1f}" if isinstance(value, float) else str(value) for name, value in attributes.items()
    }
    return ElementTree.SubElement(parent, f"{{{SVG}}}{tag}", shown)
