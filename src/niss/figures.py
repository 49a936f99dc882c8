"""A sheet of charts (`niss.svg`) as a picture, painted by matplotlib, and for dark pages in the colours of their theme.

Importing this module loads matplotlib. Only its object interface is used, so that no display is needed and nothing
global changes.
"""

from __future__ import annotations

import re
from base64 import b64decode
from functools import cache
from importlib.resources import files
from io import BytesIO
from typing import Any
from xml.etree.ElementTree import Element, fromstring

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.patches import Circle, Patch, PathPatch, Rectangle
from matplotlib.path import Path
from matplotlib.patheffects import withStroke

from niss.methods.look import INK

# Of an inch, in which matplotlib draws, and of a point, in which it measures letters and lines.
_INCH, _POINT = 100.0, 0.72
# The letters at hand are broader than those that the drawing reckons with.
_LETTERS = 0.9


def png(sheet: str, *, dark: bool = False) -> bytes:
    """A sheet on white, or for a dark page on nothing; the same bytes each time.

    No software is named in it, so that any release of matplotlib that draws alike gives the same bytes.
    """
    root = fromstring(sheet)
    width, height = (float(root.attrib[side]) for side in ("width", "height"))
    figure = Figure(figsize=(width / _INCH, height / _INCH))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), autoscale_on=False)
    axes.set(xlim=(0.0, width), ylim=(height, 0.0))
    axes.set_axis_off()
    _Painter(axes, _theme() if dark else {"ink": INK}).paint(root)
    ground: dict[str, Any] = {"transparent": True} if dark else {"facecolor": "white"}
    content = BytesIO()
    figure.savefig(content, format="png", dpi=160, metadata={"Software": None}, **ground)
    return content.getvalue()


@cache
def _theme() -> dict[str, str]:
    """The colours of dark pages, by name: in the style sheet they come last."""
    return dict(
        re.findall(r"--([\w-]+): (#\w{6});", (files("niss") / "theme.css").read_text(encoding="utf-8"))
    )


class _Painter:
    """Paints what `niss.svg` draws with, and no other SVG."""

    def __init__(self, axes: Axes, colours: dict[str, str]) -> None:
        self._axes, self._colours = axes, colours

    def paint(self, element: Element, left: float = 0.0, top: float = 0.0, **inherited: Any) -> None:
        """An element and what is in it, moved so far; inherited are the size of letters and what cuts it off."""
        kind, own = element.tag.rpartition("}")[2], element.attrib
        if kind in ("style", "title") or own.get("class") == "bands":
            return
        if moved := re.fullmatch(r"translate\((\S+) (\S+)\)", own.get("transform", "")):
            left, top = left + float(moved[1]), top + float(moved[2])
        if "font-size" in own:
            inherited["size"] = float(own["font-size"])
        if kind == "svg" and "x" in own:
            inherited["cut"] = self._rectangle(own, left, top)
        if kind == "text":
            self._write(element, left, top, inherited["size"])
        elif kind == "image":
            x, y, width, height = _place(own, left, top)
            pixels = imread(BytesIO(b64decode(own["href"].partition(",")[2])))
            self._axes.imshow(
                pixels, extent=(x, x + width, y + height, y), aspect="auto", interpolation="nearest"
            )
        elif kind in ("rect", "circle", "line", "path"):
            self._draw(self._shape(kind, own, left, top), own, inherited.get("cut"))
        for inner in element:
            self.paint(inner, left, top, **inherited)

    def _colour(self, said: str | None) -> str:
        """A colour of the theme, or the one that stands for it in the drawing."""
        if said in (None, "none", "currentColor"):
            return self._colours["ink"] if said == "currentColor" else "none"
        name, _, usual = said.removeprefix("var(--").removesuffix(")").partition(", ")
        return self._colours.get(name, usual) or said

    def _rectangle(self, own: dict[str, str], left: float, top: float) -> Rectangle:
        x, y, width, height = _place(own, left, top)
        return Rectangle((x, y), width, height, transform=self._axes.transData)

    def _shape(self, kind: str, own: dict[str, str], left: float, top: float) -> Patch:
        if kind == "rect":
            return self._rectangle(own, left, top)
        if kind == "circle":
            return Circle((float(own["cx"]) + left, float(own["cy"]) + top), float(own["r"]))
        steps = own.get("d") or "M{x1} {y1}L{x2} {y2}".format(**own)
        codes, places = [], []
        x, y = 0.0, 0.0
        for step, numbers in re.findall(r"([MLHVhZ])([^MLHVhZ]*)", steps):
            values = [float(one) for one in numbers.split()]
            if step in "ML":
                x, y = values
            elif step == "V":
                (y,) = values
            else:
                x = {"H": 0.0, "h": x, "Z": x}[step] + sum(values)
            places.append((x + left, y + top))
            codes.append({"M": Path.MOVETO, "Z": Path.CLOSEPOLY}.get(step, Path.LINETO))
        return PathPatch(Path(places, codes))

    def _draw(self, shape: Patch, own: dict[str, str], cut: Rectangle | None) -> None:
        width = float(own.get("stroke-width", 1.0))
        dashes = tuple(float(one) / width for one in own.get("stroke-dasharray", "").split())
        shape.set(
            facecolor=self._colour(own.get("fill")),
            edgecolor=self._colour(own.get("stroke")),
            alpha=float(own["fill-opacity"]) if "fill-opacity" in own else None,
            linewidth=_POINT * width if "stroke" in own else 0.0,
            linestyle=(0.0, dashes) if dashes else "-",
            joinstyle="round",
        )
        self._axes.add_patch(shape)
        if cut is not None:
            shape.set_clip_path(cut)

    def _write(self, element: Element, left: float, top: float, size: float) -> None:
        own = element.attrib
        x, y, turn = float(own["x"]), float(own["y"]), 0.0
        if turned := re.fullmatch(r"translate\((\S+) (\S+)\) rotate\((\S+)\)", own.get("transform", "")):
            x, y, turn = float(turned[1]), float(turned[2]), -float(turned[3])
        text = self._axes.text(
            x + left, y + top, element.text or "", parse_math=False, rotation=turn, rotation_mode="anchor",
            ha={"middle": "center", "end": "right"}.get(own.get("text-anchor", ""), "left"), va="baseline",
            color=self._colour(own.get("fill")), fontsize=_POINT * _LETTERS * float(own.get("font-size", size)),
        )  # fmt: skip
        if "stroke" in own:
            width = _POINT * float(own["stroke-width"])
            text.set_path_effects([withStroke(linewidth=width, foreground=self._colour(own["stroke"]))])


def _place(own: dict[str, str], left: float, top: float) -> tuple[float, float, float, float]:
    x, y, width, height = (float(own[side]) for side in ("x", "y", "width", "height"))
    return x + left, y + top, width, height
