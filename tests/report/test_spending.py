"""Epsilon per client over the rounds: as the ledger has it, as the page shows it, and as `niss account` draws it."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from niss.accounting import Charge, LedgerFile, LedgerHeader
from niss.errors import ConfigError
from niss.mechanism import gdp_epsilon
from niss.report import read_report_input, write_report
from niss.report.ledger import MOST_LINES, MOST_ROUNDS, client_rows, read_spending, rounded_up, spending
from niss.report.run_charts import ledger_charts, save_charts, spending_charts

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


def test_the_curves_are_the_worst_off_and_the_median_client(tmp_path: Path) -> None:
    (chart,) = ledger_charts([("niss", make(tmp_path))])
    worst, median = chart.series
    one, three, promised = (gdp_epsilon(mu, DELTA) for mu in (0.5, 0.5 * math.sqrt(3), 2.0))
    assert [x for x, _ in worst.points] == [0, 1, 2, 4, 4.5]
    assert worst.points[-1][1] == pytest.approx(three)
    assert [y for _, y in median.points] == pytest.approx([0.0, one, one])
    assert worst.name == f"worst-off (client 2): ε {rounded_up(three)} spent"
    assert median.name == f"median (client 10): ε {rounded_up(one)} spent"
    ((claim, level),) = chart.levels.items()
    assert claim.startswith("claim for client 2: ε")
    assert level == pytest.approx(promised)
    assert (chart.across, chart.up) == ("Round", "ε spent (δ = 1e-05)")
    assert chart.step
    assert chart.most is not None
    assert chart.most > promised
    assert chart.written(2.991) == "3.00", "what is read off is rounded up"


def test_no_curve_without_a_finite_epsilon_or_from_a_heuristic(tmp_path: Path) -> None:
    ledgers = [("fedavg", make(tmp_path, "fedavg", None)), ("paper", make(tmp_path, "paper", heuristic=True))]
    for chart in ledger_charts(ledgers):
        assert (chart.series, chart.levels) == ([], {})
        assert chart.empty == "no finite ε: no guarantee"
    assert all(row.epsilon_spent is None for row in client_rows(ledgers[1][1]))


def test_it_is_saved_by_extension_and_the_same_every_time(tmp_path: Path) -> None:
    charts = ledger_charts([("$a_1$", make(tmp_path)), ("empty", LedgerFile.read(_empty(tmp_path)))])
    png = save_charts(tmp_path / "chart.PNG", charts).read_bytes()
    assert png.startswith(b"\x89PNG")
    svg = save_charts(tmp_path / "chart.svg", charts).read_text()
    assert "$a_1$" in svg
    assert "nothing charged yet" in svg
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


def add_ledger(folder: Path, *, clients: int = 4, rounds: int = 3, heuristic: bool = False) -> Path:
    """Client 1 pays in every round, the others in the first alone, client 0 never."""
    with LedgerFile.create(
        folder / "ledger.jsonl",
        LedgerHeader(run="spending", budgets={str(client): 4.0 for client in range(clients)}, delta=DELTA),
    ) as ledger:
        for number in range(1, rounds + 1):
            paying = range(1, clients) if number == 1 else range(1, 2)
            ledger.charge(
                number, 0, {str(one): Charge.of(0.3, 0.1) for one in paying}, {"heuristic": heuristic}
            )
    return folder


def test_the_curves_are_those_of_the_ledger(run_folder: Path) -> None:
    (found,) = read_spending(read_report_input(add_ledger(run_folder)), [])
    assert found.rounds == (0, 1, 2, 3)
    assert found.most[0] == 0.0
    assert found.most[-1] == pytest.approx(gdp_epsilon(0.3 * 3**0.5, DELTA), rel=1e-6)
    assert found.median[-1] == pytest.approx(gdp_epsilon(0.3, DELTA), rel=1e-6)
    assert found.least[-1] == 0.0
    assert found.budget == pytest.approx(gdp_epsilon(4.0, DELTA))
    assert len(found.lines) == 4
    (chart,) = spending_charts([found])
    assert [one.name for one in chart.series if not one.thin] == ["median client", "worst-off client"]
    assert sum(one.thin for one in chart.series) == 4
    assert list(chart.levels.values()) == [found.budget]
    assert "spent at most" in chart.title


def test_many_clients_and_rounds_are_drawn_as_a_spread(run_folder: Path) -> None:
    add_ledger(run_folder, clients=MOST_LINES + 1, rounds=MOST_ROUNDS + 20)
    (found,) = read_spending(read_report_input(run_folder), [])
    assert found.lines == ()
    assert len(found.rounds) <= MOST_ROUNDS
    assert (found.rounds[0], found.rounds[-1]) == (0, MOST_ROUNDS + 20)
    (chart,) = spending_charts([found])
    (band,) = [one for one in chart.series if one.thin]
    assert band.spread == list(zip(found.least, found.most, strict=True))


def test_the_page_shows_the_budget_in_words_too(run_folder: Path) -> None:
    text = write_report(add_ledger(run_folder)).read_text(encoding="utf-8")
    assert "Privacy loss of each client" in text
    assert "budget of" in text


def test_a_damaged_ledger_is_left_out_and_said_to_be(run_folder: Path) -> None:
    path = add_ledger(run_folder) / "ledger.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"mu2":0.09', b'"mu2":0.04', 1))
    notes: list[str] = []
    assert read_spending(read_report_input(run_folder), notes) == []
    assert "cannot be trusted" in notes[0]
    assert "cannot be trusted" in write_report(run_folder).read_text(encoding="utf-8")


def test_heuristic_charges_promise_nothing_and_are_not_drawn(run_folder: Path) -> None:
    assert read_spending(read_report_input(add_ledger(run_folder, heuristic=True)), []) == []
