"""One quantity has one value, wherever it is shown: the page, the terminal, the statement, JSON, and the ui."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from niss.accounting import Charge, Ledger, Plan, forecast, make_statement
from niss.claims import rounded_up
from niss.cli.plan import plan_command
from niss.report import read_report_input, summary_rows
from niss.report.attacks import attack_cell
from niss.report.page import render_page
from niss.report.summary import caveats, finding
from report.test_page import Page

# Two digits after the point, nearest, would be 7.97 and 2.34.
JOINT, MARGINAL = 7.9712, 2.3412
_NUMBERS = re.compile(r"\d+\.\d\d(?![\d%])")


@pytest.fixture
def folder(compare: Callable[..., Path]) -> Path:
    """A comparison in which NISS and central DP have the same two epsilons, with statements to match."""
    same = {
        "epsilon_joint": JOINT,
        "epsilon_marginal": MARGINAL,
        "guarantee": "(7.98, 1e-05)-differential privacy.",
    }
    changes = {"niss-kappa-4": same, "niss-kappa-1": None, "dp-fedavg": None, "niss-as-printed": None}
    return compare({**changes, "central-dp": {**same, "epsilon_marginal": None}}, target_epsilon=8.0)


def test_the_page_shows_no_other_digits(folder: Path) -> None:
    page = Page(render_page(read_report_input(folder)))
    named = [
        value
        for _, attributes in page.tags
        for key, value in attributes.items()
        if key in ("aria-label", "alt")
    ]
    shown = " ".join([page.text, *map(str, named)])
    assert "7.98" in shown
    assert "2.35" in shown
    assert "7.97" not in shown
    assert "2.34" not in shown


def test_the_table_and_the_finding_agree(folder: Path) -> None:
    report = read_report_input(folder)
    rows = {row[0]: row for row in summary_rows(report).rows}
    assert rows["niss-kappa-4"][6:] == ("7.98", "2.35")
    assert rows["central-dp"][6:] == ("7.98, server trusted", "no guarantee")
    words = " ".join([finding(report), *caveats(report)])
    assert set(_NUMBERS.findall(words)) == {"7.98"}


def test_the_terminal_shows_the_digits_of_the_page(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    planned = forecast(participants=20, epsilon=3.0)
    odd = dataclasses.replace(planned, epsilon_joint=JOINT, epsilon_marginal=MARGINAL)
    monkeypatch.setattr("niss.accounting.planner.forecast", lambda **_: odd)
    plan_command(participants=20)
    printed = capsys.readouterr().out
    assert "epsilon 7.98" in printed
    assert "epsilon 2.35" in printed


def test_the_ui_is_given_the_digits_by_the_same_function(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi", reason="FastAPI is not installed: pip install 'niss[ui]'")
    from niss.ui import pages

    planned = forecast(participants=20, epsilon=3.0)
    odd = dataclasses.replace(planned, epsilon_joint=JOINT, epsilon_marginal=MARGINAL)
    monkeypatch.setattr("niss.accounting.planner.forecast", lambda **_: odd)
    pages.answer.cache_clear()
    answered = pages.answer(pages.PlanQuestion(participants=20))
    pages.answer.cache_clear()
    assert answered["printed"]["epsilon_joint"] == "7.98"
    assert answered["printed"]["epsilon_marginal"] == "2.35"


def test_the_statement_in_json_says_what_the_table_says() -> None:
    plan = Plan(method="dp-fedavg", epsilon=3.0, delta=1e-5, participations=2)
    ledger = Ledger.empty(1)
    ledger.charge(np.array([0]), Charge.of(0.8137, 0.8137))
    statement = make_statement(plan, ledger, noise_from="clients")
    text = json.dumps(statement.to_json())
    assert statement.epsilon_joint is not None
    assert f"({rounded_up(statement.epsilon_joint)}, 1e-05)" in text


def test_attacks_round_what_was_claimed_up_and_nothing_else() -> None:
    row = {
        "epsilon_joint": JOINT,
        "epsilon": MARGINAL,
        "joint": float("inf"),
        "proved": 1.2345,
        "promised": 3.0,
    }
    cells = {key: attack_cell(row, key) for key in row}
    assert list(cells.values()) == ["7.98", "2.35", "no guarantee", "1.23", "3.00"]
