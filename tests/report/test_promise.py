"""What was promised stands first, in words that can be checked."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from niss.report import read_report_input, write_report
from niss.runs.privacy import promise_of, read_promise
from report.conftest import write_run
from report.test_spending import add_ledger


def finish(folder: Path, one: dict[str, Any], **statement: Any) -> Path:
    """Make a finished run of a begun one, with a statement."""
    (folder / "result.json").write_text(json.dumps(one), encoding="utf-8")
    values = {
        "delta": 1e-5,
        "unit": "client",
        "relation": "zero-out",
        "budget_epsilon": 3.2,
        "caveats": ["Clients that collude are not counted."],
        "clients": [{"participations": 2, "mu_joint": 0.7}, {"participations": 0, "mu_joint": 0.0}],
    }
    (folder / "privacy.json").write_text(json.dumps(values | statement), encoding="utf-8")
    return folder


def test_a_run_says_what_it_promised_and_what_that_is_worth(run_folder: Path, one: dict[str, Any]) -> None:
    promise = read_promise(add_ledger(finish(run_folder, one | {"epsilon_joint": 2.9912})))
    assert promise is not None
    assert promise.amount == "ε = 3.00, δ = 1e-05"
    # Phi(0.35) = 0.6368, against 0.952 for epsilon alone.
    assert promise.guess == "63.7 %"
    assert promise.odds is not None
    assert "at most 63.7 % of the time" in promise.odds
    assert promise.trust == "The server is not trusted; the promise holds against it."
    assert promise.budget == "At most ε = 3.20 was promised in advance; the worst-off client has spent 3.00."
    assert promise.verified is not None
    assert "3 rounds were charged" in promise.verified
    assert "hash chain over them is unbroken" in promise.verified


def test_without_mu_only_epsilon_bounds_the_guess_and_no_budget_is_compared(
    run_folder: Path, one: dict[str, Any]
) -> None:
    promise = read_promise(finish(run_folder, one, clients=[{"participations": 2, "mu_joint": None}]))
    assert promise is not None
    assert promise.guess == "95.3 %"
    assert promise.budget is None
    assert promise.verified is None


def test_a_broken_ledger_is_never_called_verified(run_folder: Path, one: dict[str, Any]) -> None:
    path = add_ledger(finish(run_folder, one)) / "ledger.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"mu2":0.09', b'"mu2":0.04', 1))
    promise = read_promise(run_folder)
    assert promise is not None
    assert promise.verified is not None
    assert "does not verify" in promise.verified


@pytest.mark.parametrize("statement", ["[]", "{", '{"delta": "x", "unit": 3, "clients": [7]}'])
def test_a_damaged_statement_is_no_reason_to_fail(demo: Path, statement: str) -> None:
    (demo / "niss-kappa-4" / "privacy.json").write_text(statement, encoding="utf-8")
    text = write_report(demo).read_text(encoding="utf-8")
    assert "What was promised" in text
    head = text.partition("What was promised")[2].partition("</thead>")[0]
    columns = re.findall(r"<th[^>]*>([^<]*)</th>", head)
    assert columns == ["Method", "Promise", "An attacker is right at most", "Server", "Ledger"]


def test_the_promise_stands_before_the_accuracy_and_names_who_is_trusted(demo: Path, tmp_path: Path) -> None:
    text = write_report(demo).read_text(encoding="utf-8")
    assert text.index("What was promised") < text.index(">Accuracy<")
    by_label = {one.label: promise_of(one) for one in read_report_input(demo).methods}
    servers = {label: one.server for label, one in by_label.items() if one is not None}
    assert servers == {
        "fedavg": "trusted",
        "central-dp": "trusted",
        "dp-fedavg": "not trusted",
        "niss-kappa-1": "not trusted",
        "niss-kappa-4": "not trusted",
        "niss-as-printed": "–",
    }
    unfinished = write_run(tmp_path / "begun", {**_entry(demo), "folder": "begun"})
    assert read_promise(unfinished) is None


def _entry(demo: Path) -> dict[str, Any]:
    summary = json.loads((demo / "summary.json").read_text(encoding="utf-8"))
    return summary["methods"][4]  # type: ignore[no-any-return]


def test_the_settings_a_researcher_looks_for_are_on_the_page(demo: Path) -> None:
    text = write_report(demo).read_text(encoding="utf-8")
    for name, value in {
        "Model": "mlp, hidden layers 32",
        "Learning rate": "0.1",
        "Clients": "1\u202f000",
    }.items():
        assert f"<dt>{name}</dt><dd>{value}</dd>" in text
    assert "<dt>Clip</dt>" in text
