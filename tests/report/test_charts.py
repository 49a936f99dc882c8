"""Charts: of methods, of what clients spent and of attacks, as values, as the page draws them, and as pictures."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from niss.accounting import Charge, LedgerFile, LedgerHeader
from niss.attacks import EXPERIMENTS, load_experiment
from niss.attacks.experiment import Findings
from niss.charts import Chart, Curves, Rows, charts_from_json, charts_to_json, shown
from niss.claims import rounded_up
from niss.errors import ConfigError
from niss.figures import png
from niss.files import to_json
from niss.mechanism import Slots, gdp_epsilon
from niss.methods import METHODS
from niss.methods.look import SERIES
from niss.report import read_report_input
from niss.report.ledger import MOST_LINES, MOST_ROUNDS, client_rows, read_spending, spending, spending_of
from niss.report.run_charts import accuracy_chart, noise_chart, save_charts, spending_charts
from niss.runs.folder import ReportInput
from niss.svg import MOST_BANDS, NARROW, WIDE, chart_svg, sheet
from report.conftest import add_ledger, text_of, write_attack

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
    style = files("niss").joinpath("theme.css").read_text()
    for number, colour in enumerate(SERIES, start=1):
        assert f"--series-{number}: {colour};" in style
    assert {method.look.colour for method in METHODS.values() if method.private} <= set(SERIES)


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_curves_carry_their_names_and_last_values(demo: Path, width: float) -> None:
    shown = texts(accuracy_chart(read_report_input(demo)), width)
    assert "niss-kappa-4  82.1 %" in shown
    assert "dp-fedavg  21.0 %" in shown
    assert {"0 %", "100 %"} <= set(shown), "distances are what they look like"
    assert any(text.startswith("fedavg (unprotected)  ") for text in shown)
    assert {"Round", "Test accuracy (%)"} <= set(shown)


def test_noise_is_shown_in_a_round_and_in_the_model_and_methods_without_say_none(demo: Path) -> None:
    shown = texts(noise_chart(read_report_input(demo)))
    assert "in a round, measured: 4.4e-8" in shown
    assert "in the model after the last round, predicted: 1.31e-6" in shown
    assert "none" in shown
    assert "none beyond rounding (3e-19)" in shown
    assert {"in a round, measured", "in a round, predicted"} <= set(shown)


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


DELTA = 1e-5


def make(folder: Path, name: str = "ledger", budget: float | None = 2.0, **basis: object) -> LedgerFile:
    """Client 2 in every round, 1 in two, 10 in one; client 0 never."""
    with LedgerFile.create(
        folder / f"{name}.jsonl",
        LedgerHeader(run=name, budgets=dict.fromkeys(["0", "1", "2", "10"], budget), delta=DELTA),
    ) as ledger:
        mu = Charge.of(0.5 if budget else math.inf, 0.2)
        ledger.charge(1, 0, {"2": mu, "10": mu}, basis)
        ledger.charge(2, 0, {"1": mu, "2": mu}, basis)
        ledger.charge(4, 0, {"1": mu, "2": mu}, basis)
    return ledger


def test_rows_begin_with_the_worst_off(tmp_path: Path) -> None:
    rows = client_rows(make(tmp_path))
    assert [(row.client, row.participations) for row in rows] == [("2", 3), ("1", 2), ("10", 1), ("0", 0)]
    assert rows[0].epsilon_spent == pytest.approx(gdp_epsilon(0.5 * math.sqrt(3), DELTA))
    assert rows[0].epsilon_claim == pytest.approx(gdp_epsilon(2.0, DELTA))
    assert rows[3].epsilon_spent == 0.0


def test_a_clients_spending_ends_at_its_total(tmp_path: Path) -> None:
    ledger = make(tmp_path)
    steps = spending(ledger, "1")
    assert [(number, attempt, mu) for number, attempt, mu, _ in steps] == [(2, 0, 0.5), (4, 0, 0.5)]
    assert steps[-1][3] == ledger.epsilon(ledger.spent("1"))


def test_a_ledger_of_records_counts_slots(tmp_path: Path) -> None:
    """Of more rounds than are computed one by one, the number is rounded up; the last is exact."""
    slot, rounds = (0.05, 4.0), 60
    header = LedgerHeader(
        run="records", budgets=dict.fromkeys("ab", ((*slot, rounds),)), delta=DELTA, unit="record"
    )
    with LedgerFile.create(tmp_path / "ledger.jsonl", header) as ledger:
        for number in range(rounds):
            both = {"a": Charge.of(0.25, 0.1, batch=0.05), "b": Charge.of(0.25, 0.1, batch=0.05)}
            ledger.charge(number, 0, both if number else {"a": both["a"]})
    first, second = client_rows(ledger)
    assert (first.client, first.spent) == ("a", Slots.of((*slot, rounds)))
    assert first.epsilon_spent == first.epsilon_claim == Slots.of((*slot, rounds)).epsilon(DELTA)
    assert second.epsilon_spent < first.epsilon_spent
    steps = [epsilon for *_, epsilon in spending(ledger, "a")]
    assert steps == sorted(steps)
    assert steps[-1] == first.epsilon_spent
    for count in (1, 7, 33):
        exact = Slots.of((*slot, count)).epsilon(DELTA)
        assert exact <= steps[count - 1] <= Slots.of((*slot, count + 1)).epsilon(DELTA)


def test_the_curves_are_the_worst_off_and_the_median_client(tmp_path: Path) -> None:
    found = spending_of("niss", make(tmp_path))
    assert found is not None
    (chart,) = spending_charts([found])
    one, two, three, promised = (gdp_epsilon(0.5 * part**0.5, DELTA) for part in (1, 2, 3, 16))
    assert found.rounds == (0, 1, 2, 4)
    curves = {curve.name: [y for _, y in curve.points] for curve in chart.series if not curve.thin}
    assert curves["worst-off client"] == pytest.approx([0.0, one, two, three], rel=1e-6)
    assert curves["median client"][-1] == pytest.approx(gdp_epsilon(0.5 * (1 + 2**0.5) / 2, DELTA), rel=1e-6)
    assert [curve.points[-1][1] for curve in chart.series if curve.thin] == pytest.approx(
        [0.0, two, three, one]
    )
    ((claim, level),) = chart.levels.items()
    assert claim == f"budget of {rounded_up(promised)}"
    assert level == pytest.approx(promised)
    assert chart.title == f"niss: ε {rounded_up(three)} spent at most"
    assert (chart.across, chart.up) == ("Round", "ε spent (δ = 1e-5)")
    assert chart.step
    assert chart.most is not None
    assert chart.most > promised
    assert chart.written(2.991) == "3.00", "what is read off is rounded up"


def test_no_curve_without_a_finite_epsilon_from_a_heuristic_or_of_nothing(tmp_path: Path) -> None:
    heuristic = make(tmp_path, "paper", heuristic=True)
    for ledger in (make(tmp_path, "fedavg", None), heuristic, LedgerFile.read(_empty(tmp_path))):
        assert spending_of("x", ledger) is None
    (chart,) = spending_charts([])
    assert (chart.series, chart.empty) == ([], "no finite ε was spent")
    assert all(row.epsilon_spent is None for row in client_rows(heuristic))


def test_they_are_saved_by_extension_alone_and_the_same_every_time(demo: Path, tmp_path: Path) -> None:
    report = read_report_input(demo)
    charts = [*spending_charts([spending_of("$a_1$", make(tmp_path))]), *spending_charts([])]
    charts += [accuracy_chart(report), noise_chart(report)]
    path = save_charts(tmp_path / "images" / "chart.PNG", charts)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5000
    assert [one.name for one in path.parent.iterdir()] == ["chart.PNG"]
    assert save_charts(tmp_path / "again.png", charts).read_bytes() == path.read_bytes()
    svg = save_charts(tmp_path / "chart.svg", charts).read_text()
    assert "$a_1$" in svg
    assert "no finite ε was spent" in svg
    assert save_charts(tmp_path / "again.svg", charts).read_text() == svg
    ElementTree.fromstring(svg)
    with pytest.raises(ConfigError) as caught:
        save_charts(tmp_path / "chart.pdf", charts)
    assert caught.value.field == "--plot"
    assert not (tmp_path / "chart.pdf").exists()


def _empty(folder: Path) -> Path:
    path = folder / "empty.jsonl"
    LedgerFile.create(path, LedgerHeader(run="x", delta=DELTA)).close()
    return path


def test_a_report_finds_what_was_spent_and_shows_the_budget_in_words(run_folder: Path) -> None:
    (found,) = read_spending(read_report_input(add_ledger(run_folder)), [])
    assert found.rounds == (0, 1, 2, 3)
    assert (found.most[0], found.least[-1], len(found.lines)) == (0.0, 0.0, 4)
    assert found.most[-1] == pytest.approx(gdp_epsilon(0.3 * 3**0.5, DELTA), rel=1e-6)
    assert found.budget == pytest.approx(gdp_epsilon(4.0, DELTA))
    text = text_of(run_folder)
    assert "Privacy loss of each client" in text
    assert "budget of" in text


def test_many_clients_and_rounds_are_drawn_as_a_spread(run_folder: Path) -> None:
    add_ledger(run_folder, clients=MOST_LINES + 1, rounds=MOST_ROUNDS + 20)
    (found,) = read_spending(read_report_input(run_folder), [])
    assert found.lines == ()
    assert len(found.rounds) <= MOST_ROUNDS
    assert (found.rounds[0], found.rounds[-1]) == (0, MOST_ROUNDS + 20)
    (chart,) = spending_charts([found])
    (band,) = [one for one in chart.series if one.thin]
    assert band.spread == list(zip(found.least, found.most, strict=True))


def test_a_damaged_ledger_is_left_out_and_said_to_be(run_folder: Path) -> None:
    path = add_ledger(run_folder) / "ledger.jsonl"
    path.write_bytes(path.read_bytes().replace(b":0.09", b":0.04", 1))
    notes: list[str] = []
    assert read_spending(read_report_input(run_folder), notes) == []
    assert "cannot be trusted" in notes[0]
    assert "cannot be trusted" in text_of(run_folder)


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
    "silo": {
        "rows": LOSSES["rows"],
        "curves": LOSSES["curves"] | {"scores": {"without": [-1.0, 0.2, 0.4], "present": [0.9, 2.0, 0.1]}},
    },
    "oracle": {
        "rows": [
            {"failure": "overflows", "rule": rule, "sum": 3, "reach": reach, "epsilon": epsilon}
            for rule, reach, epsilon in (("off", 3.0, 3.94), ("on", 0.0, 1.0))
        ],
        "curves": {},
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
PICTURES = {"dlg", "invert", "joint", "average", "rerun", "silo"}


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
    "silo": "with niss: picture there",
    "oracle": "rule off: 3, ε 3.94",
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
    text = text_of(folder)
    assert text.count('class="bands"') == 2 * len(charts_of(attack)) > 0
    assert SAID[attack] in text
    assert ("data:image/png" in text) == (attack in PICTURES), "what charts repeat is not shown a second time"


def test_an_attack_in_a_run_has_charts_too(demo: Path) -> None:
    write_attack(demo / "attacks" / "carried", attack="carried", **FOUND["carried"])
    text = text_of(demo)
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
        assert png(sheet([chart]))
    folder = write_attack(tmp_path / "a", charts=damage)
    text = text_of(folder)
    assert "data:image/png" in text
    assert text.count('class="bands"') == 2 * left
