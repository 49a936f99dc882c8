"""The charts of attacks: what each makes of its findings, and what the page draws from attack.json alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from niss.attacks import EXPERIMENTS, load_experiment
from niss.attacks.experiment import Findings
from niss.charts import Chart, Curves, Rows, charts_from_json, charts_to_json, shown
from niss.figures import draw_sheet
from niss.files import to_json
from niss.report import write_report
from report.test_attack_page import write_attack

CASES = ("fedavg", "niss")
LOSSES = {
    "rows": [
        {"case": "fedavg", "epsilon_joint": math.inf, "psnr": 30.0},
        {"case": "niss", "epsilon_joint": 3.0, "psnr": 4.0},
    ],
    "curves": {
        "losses": {case: [1.0 / (step + 1) for step in range(300)] for case in CASES},
        "blind_guess_psnr": 9.0,
    },
}
STEPS = {
    "rows": [
        dict.fromkeys(("rounds", "answers"), 10**power)
        | {"error": 10.0 / 2**power, "predicted_error": 11.0 / 2**power, "psnr": 5.0 + 4 * power}
        for power in range(5)
    ],
    "curves": {"blind_guess_psnr": 9.0, "allowed_rounds": 40},
}
# What each attack finds, as far as charts need it.
FINDINGS: dict[str, dict[str, Any]] = {
    "dlg": LOSSES,
    "invert": LOSSES,
    "joint": {
        "rows": LOSSES["rows"],
        "curves": LOSSES["curves"]
        | {
            "sweep": {
                "tau2": [1e-9, 1e-6, 1e-3],
                "predicted": [1e-3, 0.1, 10.0],
                "measured": [2e-3, 0.1, 9.0],
            },
            "calibrated_tau2": 1e-4,
        },
    },
    "average": STEPS,
    "rerun": STEPS,
    "collude": {
        "rows": [
            {
                "sweep": sweep,
                "distortion": kind,
                "rho": rho,
                "tau2": tau2,
                "error": 1.0 + rho,
                "predicted_error": math.inf if tau2 == 0.0 else 1.1 + rho,
                "psnr": 12.0,
                "predicted_psnr": 11.0,
            }
            for kind in ("additive", "projection")
            for sweep, rho, tau2 in (
                ("rho", 0.0, 1e-3),
                ("rho", 1.0, 1e-3),
                ("tau2", 1.0, 0.0),
                ("tau2", 1.0, 1e-2),
            )
        ],
        "curves": {"blind_guess_psnr": 9.0},
    },
    "audit": {
        "rows": [
            {"case": "niss, τ = 0", "method": "niss", "joint": math.inf, "marginal": 2.04, "proved": 5.6},
            {"case": "dp-fedavg", "method": "dp-fedavg", "joint": 3.0, "marginal": 3.0, "proved": 0.72},
        ],
        "curves": {
            "rates": {
                case: {
                    "false_positive": [0.01, 0.1, 1.0],
                    "true_positive": [0.0, 0.2, 1.0],
                    "most": [0.1, 0.3, 1.0],
                }
                for case in ("niss, τ = 0", "dp-fedavg")
            }
        },
    },
    "carried": {
        "rows": [
            {"attack": "likelihood ratio", "rule": None, "ratio": 1.0, "measured": 0.72, "claimed": 0.719},
            {"attack": "ends early", "rule": "off", "ratio": 1.95, "measured": None, "claimed": 0.719},
            {"attack": "ends early", "rule": "on", "ratio": 1.0, "measured": None, "claimed": 0.719},
        ],
        "curves": {},
    },
    "fake-dropout": {
        "rows": [
            {"story": "graded", "rule": "off", "left": 0.08, "epsilon": 13.43},
            {"story": "graded", "rule": "on", "left": 1.04, "epsilon": 2.93},
        ],
        "curves": {},
    },
}
# Those that recover pictures, which no chart shows.
PICTURES = {"dlg", "invert", "joint", "average", "rerun"}


def charts_of(attack: str) -> list[Chart]:
    findings = Findings(attack, {}, {}, **FINDINGS[attack])
    return shown(load_experiment(attack)().charts(findings))


# What the file of each attack holds.
FOUND: dict[str, dict[str, Any]] = {
    attack: to_json(found | {"charts": charts_to_json(charts_of(attack)), "pictures": attack in PICTURES})
    for attack, found in FINDINGS.items()
}
SAID = {
    "dlg": "fedavg (unprotected)",
    "invert": "Mismatch, 1 − cosine",
    "joint": "calibrated",
    "average": "the ledger refuses more",
    "rerun": "Answers to the same round",
    "collude": "additive: accountant",
    "audit": "claimed, joint view: no guarantee",
    "carried": "server, rule off: 1.950",
    "fake-dropout": "rule off: 0.08, ε 13.43",
}


def test_every_attack_has_its_charts() -> None:
    assert set(EXPERIMENTS) == set(FOUND)
    assert all(found["charts"] for found in FOUND.values())


@pytest.mark.parametrize("attack", FOUND)
def test_charts_are_read_back_from_the_file(attack: str) -> None:
    assert charts_from_json(json.loads(json.dumps(FOUND[attack]["charts"]))) == charts_of(attack)


@pytest.mark.parametrize("attack", FOUND)
def test_the_page_shows_charts_with_their_values(tmp_path: Path, attack: str) -> None:
    folder = write_attack(tmp_path / "a", attack=attack, **FOUND[attack])
    text = write_report(folder).read_text(encoding="utf-8")
    assert text.count('class="bands"') == 2 * len(charts_of(attack)) > 0
    assert SAID[attack] in text
    assert ("data:image/png" in text) == (attack in PICTURES), "what charts repeat is not shown a second time"


def test_an_attack_in_a_run_has_charts_too(demo: Path) -> None:
    write_attack(demo / "attacks" / "carried", attack="carried", **FOUND["carried"])
    text = write_report(demo).read_text(encoding="utf-8")
    assert "server, rule off: 1.950" in text
    assert "data:image/png" not in text


def test_a_method_has_its_look_and_what_is_unknown_none() -> None:
    (chart,) = charts_of("dlg")
    assert isinstance(chart, Curves)
    open_, closed = chart.series
    assert open_.look.hollow
    assert not closed.look.hollow
    rates, claims = charts_of("audit")
    assert isinstance(rates, Curves)
    assert isinstance(claims, Rows)
    assert [len(one.points) for one in rates.series[:2]] == [3, 2], "0 has no place on a logarithmic axis"
    assert claims.rows[0][1][-1].text == "no guarantee"


LOOK = {"colour": "#0072b2", "marker": "o", "line": "-", "hollow": False}
CURVE = {"name": "a", "look": LOOK, "points": [[1.0, 2.0]], "line": True, "marks": False}


def curves(change: dict[str, Any], **chart: Any) -> list[dict[str, Any]]:
    """A chart of one curve, changed."""
    return [{"title": "t", "across": "x", "up": "y", "series": [CURVE | change]} | chart]


@pytest.mark.parametrize(
    ("damage", "left"),
    [
        (None, 0),
        ("words", 0),
        ([None, {}, []], 0),
        (curves({}, series="none"), 0),
        (curves({}, series=[]), 0),
        (curves({"points": [[1, None]]}), 0),
        (curves({"points": [[0, 1]]}, log="x"), 0),
        (curves({"points": [[1, 1e300], [2, -1e300]]}), 0),
        (curves({}, ticks=["only one"]), 0),
        (curves({}, log="everything"), 0),
        (curves({}, least=math.nan), 0),
        (curves({}, log="y", least=0.0), 0),
        (curves({}, start=math.inf), 0),
        (curves({}), 1),
        (curves({"look": LOOK | {"colour": "red"}}), 1),
        (curves({"look": LOOK | {"marker": "$x$"}}), 1),
        (curves({"look": LOOK | {"line": "wavy"}}), 1),
        ([{"title": "t", "across": "x", "rows": [["a", []]]}], 0),
    ],
)
def test_a_damaged_file_has_its_picture_and_the_charts_that_can_be_drawn(
    tmp_path: Path, damage: Any, left: int
) -> None:
    found = charts_from_json(damage)
    assert len(found) == left
    for chart in found:
        draw_sheet([chart], [])
    folder = write_attack(tmp_path / "a", charts=damage)
    text = write_report(folder).read_text(encoding="utf-8")
    assert "data:image/png" in text
    assert text.count('class="bands"') == 2 * left
