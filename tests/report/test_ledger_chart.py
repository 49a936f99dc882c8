"""The ledger's chart shows the worst-off and the median client below what was promised."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from niss.accounting.ledger_file import LedgerFile
from niss.errors import ConfigError
from niss.mechanism import gdp_epsilon
from niss.report.ledger import client_rows, rounded_up, spending
from niss.report.ledger_charts import draw_ledgers, save_ledger_chart

DELTA = 1e-5


def make(folder: Path, name: str = "ledger", budget: float | None = 2.0, **basis: object) -> LedgerFile:
    """Client 2 in every round, 1 in two, 10 in one; client 0 never."""
    with LedgerFile.create(
        folder / f"{name}.jsonl",
        run=name,
        budgets=dict.fromkeys(["0", "1", "2", "10"], budget),
        delta=DELTA,
        unit="client",
        relation="zero-out",
    ) as ledger:
        mu = (0.5, 0.2) if budget else (math.inf, 0.2)
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
    axes = draw_ledgers([("niss", make(tmp_path))]).axes[0]
    worst, median, claim = axes.get_lines()
    one, three = gdp_epsilon(0.5, DELTA), gdp_epsilon(0.5 * math.sqrt(3), DELTA)
    assert list(worst.get_xdata())[:4] == [0, 1, 2, 4]
    assert list(worst.get_ydata())[-1] == pytest.approx(three)
    assert list(median.get_ydata()) == pytest.approx([0.0, one, one])
    assert claim.get_ydata()[0] == pytest.approx(gdp_epsilon(2.0, DELTA))
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels[0] == f"worst-off (client 2): ε {rounded_up(three)} spent"
    assert labels[1] == f"median (client 10): ε {rounded_up(one)} spent"
    assert labels[2].startswith("claim for client 2: ε")
    assert axes.get_xlabel() == "Round"
    assert axes.get_ylabel() == "ε spent (δ = 1e-05)"
    assert axes.get_ylim()[1] > gdp_epsilon(2.0, DELTA)


def test_no_curve_without_a_finite_epsilon_or_from_a_heuristic(tmp_path: Path) -> None:
    ledgers = [
        ("fedavg", make(tmp_path, "fedavg", None)),
        ("paper", make(tmp_path, "paper", heuristic=True)),
    ]
    for axes in draw_ledgers(ledgers).axes:
        assert not axes.get_lines()
        assert [text.get_text() for text in axes.texts] == ["no finite ε: no guarantee"]
    assert all(row.epsilon_spent is None for row in client_rows(ledgers[1][1]))


def test_it_is_saved_by_extension_and_the_same_every_time(tmp_path: Path) -> None:
    ledgers = [("$a_1$", make(tmp_path)), ("empty", LedgerFile.read(_empty(tmp_path)))]
    png = save_ledger_chart(tmp_path / "chart.PNG", ledgers).read_bytes()
    assert png.startswith(b"\x89PNG")
    svg = save_ledger_chart(tmp_path / "chart.svg", ledgers).read_text()
    assert "$a_1$" in svg
    assert "nothing charged yet" in svg
    assert save_ledger_chart(tmp_path / "again.svg", ledgers).read_text() == svg
    with pytest.raises(ConfigError) as caught:
        save_ledger_chart(tmp_path / "chart.pdf", ledgers)
    assert caught.value.field == "--plot"
    assert not (tmp_path / "chart.pdf").exists()


def _empty(folder: Path) -> Path:
    path = folder / "empty.jsonl"
    LedgerFile.create(path, run="x", delta=DELTA, unit="client", relation="zero-out").close()
    return path
