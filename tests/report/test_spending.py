"""Epsilon per client over the rounds, as the ledger has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from niss.accounting.ledger_file import LedgerFile
from niss.mechanism import gdp_epsilon
from niss.report import read_report_input, write_report
from niss.report.ledger import MOST_LINES, MOST_ROUNDS, read_spending
from niss.report.ledger_charts import spending_figures

DELTA = 1e-5


def add_ledger(folder: Path, *, clients: int = 4, rounds: int = 3, heuristic: bool = False) -> Path:
    """Client 1 pays in every round, the others in the first alone, client 0 never."""
    with LedgerFile.create(
        folder / "ledger.jsonl",
        run="spending",
        budgets={str(client): 4.0 for client in range(clients)},
        delta=DELTA,
        unit="client",
        relation="zero-out",
    ) as ledger:
        for number in range(1, rounds + 1):
            paying = range(1, clients) if number == 1 else range(1, 2)
            ledger.charge(number, 0, {str(one): (0.3, 0.1) for one in paying}, {"heuristic": heuristic})
    return folder


def test_the_curves_are_those_of_the_ledger(run_folder: Path) -> None:
    (found,) = read_spending(read_report_input(add_ledger(run_folder)), [])
    assert found.rounds == (0, 1, 2, 3)
    assert found.most[0] == 0.0
    assert found.most[-1] == pytest.approx(gdp_epsilon(0.3 * 3**0.5, DELTA), rel=1e-6)
    assert found.median[-1] == pytest.approx(gdp_epsilon(0.3, DELTA), rel=1e-6)
    assert found.least[-1] == 0.0
    assert found.worst_client == "1"
    assert found.budget == pytest.approx(gdp_epsilon(4.0, DELTA))
    assert len(found.lines) == 4


def test_many_clients_and_rounds_are_drawn_as_a_spread(run_folder: Path) -> None:
    add_ledger(run_folder, clients=MOST_LINES + 1, rounds=MOST_ROUNDS + 20)
    (found,) = read_spending(read_report_input(run_folder), [])
    assert found.lines == ()
    assert len(found.rounds) <= MOST_ROUNDS
    assert (found.rounds[0], found.rounds[-1]) == (0, MOST_ROUNDS + 20)


def test_the_page_shows_the_budget_in_words_too(run_folder: Path) -> None:
    text = write_report(add_ledger(run_folder)).read_text(encoding="utf-8")
    assert "Privacy loss of each client" in text
    assert "of a budget of" in text


def test_a_damaged_ledger_is_left_out_and_said_to_be(run_folder: Path) -> None:
    path = add_ledger(run_folder) / "ledger.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"mu_joint":0.3', b'"mu_joint":0.2', 1))
    notes: list[str] = []
    assert spending_figures(read_report_input(run_folder), notes) is None
    assert "cannot be trusted" in notes[0]
    assert "cannot be trusted" in write_report(run_folder).read_text(encoding="utf-8")


def test_heuristic_charges_promise_nothing_and_are_not_drawn(run_folder: Path) -> None:
    assert read_spending(read_report_input(add_ledger(run_folder, heuristic=True)), []) == []
