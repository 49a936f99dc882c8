"""A method looks the same in every figure, those that protect nobody are marked, and axes show what differs."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from experiments.reproduce.chart import far_below
from niss.charts import Curves, Series, Strip, marked
from niss.figures import png
from niss.methods import METHODS, look_of
from niss.methods.look import BLUE, INK, SERIES, SKY, Look, distinct
from niss.svg import chart_svg, sheet


def test_every_method_has_a_colour_and_a_marker_of_its_own():
    looks = [method.look for method in METHODS.values()]
    assert len({look.colour for look in looks}) == len(looks)
    assert len({look.marker for look in looks}) == len(looks)
    assert {look.colour for look in looks} <= {INK, *SERIES}


def test_whoever_protects_nobody_is_dotted_hollow_and_named():
    for name, method in METHODS.items():
        assert look_of(name).hollow is not method.private
        assert look_of(name, protected=False).hollow
    assert look_of("niss").colour == BLUE
    assert look_of("niss", protected=False).colour == SKY
    hollow, full = (curve(look_of(name)) for name in ("fedavg", "niss"))
    assert 'd="M' in hollow
    assert 'fill="var(--paper' in hollow.partition('class="bands"')[0]
    assert 'fill="var(--paper' not in full.partition('class="bands"')[0]
    assert marked("fedavg", protected=False) == "fedavg (unprotected)"
    assert marked("niss", protected=True) == "niss"


def test_a_method_of_another_version_can_be_drawn():
    assert look_of("from the future").colour in SERIES


def test_variants_of_one_method_are_told_apart():
    niss = look_of("niss")
    looks = distinct([niss, niss, look_of("niss", protected=False), niss, look_of("central-dp")])
    assert looks[0] == niss
    assert len({(look.colour, look.marker) for look in looks}) == len(looks)
    assert len(distinct([niss] * 30)) == 30


@pytest.mark.parametrize(
    ("curves", "below"),
    [
        ([[0.8, 0.9], [0.85, 0.88], [0.1, 0.2]], {2}),
        ([[0.8, 0.9], [0.4, 0.7], [0.1, 0.2]], set()),  # The others differ enough on the whole axis.
        ([[0.9], [0.1]], set()),  # Two curves: their distance is the finding.
        ([[0.8, 0.9], [0.85, 0.88], [0.1, 0.86]], set()),  # It crosses the others.
        ([[], [0.9], [0.89], [0.1]], {3}),
        ([], set()),
    ],
)
def test_experiments_leave_out_curves_far_below_the_others(curves, below):
    assert far_below(curves) == below


def curve(look: Look) -> str:
    return str(chart_svg(chart(look)))


def chart(look: Look) -> Curves:
    """A curve with its marks, a band beside it, and a named line across."""
    line = Series("one", look, [(0.0, 0.0), (1.0, 1.0)], marks=True)
    band = Series("band", Look(INK, ""), [(0.0, 0.5), (1.0, 0.5)], spread=[(0.0, 0.2), (0.0, 0.4)])
    words = {"title": "t", "across": "x", "up": "y"}
    return Curves(**words, series=[line, band], levels={"a line with its name": 0.7})


def drawn(*, dark: bool) -> np.ndarray:
    content = png(sheet([chart(look_of("niss"))]), dark=dark)
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGBA"))


def test_dark_figures_are_light_on_nothing():
    light, dark = drawn(dark=False), drawn(dark=True)
    assert light.shape == dark.shape
    assert light[..., 3].min() == 255
    assert tuple(light[0, 0]) == (255, 255, 255, 255)
    assert dark[0, 0, 3] == 0
    opaque = dark[dark[..., 3] > 250][:, :3]
    assert len(opaque) > 100
    # No white around words, and no ink: apart from the page's own ground all that is drawn is brighter than it.
    assert not (opaque == 255).all(axis=1).any()
    inked = opaque[(opaque != (0x16, 0x17, 0x1A)).any(axis=1)]
    assert np.percentile(inked.sum(axis=1), 2) > 3 * 50


def test_a_sheet_shows_recovered_pictures_as_they_are():
    """Pixel for pixel, in grey and in colour; what is beyond black and white is cut, what is no number is grey."""
    grey, colour, lost = np.full((1, 2, 2), 2.0), np.zeros((3, 2, 2)), np.full((1, 2, 2), np.nan)
    colour[0] = 1.0
    strips = [
        Strip("grey, cut", [("white", grey)], note="a note"),
        Strip("colour", [("red", colour), ("lost", lost)]),
    ]
    text = sheet([], strips)
    assert all(f">{words}<" in text for words in ("grey,", "cut", "a note", "white", "colour", "red"))
    pixels = np.asarray(Image.open(io.BytesIO(png(text, dark=True))).convert("RGBA")).reshape(-1, 4).tolist()
    for shown in ([255, 255, 255, 255], [255, 0, 0, 255], [127, 127, 127, 255]):
        assert pixels.count(shown) > 20_000


def test_what_no_drawing_may_carry_becomes_a_question_mark():
    assert "odd?name" in sheet([replace(chart(look_of("niss")), across="odd\x1bname")])
    assert png(sheet([replace(chart(look_of("niss")), across="odd\x00\ud800name")]))
