"""Charts as SVG for pages: in the colours of the theme, named for screen readers, with values under the pointer.

A drawing is text made here alone, from a `niss.charts.Chart`: no script, no style sheet and no id is in it, so that
any number of drawings fit into one page, also into one that allows no inline styles. Whatever a chart says is escaped.
Widths of texts are only estimated, since they are set in whatever sans-serif the reader has. Beyond a page, on a
`sheet` of its own, the colours are those of a light one; `niss.figures` makes a picture of it. Only a sheet with
recovered pictures on it loads matplotlib, to encode them.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from io import BytesIO

from markupsafe import Markup, escape

from niss.charts import (
    Axis,
    Chart,
    Curves,
    Key,
    Rows,
    Series,
    Strip,
    axis_ends,
    describe,
    evenly_spaced,
    log_tick,
    short,
    spread_out,
)
from niss.methods.look import DASHED, INK, QUIET, RULE, SERIES, Look
from niss.redaction import printable

# In pixels of the page; for a phone a chart is drawn narrower, in letters as large. A sheet of several is broader.
WIDE, NARROW, SHEET = 730.0, 350.0, 928.0
_FONT, _LETTER, _LINE = 12.5, 6.7, 18.0
# Around a sheet.
_MARGIN = 8.0
_NAMES, _PICTURE = 132.0, 110.0  # Of a strip: what its name takes, and a picture at most.
# Beside names at the ends of curves the axes must stay so wide.
_LEAST_AXES = 260.0
# More bands than pixels help nobody; of a longer run, evenly spaced places can be read off.
MOST_BANDS = 120

# The colours as drawn, and what stands for them in a page.
THEME = {INK: "currentColor", RULE: f"var(--rule, {RULE})", QUIET: f"var(--quiet, {QUIET})"} | {
    colour: f"var(--series-{number}, {colour})" for number, colour in enumerate(SERIES, start=1)
}
_PAPER = "var(--paper, #ffffff)"
# Corners of a marker and its turn in degrees, by the name matplotlib has for it; of stars, every other lies inside.
_POLYGONS = {
    **{"s": (4, 45.0), "D": (4, 0.0), "d": (4, 0.0), "^": (3, 0.0), "v": (3, 180.0), "<": (3, 270.0)},
    **{">": (3, 90.0), "p": (5, 0.0), "h": (6, 0.0), "H": (6, 30.0), "8": (8, 22.5)},
}
_STARS = {"P": (4, 0.0), "X": (4, 45.0), "*": (5, 0.0)}


def in_two_widths(*charts: Chart) -> Markup:
    """Charts for a window and for a phone, of which the page shows those that fit.

    Several stand side by side, each under its title, and all keys once below them.
    """
    drawings = Markup("")
    for kind, width in {"on-wide": WIDE, "on-narrow": NARROW}.items():
        if len(charts) == 1:
            drawings += _tag("div", chart_svg(charts[0], width), class_=kind)
            continue
        panels = [
            _tag("figure", _tag("figcaption", escape(chart.title)), chart_svg(chart, NARROW, keyed=False))
            for chart in charts
        ]
        keys, height = _draw_keys([key for chart in charts for key in chart.legend()], width, 10.0)
        below = _tag("svg", keys, viewBox=_box(width, height), aria_hidden="true")
        drawings += _tag("div", _tag("div", *panels, class_="panels"), below, class_=kind)
    return drawings


def sheet(
    charts: Sequence[Chart], strips: Sequence[Strip] = (), *, keys_once: bool = False, narrow: bool = False
) -> str:
    """A document of its own: pictures above, charts below, side by side and each under its title where there are more.

    keys_once  all keys stand together at the foot, and of more than eight charts three are side by side
    narrow     for a phone: one below the other
    """
    columns = 1 if narrow else min(len(charts), 3 if keys_once and len(charts) > 8 else 2) or 1
    width = NARROW if narrow else WIDE if columns == 1 else SHEET
    if not charts:
        width = min(width, _NAMES + _PICTURE * max((len(one.pictures) for one in strips), default=0))
    parts, top = [Markup("<style>.bands { display: none }</style>")], _MARGIN  # Cards are for pages.

    def put(content: Markup, left: float, height: float) -> float:
        at = f"translate({left + _MARGIN:.1f} {height:.1f})"
        parts.append(_tag("g", content, transform=at, font_size=_FONT))
        return height

    for strip in strips:
        content, height = _draw_strip(strip, width)
        top = put(content, 0.0, top) + height
    for start in range(0, len(charts), columns):
        row = charts[start : start + columns]
        lines = max(one.title.count("\n") + 1 for one in row) if keys_once or len(charts) > 1 else 0
        heights = []
        for number, chart in enumerate(row):
            left = number * width / columns
            title = [
                _words(0.0, _LINE * place, line) for place, line in enumerate(chart.title.split("\n"), 1)
            ]
            put(Markup("").join(title[:lines]), left, top)
            content, height = _drawn(chart, width / columns - 14.0 * (columns > 1), keyed=not keys_once)
            put(content, left, top + _LINE * (lines + 0.5))
            heights.append(height)
        top += max(heights) + _LINE * (lines + 1.0)
    if keys_once:
        content, height = _draw_keys([key for chart in charts for key in chart.legend()], width, 10.0)
        top = put(content, 0.0, top) + height
    width, height = width + 2 * _MARGIN, top + _MARGIN
    space = {"xmlns": "http://www.w3.org/2000/svg", "color": INK, "font_family": "sans-serif"}
    whole = _tag("svg", *parts, viewBox=_box(width, height), width=width, height=height, **space)
    return printable(whole, longest=None, keep="\n\t")


def _draw_strip(strip: Strip, width: float) -> tuple[Markup, float]:
    """Its name and note at the left, over two lines where the name has a comma, and its pictures beside it."""
    import numpy as np
    from matplotlib.image import imsave

    left, captions = _NAMES, [caption.split("\n") for caption, _ in strip.pictures]
    side = min(_PICTURE, (width - left) / max(len(captions), 1))
    above = 15.0 * max(map(len, captions), default=1)
    words = [(line, INK) for line in strip.name.replace(", ", ",\n").split("\n")] + [(strip.note, QUIET)]
    middle, parts = above + side / 2 - 9.0 * len(words) + _LINE, []
    for number, (line, colour) in enumerate(words):
        height = middle + _LINE * number
        parts.append(_words(left - 10.0, height, line, text_anchor="end", fill=THEME[colour]))
    for number, (lines, (_, pixels)) in enumerate(zip(captions, strip.pictures, strict=True)):
        x, file = left + number * side, BytesIO()
        for back, line in enumerate(reversed(lines)):
            at = x + side / 2 - 3.0, above - 1.0 - 14.0 * back
            parts.append(_words(*at, line, text_anchor="middle", font_size=11.5))
        cut = np.nan_to_num(pixels, nan=0.5).clip(0.0, 1.0).transpose(1, 2, 0)
        imsave(file, (cut if cut.shape[2] == 3 else cut.repeat(3, 2)).astype(float), format="png")
        place = {"x": x, "y": above + 4.0, "width": side - 6.0, "height": side - 6.0}
        data = f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"
        parts.append(_tag("image", href=data, image_rendering="pixelated", **place))
    return Markup("").join(parts), above + side + 8.0


def chart_svg(chart: Chart, width: float = WIDE, *, keyed: bool = True) -> Markup:
    """A chart as an element of a page; `width` decides how it is laid out, the page how large it is shown."""
    content, height = _drawn(chart, width, keyed=keyed)
    name = _tag("title", escape(chart.title))
    return _tag("svg", name, content, viewBox=_box(width, height), role="img", aria_label=describe(chart))


def _drawn(chart: Chart, width: float, *, keyed: bool) -> tuple[Markup, float]:
    """What is in the drawing of a chart, and how high it is."""
    if isinstance(chart, Rows):
        content, height = _draw_rows(chart, width)
        named = False
    else:
        content, height, named = _draw_curves(chart, width)
    if keyed and not named and (keys := chart.legend()):
        drawn, height = _draw_keys(keys, width, height + 12.0)
        content += drawn
    return _tag("g", content, font_size=_FONT), height


def _draw_curves(chart: Curves, width: float) -> tuple[Markup, float, bool]:
    """The drawing, its height, and whether its curves are named where they end."""
    shown = [one for one in chart.series if one.points]
    points = [point for one in shown for point in one.points]
    spread = [end for one in shown for pair in one.spread for end in pair]
    heights = [y for _, y in points] + [*chart.levels.values(), *spread]
    ends = axis_ends(heights, chart.least, chart.most, log="y" in chart.log)
    places = [x for x, _ in points] + list(chart.limits.values())
    across = axis_ends(places, chart.start, chart.end, log="x" in chart.log)
    if chart.start is None and points and not chart.ticks and "x" not in chart.log:
        across = (min(places), max(places)) if min(places) < max(places) else across
    top, tall = 10.0, 250.0 if width > NARROW else 200.0
    upright = Axis(*ends, top + tall, top, "y" in chart.log)
    ticks = {tick: chart.tick(tick, "y") for tick in upright.ticks(8)}
    titles = chart.up.split("\n")
    left = 16.0 + 15.0 * len(titles) + _LETTER * max(map(len, ticks.values()), default=0)
    beside = 56.0 + _LETTER * max((len(chart.named(one)) for one in shown), default=0)
    named = chart.ends and bool(shown) and width - left - beside > _LEAST_AXES
    right = width - (beside if named else 14.0)
    sideways = Axis(*across, left, right, "x" in chart.log)
    inner = [_curve(chart, one, number, sideways, upright) for number, one in enumerate(shown)]
    frame = {"x": left, "y": top - 4.0, "width": right - left + 6.0, "height": tall + 4.0}
    parts = [
        _axes(chart, sideways, upright, ticks, titles),
        # An inner drawing is cut at its frame. Marks may reach a little beyond the ends of the axes.
        _tag("svg", *inner, viewBox=" ".join(f"{side:.1f}" for side in frame.values()), **frame),
        _levels(chart, sideways, upright),
        _ends(chart, shown, sideways, upright) if named else "",
        _bands(chart, sideways, upright, width),
    ]
    if not shown:
        middle = ((left + right) / 2, top + tall / 2)
        parts.append(_words(*middle, chart.empty, text_anchor="middle"))
    return Markup("").join(parts), top + tall + 46.0, named


def _axes(
    chart: Curves, sideways: Axis, upright: Axis, ticks: Mapping[float, str], titles: Sequence[str]
) -> Markup:
    """Thin lines across, ticks with their numbers, and what the axes show."""
    parts = []
    for tick, text in ticks.items():
        y = upright.place(tick)
        parts.append(_line(sideways.start, y, sideways.end, y, RULE))
        parts.append(_words(sideways.start - 7.0, y + 4.0, text, text_anchor="end"))
    names = dict(enumerate(chart.ticks)) if chart.ticks else {}
    room = max(3, int((sideways.end - sideways.start) / 75.0))
    for tick in names or sideways.ticks(room):
        if chart.head == "Round" and tick != int(tick):
            continue
        x, text = sideways.place(tick), names[int(tick)] if names else chart.tick(tick, "x")
        parts.append(_line(x, upright.start, x, upright.start + 4.0))
        parts.append(_words(x, upright.start + 18.0, text, text_anchor="middle"))
    parts.append(_line(sideways.start, upright.start, sideways.end, upright.start))
    parts.append(_line(sideways.start, upright.start, sideways.start, upright.end))
    middle = (sideways.start + sideways.end) / 2
    parts.append(_words(middle, upright.start + 37.0, chart.across, text_anchor="middle"))
    centre = (upright.start + upright.end) / 2
    for number, title in enumerate(titles):
        at = f"translate({12.0 + 15.0 * number:.1f} {centre:.1f}) rotate(-90)"
        parts.append(_words(0.0, 0.0, title, text_anchor="middle", transform=at))
    return Markup("").join(parts)


def _curve(chart: Curves, one: Series, number: int, sideways: Axis, upright: Axis) -> Markup:
    """A curve with its spread and its marks; the shift of marks by `number` tells curves on each other apart."""
    places = [(sideways.at(x), upright.at(y)) for x, y in one.points]
    spread = [(x, *map(upright.place, pair)) for (x, _), pair in zip(places, one.spread, strict=False)]
    parts = []
    if one.marks:
        parts += [_line(x, low, x, high, one.look.colour, stroke_width=1.6) for x, low, high in spread]
    elif spread:
        back = _path([(x, low) for x, low, _ in reversed(spread)], step="VH" if chart.step else "")
        outline = (
            _path([(x, high) for x, _, high in spread], step="HV" if chart.step else "") + f"L{back[1:]}Z"
        )
        parts.append(_tag("path", d=outline, fill=_paint(one.look), fill_opacity="0.18"))
    if one.line:
        width = 0.7 if one.thin else 2.0
        path = _path(places, step="HV" if chart.step else "")
        parts.append(_tag("path", d=path, **_stroke(one.look, width)))
    if one.marks or len(places) == 1 or not (one.line or one.thin):
        every = 1 if len(places) <= 12 else math.ceil(len(places) / (8 if one.line else 16))
        shifted = places[min(number % every, len(places) - 1) :: every]
        parts += [_marker(one.look, x, y) for x, y in shifted]
    return Markup("").join(parts)


def _path(places: Sequence[tuple[float, float]], *, step: str = "") -> str:
    """The path through the places: straight, or in steps that go first across ("HV") or first up ("VH")."""
    forms = {"": "L{0:.1f} {1:.1f}", "HV": "H{0:.1f}V{1:.1f}", "VH": "V{1:.1f}H{0:.1f}"}
    first, *rest = places
    return f"M{first[0]:.1f} {first[1]:.1f}" + "".join(forms[step].format(*place) for place in rest)


def _levels(chart: Curves, sideways: Axis, upright: Axis) -> Markup:
    """Lines by name: across, each with its name above its right end, or its left where one is close; and upright."""
    parts, before = [], -math.inf
    for name, level in sorted(chart.levels.items(), key=lambda item: -item[1]):
        y = upright.place(level)
        parts.append(_line(sideways.start, y, sideways.end, y, QUIET, **_dashes(DASHED, 1.2)))
        crowded = y - before < 1.1 * _LINE
        x, anchor = (sideways.start + 5.0, "start") if crowded else (sideways.end - 3.0, "end")
        halo = {"paint_order": "stroke", "stroke": _PAPER, "stroke_width": "4"}
        parts.append(_words(x, y - 5.0, name, text_anchor=anchor, fill=THEME[QUIET], **halo))
        before = -math.inf if crowded else y
    for limit in chart.limits.values():
        x = sideways.place(limit)
        parts.append(_line(x, upright.start, x, upright.end, QUIET, **_dashes(DASHED, 1.6)))
    return Markup("").join(parts)


def _ends(chart: Curves, shown: Sequence[Series], sideways: Axis, upright: Axis) -> Markup:
    """Each curve's name beside its end, with a thin line to it and a sample; pushed apart where ends meet."""
    ranked = sorted(shown, key=lambda one: -one.points[-1][1])
    ends = [-upright.place(one.points[-1][1]) for one in ranked]
    parts, right = [], sideways.end
    for one, spot in zip(ranked, spread_out(ends, _LINE, -upright.start + 6.0, -upright.end), strict=True):
        x, y = one.points[-1]
        if upright.low <= y:
            start = (sideways.at(x) + 3.0, upright.at(y))
            parts.append(_line(*start, right + 12.0, -spot, QUIET, stroke_width=0.6))
        parts.append(_sample(one.key(""), right + 14.0, -spot))
        parts.append(_words(right + 48.0, -spot + 4.0, chart.named(one)))
    return Markup("").join(parts)


def _draw_rows(chart: Rows, width: float) -> tuple[Markup, float]:
    """Rows from above, their names at the left."""
    names = [short(name, 40 if width > NARROW else 22) for name, _ in chart.rows]
    left, tall, top = 16.0 + _LETTER * max(map(len, names), default=0), 30.0, 8.0
    beside = [note for (_, marks), note in zip(chart.rows, chart.notes, strict=False) if marks]
    longest = max(map(len, beside), default=0)
    bottom = top + tall * len(names)
    axis = Axis(
        *chart.range(),
        left,
        width - max(14.0 if chart.nothing is None else 36.0, _LETTER * longest),
        chart.log,
    )
    parts = []
    drawn = any(marks for _, marks in chart.rows)
    ticks = axis.ticks(max(3, int((axis.end - left) / 90.0))) if drawn else []
    if chart.nothing is not None:
        ticks = [tick for tick in ticks if tick < 0.9 * chart.nothing] + [chart.nothing]
    for tick in ticks:
        x, text = axis.place(tick), log_tick(tick, powers=True) if chart.log else f"{tick:.6g}"
        parts.append(_line(x, top, x, bottom, RULE))
        lines = ("no", "guarantee") if tick == chart.nothing else (text,)
        for number, line in enumerate(lines):
            parts.append(_words(x, bottom + 17.0 + 14.0 * number, line, text_anchor="middle"))
    parts.append(_line(left, top, left, bottom))
    if chart.level is not None:
        x = axis.place(chart.level[1])
        parts.append(_line(x, top, x, bottom, INK, **_dashes(DASHED, 1.2)))
    below = bottom + (48.0 if chart.nothing is not None else 36.0)
    # A long name of the axis ends where the drawing does.
    middle = min((left + axis.end) / 2, width - _LETTER * len(chart.across) / 2)
    parts.append(_words(middle, below, chart.across, text_anchor="middle"))
    for number, (name, (_, marks)) in enumerate(zip(names, chart.rows, strict=True)):
        y = top + tall * (number + 0.5)
        parts.append(_words(left - 8.0, y + 4.0, name, text_anchor="end"))
        single = [mark for mark in marks if not mark.bar]
        for mark in (mark for mark in marks if mark.bar):
            long = max(axis.place(mark.value) - left, 0.0)
            parts.append(_rect(left, y - 9.0, long, 18.0, fill=_paint(mark.look), fill_opacity="0.85"))
        for place, mark in enumerate(single):
            # One above the other, so that none hides another.
            at = y + 8.0 * (place - (len(single) - 1) / 2)
            parts.append(_marker(mark.look, axis.place(mark.value), at, 4.5))
        if chart.notes:
            end = max((axis.place(mark.value) for mark in marks), default=left)
            parts.append(_words(end + 7.0, y + 4.0, chart.notes[number]))
    bands = []
    for number in range(len(names)):
        read, y = chart.read(number), top + tall * number
        wide, high = _size(read)
        corner = (max(left, width - wide - 4.0), min(y + tall + 2.0, bottom + 40.0 - high))
        bands.append(_band((0.0, y, width, tall), corner, read))
    return Markup("").join([*parts, _tag("g", *bands, class_="bands")]), below + 8.0


def _bands(chart: Curves, sideways: Axis, upright: Axis, width: float) -> Markup:
    """For each place a band that catches the pointer, a line, a point on each curve, and a card beside it.

    The page of a report runs no script, so that every reading is in it from the start and CSS alone shows one.
    """
    found: dict[float, list[tuple[float, Series]]] = {}
    for one in chart.series:
        for x, y in one.points if not one.thin else ():
            found.setdefault(x, []).append((y, one))
    inside = [x for x in sorted(found) if sideways.low <= x <= sideways.high]
    if "x" in chart.log:
        # At most one in each of so many parts of the axis, which a long curve crosses slowly at first.
        part = (sideways.end - sideways.start) / (MOST_BANDS // 2)
        inside = list({int(sideways.at(x) / part): x for x in reversed(inside)}.values())[::-1]
    numbers, parts = evenly_spaced(inside, MOST_BANDS), []
    xs = [sideways.at(x) for x in numbers]
    top, bottom = upright.end, upright.start
    for index, (number, x) in enumerate(zip(numbers, xs, strict=True)):
        before = xs[index - 1] if index else sideways.start - (x - sideways.start)
        after = xs[index + 1] if index + 1 < len(xs) else 2.0 * x - before
        start = max(sideways.start, (before + x) / 2)
        end = max(start + 1.0, min(sideways.end + 8.0, (x + after) / 2))
        read = sorted(found[number], key=lambda item: -item[0])
        lines = [chart.place(number), *(f"{chart.written(y)}  {short(one.name, 34)}" for y, one in read)]
        colours = [_paint(one.look) for _, one in read]
        wide, tall = _size(lines)
        beside = x + 10.0 if x + 10.0 + wide < width else max(2.0, x - 10.0 - wide)
        at = (beside, max(top, min(bottom - tall - 6.0, (top + bottom - tall) / 2)))
        dots = [_tag("circle", cx=x, cy=upright.place(y), r=4.0, fill=_paint(one.look)) for y, one in read]
        catch = (start, top, end - start, bottom - top)
        parts.append(_band(catch, at, lines, colours, _line(x, top, x, bottom, QUIET), *dots))
    return _tag("g", *parts, class_="bands")


def _size(lines: Sequence[str]) -> tuple[float, float]:
    """Of a card with these lines."""
    return 32.0 + _LETTER * max(map(len, lines)), 10.0 + _LINE * len(lines)


def _band(
    catch: tuple[float, float, float, float],
    at: tuple[float, float],
    lines: Sequence[str],
    colours: Sequence[str] = (),
    *beside: Markup,
) -> Markup:
    """What catches the pointer, and the card that is shown then, with what is drawn `beside` it.

    The first line is its head; the others stand after a patch of their colour, where they have one.
    """
    x, y = at
    parts = [*beside, _rect(x, y, *_size(lines), class_="card", rx=4.0)]
    parts.append(_words(x + 8.0, y + _LINE - 1.0, lines[0], font_weight="600"))
    for number, line in enumerate(lines[1:], start=1):
        base = y + _LINE * (number + 1) - 1.0
        if colours:
            parts.append(_rect(x + 8.0, base - 9.0, 9.0, 9.0, fill=colours[number - 1]))
        parts.append(_words(x + (24.0 if colours else 8.0), base, line))
    caught = _rect(*catch, class_="catch", fill="none", pointer_events="all")
    return _tag("g", caught, _tag("g", *parts, class_="reading"), class_="band")


def _draw_keys(keys: Sequence[Key], width: float, top: float) -> tuple[Markup, float]:
    """The keys from left to right, as many in a line as fit, and where they end."""
    x, y, parts = 0.0, top, []
    for name, key in {key.name: key for key in keys}.items():
        wide = 56.0 + _LETTER * len(name)
        if x and x + wide - 20.0 > width:
            x, y = 0.0, y + _LINE + 2.0
        parts += [_sample(key, x, y), _words(x + 36.0, y + 4.0, name)]
        x += wide
    return _tag("g", *parts, font_size=_FONT), y + 12.0


def _sample(key: Key, x: float, y: float) -> Markup:
    """A piece of a curve, a mark, a bar or a band, as it stands before a name."""
    _, look, kind = key
    if kind in ("bar", "band"):
        opacity = "0.85" if kind == "bar" else "0.18"
        return _rect(x, y - 5.0, 28.0, 10.0, fill=_paint(look), fill_opacity=opacity)
    line = _tag("path", d=f"M{x:.1f} {y:.1f}h28", **_stroke(look, 2.0)) if kind != "marks" else ""
    return Markup("").join((line, _marker(look, x + 14.0, y) if kind != "line" else ""))


def _marker(look: Look, x: float, y: float, size: float = 3.6) -> Markup:
    colour = _paint(look)
    paint = {"fill": _PAPER if look.hollow else colour, "stroke": colour, "stroke_width": 1.2}
    if look.marker == "|":
        return _line(x, y - 11.0, x, y + 11.0, look.colour, stroke_width=2.4)
    if look.marker not in _POLYGONS and look.marker not in _STARS:
        return _tag("circle", cx=x, cy=y, r=size, **paint)
    corners, turn = _POLYGONS.get(look.marker) or _STARS[look.marker]
    radii = (1.5 * size, 0.6 * size) if look.marker in _STARS else (1.25 * size,)
    path, steps = "M", corners * len(radii)
    for step in range(steps):
        angle = math.radians(turn + 360.0 * step / steps)
        radius = radii[step % len(radii)]
        across = 0.6 if look.marker == "d" else 1.0
        path += f"{'L' if step else ''}{x + across * radius * math.sin(angle):.1f} {y - radius * math.cos(angle):.1f}"
    return _tag("path", d=f"{path}Z", **paint)


def _paint(look: Look) -> str:
    return THEME.get(look.colour, look.colour)


def _stroke(look: Look, width: float) -> dict[str, object]:
    return {"fill": "none", "stroke": _paint(look), "stroke_linejoin": "round", **_dashes(look.line, width)}


def _dashes(line: str | tuple[int, tuple[float, ...]], width: float) -> dict[str, object]:
    """Strokes and gaps, which looks give in widths of the line."""
    named = {"--": (3.7, 1.6), "-.": (6.4, 1.6, 1.0, 1.6), ":": (1.0, 1.65)}
    strokes = named.get(line, ()) if isinstance(line, str) else line[1]
    dashes = {"stroke_dasharray": " ".join(f"{width * length:.2g}" for length in strokes)} if strokes else {}
    return {"stroke_width": width, **dashes}


def _line(x1: float, y1: float, x2: float, y2: float, colour: str = INK, **more: object) -> Markup:
    options = {"stroke": THEME.get(colour, colour), "stroke_width": 0.9} | more
    return _tag("line", x1=x1, y1=y1, x2=x2, y2=y2, **options)


def _rect(x: float, y: float, width: float, height: float, **more: object) -> Markup:
    return _tag("rect", x=x, y=y, width=width, height=height, **more)


def _words(x: float, y: float, text: str, **more: object) -> Markup:
    return _tag("text", escape(text), x=x, y=y, **{"fill": "currentColor", **more})


def _box(width: float, height: float) -> str:
    return f"0 0 {width:.0f} {height:.0f}"


def _tag(name: str, *inner: str | Markup, **attributes: object) -> Markup:
    """An element; numbers have one digit after the point, and `inner` is markup already."""
    written = "".join(
        f" {key if key == 'viewBox' else key.rstrip('_').replace('_', '-')}="
        f'"{f"{value:.1f}" if isinstance(value, float) else escape(value)}"'
        for key, value in attributes.items()
    )
    return Markup(f"<{name}{written}>{''.join(inner)}</{name}>")
