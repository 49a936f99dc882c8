"""Charts in the page: SVG in the colours of the theme, with values under the pointer; and charts in files.

A method has the look that `niss.methods` gives it. In the page a figure takes the colours of the light or the dark
theme. Only matplotlib's object interface is used, so that nothing here touches pyplot's global state; the settings of
`rc_context` are still those of the process, so figures are drawn by one thread at a time.

Importing this module, or any module of charts, loads matplotlib. What is drawn is in `niss.figures`.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from niss.charts import Chart, Curves, Rows
from niss.errors import ConfigError
from niss.figures import CHART_STYLE, NARROW, WIDTH, draw_chart, png, short
from niss.files import write_output
from niss.methods.look import INK, QUIET, RULE, SERIES
from niss.report.table import evenly_spaced
from niss.report.templates import render
from niss.runs.folder import MethodResult

# The colours as drawn, and what stands for them in the page.
THEME = {INK: "currentColor", RULE: "var(--rule)", QUIET: "var(--quiet)", "#ffffff": "var(--paper)"} | {
    colour: f"var(--series-{number}, {colour})" for number, colour in enumerate(SERIES, start=1)
}

# More bands than pixels help nobody; of a longer run, evenly spaced rounds can be read off.
MOST_BANDS = 120

# Of a long curve on a logarithmic axis, so many places can be read off.
_MOST_PLACES = 60

_SVG = "http://www.w3.org/2000/svg"
_XLINK_HREF = "{http://www.w3.org/1999/xlink}href"
_COLOUR = re.compile(r"#[0-9a-fA-F]{6}\b")
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_POINTS_PER_INCH = 72.0


def label_width(methods: Iterable[MethodResult], extra: int = 0) -> float:
    """Inches that hold the longest label and `extra` more signs, in whatever sans-serif the reader has."""
    return 0.25 + 0.077 * (extra + max((len(short(method.label)) for method in methods), default=0))


def as_svg(figure: Figure, *, salt: str) -> str:
    """A whole SVG document on no ground; `salt` makes its ids the same each time and unlike those of other figures."""
    return _saved(figure, salt=salt, format="svg", transparent=True, metadata={"Date": None}).decode()


def as_png(figure: Figure, *, dark: bool = False) -> bytes:
    """A picture on white, or for a dark page, the same bytes each time; see `niss.figures.png`."""
    return png(figure, style=CHART_STYLE, dark=dark)


def _saved(figure: Figure, *, salt: str | None = None, **options: Any) -> bytes:
    buffer = io.BytesIO()
    with mpl.rc_context({**CHART_STYLE, "svg.hashsalt": salt}), warnings.catch_warnings():
        # In SVG the reader's fonts draw the text, so it does not matter which signs matplotlib's own font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(buffer, **options)
    return buffer.getvalue()


def save_figure(path: Path, draw: Callable[[], Figure], *, salt: str) -> Path:
    """Draw into a .png or .svg file, by its extension, and return `path`.

    draw  makes the figure; not called where the extension is another, which is a `ConfigError`
    salt  as in `as_svg`
    """
    kind = path.suffix.lower()
    if kind not in (".png", ".svg"):
        raise ConfigError(
            f"{path.name!r} ends in neither .png nor .svg", field="--plot", hint="for example chart.png"
        )
    figure = draw()
    return write_output(path, as_png(figure) if kind == ".png" else as_svg(figure, salt=salt).encode())


def inline_svg(
    figure: Figure, *, salt: str, prefix: str, title: str, description: str, overlay: str = ""
) -> Markup:
    """A figure as an element for HTML, with unique ids, the colours of the theme, and a name for screen readers.

    prefix       goes before every id, to keep figures on one page apart
    description  the figure in words, for those who do not see it
    overlay      elements to lay on top, in the same units

    The result is markup of our own making: every text in it passed through ElementTree, which escapes, or through a
    template.
    """
    root = ElementTree.fromstring(as_svg(figure, salt=salt))
    for element in list(root.iter()):
        for child in [child for child in element if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style")]:
            element.remove(child)
        _make_ids_unique(element, prefix)
        style = element.get("style")
        if style is not None:
            element.set("style", _COLOUR.sub(lambda hit: THEME.get(hit[0].lower(), hit[0]), style))
    # The size comes from the page; the viewBox keeps the proportions.
    root.attrib.pop("width", None)
    root.attrib.pop("height", None)
    root.set("role", "img")
    root.set("aria-label", description)
    # matplotlib sets these for everything in the document; here they must not reach beyond the figure.
    root.set("style", "stroke-linejoin: round; stroke-linecap: butt")
    name = ElementTree.Element(f"{{{_SVG}}}title")
    name.text = title
    root.insert(0, name)
    ElementTree.register_namespace("", _SVG)
    drawing = Markup(ElementTree.tostring(root, encoding="unicode"))
    return drawing.removesuffix("</svg>") + overlay + Markup("</svg>")


def _make_ids_unique(element: ElementTree.Element, prefix: str) -> None:
    if "id" in element.attrib:
        element.set("id", f"{prefix}-{element.attrib['id']}")
    target = element.attrib.pop(_XLINK_HREF, None)
    if target is not None:
        element.set("href", f"#{prefix}-{target.removeprefix('#')}")
    for key in ("clip-path", "style", "fill"):
        if "url(#" in element.attrib.get(key, ""):
            element.set(key, _REFERENCE.sub(rf"url(#{prefix}-\1)", element.attrib[key]))


@dataclass(frozen=True, slots=True)
class Reading:
    """One curve's value in a round: what is written, its colour as drawn, and the value itself."""

    text: str
    colour: str
    value: float


def in_two_widths(draw: Callable[[float, str], Markup], prefix: str) -> dict[str, Markup]:
    """A chart for a window and for a phone; `draw` takes the width and what its ids begin with."""
    return {"wide": draw(WIDTH, prefix), "narrow": draw(NARROW, f"{prefix}-narrow")}


def rows_svg(figure: Figure, rows: Sequence[Sequence[str]]) -> Markup:
    """A rectangle over each row of a bar chart, the first at 0 on the y axis; pointing at it shows its lines."""
    axes, scale, height = (
        figure.axes[0],
        _POINTS_PER_INCH / figure.dpi,
        figure.get_figheight() * _POINTS_PER_INCH,
    )
    (low, high) = axes.get_xlim()

    def y(place: float) -> float:
        return height - float(axes.transData.transform((high, place))[1]) * scale

    left, right = (float(axes.transData.transform((end, 0))[0]) * scale for end in (low, high))
    made = [
        {
            "lines": lines,
            "top": min(y(place - 0.5), y(place + 0.5)),
            "height": abs(y(place + 0.5) - y(place - 0.5)),
        }
        for place, lines in enumerate(rows)
    ]
    return render("rows.svg.j2", rows=made, left=left, right=right, bottom=height - 2.0)


def bands_svg(
    figure: Figure,
    rounds: Mapping[Any, Sequence[Reading]],
    axes: Axes | None = None,
    most: int = MOST_BANDS,
    head: Callable[[Any], str] = "Round {}".format,
) -> Markup:
    """A band over the axes for each of (at most `most`) rounds, or other places; pointing at it shows the readings.

    figure  as drawn: the bands lie where its axes are
    rounds  the readings of each round, in any order; the card shows the highest first
    axes    the first of the figure, unless others are given
    head    the heading of a card

    The page runs no script, so every reading is in the file from the start and CSS alone changes its visibility.
    """
    axes = figure.axes[0] if axes is None else axes
    scale, height = _POINTS_PER_INCH / figure.dpi, figure.get_figheight() * _POINTS_PER_INCH

    def place(number: float, value: float) -> tuple[float, float]:
        """Where a point of the chart lies in the drawing, from its upper left corner."""
        # A value beyond an axis that was cut lies at its edge.
        lowest, highest = axes.get_ylim()
        x, y = axes.transData.transform((number, min(max(value, lowest), highest)))
        return float(x) * scale, height - float(y) * scale

    (first, last), (low, high) = axes.get_xlim(), axes.get_ylim()
    (left, top), (right, bottom) = place(first, high), place(last, low)
    numbers = evenly_spaced(sorted(rounds), most)
    xs = [place(number, low)[0] for number in numbers]
    bands = []
    for index, (number, x) in enumerate(zip(numbers, xs, strict=True)):
        before = xs[index - 1] if index else left - (x - left)
        after = xs[index + 1] if index + 1 < len(xs) else x + (x - before)
        start = max(left, (before + x) / 2)
        width = max(min(right + 8.0, (x + after) / 2) - start, 1.0)
        highest_first = sorted(rounds[number], key=lambda one: -one.value)
        readings = [(one.text, THEME[one.colour], place(number, one.value)[1]) for one in highest_first]
        bands.append({"head": head(number), "x": x, "start": start, "width": width, "readings": readings})
    return render("bands.svg.j2", bands=bands, left=left, top=top, right=right, bottom=bottom)


def charts_svg(charts: Iterable[Chart], prefix: str) -> list[tuple[str, dict[str, Markup]]]:
    """The charts in two widths, each with its title; `prefix` goes before the ids in them."""
    return [
        (chart.title, in_two_widths(partial(chart_svg, chart), f"{prefix}-{number}"))
        for number, chart in enumerate(charts, start=1)
    ]


def chart_svg(chart: Chart, width: float, prefix: str) -> Markup:
    """A chart as inline SVG with its values under the pointer; `prefix` goes before its ids."""
    figure = draw_chart(chart, width)
    if isinstance(chart, Rows):
        lines = [
            (short(name, 40), *(f"{mark.name}: {mark.text}" for mark in marks)) for name, marks in chart.rows
        ]
        overlay = rows_svg(figure, lines)
        said = "; ".join(": ".join((line[0], ", ".join(line[1:]))) for line in lines)
    else:
        overlay = bands_svg(figure, _readings(chart), head=lambda place: _head(chart, place))
        said = "; ".join(f"{one.name} ends at {one.points[-1][1]:.3g}" for one in chart.series)
    return inline_svg(
        figure,
        salt=f"niss-{prefix}",
        prefix=prefix,
        title=chart.title,
        description=f"{chart.title}. {said}.",
        overlay=overlay,
    )


def _head(chart: Curves, place: float) -> str:
    return f"{chart.head} {chart.ticks[int(place)] if chart.ticks else f'{place:.4g}'}"


def _readings(chart: Curves) -> dict[float, list[Reading]]:
    """What stands under the pointer, place by place; of a long curve, places that are evenly spaced on its axis."""
    found: dict[float, list[Reading]] = {}
    for one in chart.series:
        for x, y in one.points:
            found.setdefault(x, []).append(Reading(f"{y:.3g}  {short(one.name, 34)}", one.look.colour, y))
    places = sorted(found)
    if len(places) > _MOST_PLACES and "x" in chart.log:
        wanted = np.geomspace(places[0], places[-1], _MOST_PLACES)
        places = [places[at] for at in np.unique(np.searchsorted(places, wanted).clip(max=len(places) - 1))]
    return {place: found[place] for place in places}
