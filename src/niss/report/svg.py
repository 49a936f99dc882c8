"""Makes a matplotlib SVG fit to stand inside a page: unique ids, colours of the theme, a name for readers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from xml.etree import ElementTree

SVG = "http://www.w3.org/2000/svg"
XLINK_HREF = "{http://www.w3.org/1999/xlink}href"
_COLOUR = re.compile(r"#[0-9a-fA-F]{6}\b")
_REFERENCE = re.compile(r"url\(#([^)]+)\)")


def inline_svg(
    drawn: str,
    *,
    prefix: str,
    title: str,
    description: str,
    theme: Mapping[str, str],
    overlay: Callable[[ElementTree.Element], None] | None = None,
) -> str:
    """`drawn` as an element for HTML; `theme` maps the colours as drawn to their CSS values.

    `overlay` may add elements on top, in the same units and colours.
    """
    root = ElementTree.fromstring(drawn)
    if overlay is not None:
        overlay(root)
    _drop(root, {f"{{{SVG}}}metadata", f"{{{SVG}}}style"})
    for element in root.iter():
        _make_ids_unique(element, prefix)
        style = element.get("style")
        if style is not None:
            element.set("style", _COLOUR.sub(lambda hit: theme.get(hit[0].lower(), hit[0]), style))
    # The size comes from the page; the viewBox keeps the proportions.
    root.attrib.pop("width", None)
    root.attrib.pop("height", None)
    root.set("role", "img")
    root.set("aria-label", description)
    # matplotlib sets these for everything in the document; here they must not reach beyond the figure.
    root.set("style", "stroke-linejoin: round; stroke-linecap: butt")
    name = ElementTree.Element(f"{{{SVG}}}title")
    name.text = title
    root.insert(0, name)
    ElementTree.register_namespace("", SVG)
    return ElementTree.tostring(root, encoding="unicode")


def _drop(root: ElementTree.Element, tags: set[str]) -> None:
    for parent in list(root.iter()):
        for child in [child for child in parent if child.tag in tags]:
            parent.remove(child)


def _make_ids_unique(element: ElementTree.Element, prefix: str) -> None:
    if "id" in element.attrib:
        element.set("id", f"{prefix}-{element.attrib['id']}")
    target = element.attrib.pop(XLINK_HREF, None)
    if target is not None:
        element.set("href", f"#{prefix}-{target.removeprefix('#')}")
    for key in ("clip-path", "style", "fill"):
        if "url(#" in element.attrib.get(key, ""):
            element.set(key, _REFERENCE.sub(rf"url(#{prefix}-\1)", element.attrib[key]))
