"""The sentence that a report begins with, and what is said beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from niss.report import read_report_input
from niss.report.summary import caveats, finding

UNPROVEN = {"epsilon_joint": None}


@pytest.mark.parametrize(
    ("changes", "summary", "said"),
    [
        (
            {},
            {},
            "At the same joint ε of 3.00, niss-kappa-4 comes closest to fedavg (85.0 %), at 82.1 %, 2.9 percentage "
            "points below it; dp-fedavg falls 64.0 percentage points behind fedavg, at 21.0 %.",
        ),
        (
            {"dp-fedavg": {"accuracy": 0.83}},
            {},
            "At the same joint ε of 3.00, dp-fedavg comes closest to fedavg (85.0 %), at 83.0 %, 2.0 percentage "
            "points below it; niss-kappa-4 falls 2.9 percentage points behind fedavg, at 82.1 %.",
        ),
        (
            {"fedavg": None},
            {},
            "At the same joint ε of 3.00, niss-kappa-4 reaches the highest accuracy, 82.1 %; "
            "dp-fedavg falls 61.1 percentage points behind niss-kappa-4, at 21.0 %.",
        ),
        ({"niss-kappa-4": {"epsilon_joint": 9.0}}, {}, "niss-kappa-1 comes closest"),
        (
            {"niss-kappa-4": {"epsilon_joint": 9.0}},
            {"target_epsilon": None},
            "At a joint ε of at most 9.00, niss-kappa-4 comes closest",
        ),
        ({"niss-kappa-1": {"accuracy": 0.82104}}, {}, "niss-kappa-1 and niss-kappa-4 come closest"),
        ({"niss-kappa-4": {"accuracy": 0.85}}, {}, "niss-kappa-4 does as well as fedavg, at 85.0 %"),
        (
            {"niss-kappa-4": {"accuracy": 0.86}},
            {},
            "niss-kappa-4 reaches 86.0 %, 1 percentage point above fedavg (85.0 %)",
        ),
        (
            dict.fromkeys(("dp-fedavg", "niss-kappa-1", "niss-kappa-4"), UNPROVEN),
            {},
            "No method here has both",
        ),
    ],
    ids=[
        *("best", "dp-fedavg wins", "no fedavg", "over the target", "other budgets"),
        *("a tie", "level", "above", "nothing proven"),
    ],
)
def test_the_finding_says_what_the_numbers_support(
    compare: Callable[..., Path], changes: dict[str, Any], summary: dict[str, Any], said: str
) -> None:
    found = finding(read_report_input(compare(changes, **summary)))
    assert found == said if said.endswith(".") else said in found
    assert found.startswith(("At the same joint", "At a joint ε of at most 9.00", "No method"))


def test_methods_that_trust_the_server_prove_nothing_or_spend_more_are_left_out_and_said_to_be(
    compare: Callable[..., Path],
) -> None:
    report = read_report_input(compare({"niss-kappa-1": {"epsilon_joint": 9.0}}))
    assert not {"central-dp", "niss-as-printed", "niss-kappa-1"} & set(finding(report).split())
    beside = " ".join(caveats(report))
    assert "central-dp (84.0 %) trusts the server" in beside
    assert "niss-as-printed (84.8 %) has no guarantee in the joint view" in beside
    assert "niss-kappa-1 (79.2 %) spends more than the target" in beside


def test_an_unfinished_run_draws_no_finding(run_folder: Path) -> None:
    report = read_report_input(run_folder)
    assert finding(report).startswith("This run is unfinished: 30 of 30 rounds are done")
    assert caveats(report) == []
