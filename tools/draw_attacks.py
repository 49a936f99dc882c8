"""Run the attacks that the guide shows, and draw their figures on white and for dark pages.

Usage: python tools/draw_attacks.py [NAME ...]     all of them take about fifteen minutes on one core

Every attack is seeded, so the same code gives the same figures.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from niss.attacks import load_experiment
from niss.attacks.experiment import drawn
from niss.charts import Chart, Strip
from niss.figures import png
from niss.files import write_output
from niss.svg import sheet

IMAGES = Path(__file__).parents[1] / "docs" / "images"
# The figure, the attack, and its settings where they are not the defaults.
SHOWN = {
    "audit": ("audit", {"rounds": 100_000}),
    "average": ("average", {}),
    "carried": ("carried", {}),
    "collude": ("collude", {}),
    "fake-dropout": ("fake-dropout", {}),
    "figure-4": ("dlg", {"plan": "paper", "methods": ("fedavg", "dp-fedavg", "niss")}),
    "invert": ("invert", {"batch": 4, "steps": 3, "methods": ("fedavg", "niss")}),
    "joint": ("joint", {}),
    "oracle": ("oracle", {}),
    "records": ("audit", {"unit": "record"}),
    "silo": ("silo", {"runs": 300}),
}
# The first picture of the README: the strips of `invert` alone, named for those who know no method yet.
AT_A_GLANCE = {
    "original": "a client's data",
    "fedavg": "the server sees, without niss",
    "niss": "the server sees, with niss",
}


def main() -> None:
    for name in sys.argv[1:] or SHOWN:
        kind, settings = SHOWN[name]
        experiment = load_experiment(kind)(**settings)
        findings = experiment.start()
        experiment.run(findings, lambda *_: None)
        print(findings.headline)
        charts, strips = drawn(experiment, findings)
        draw(f"attack-{name}", charts, strips)
        if name == "invert":
            seen = [
                replace(one, name=AT_A_GLANCE[one.name], note="", pictures=one.pictures[:3]) for one in strips
            ]
            draw("attack-seen", [], seen)  # Three: its words stay large on a phone.


def draw(name: str, charts: list[Chart], strips: list[Strip]) -> None:
    for dark in (False, True):
        path = IMAGES / f"{name}{'-dark' if dark else ''}.png"
        print(write_output(path, png(sheet(charts, strips), dark=dark)), flush=True)


if __name__ == "__main__":
    main()
