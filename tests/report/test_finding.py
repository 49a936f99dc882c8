from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from niss.report import read_report_input
from niss.report.finding import caveats, finding

Compare = Callable[..., Path]


def test_it_names_the_best_protected_method_and_how_far_dp_fedavg_falls_behind(demo: Path) -> None:
    assert finding(read_report_input(demo)) == (
        "At the same joint ε of 3.00, niss-kappa-4 comes closest to fedavg (85.0 %), at 82.1 %, "
        "2.9 percentage points below it; dp-fedavg falls 64.0 percentage points behind fedavg, at 21.0 %."
    )


def test_it_says_so_when_dp_fedavg_wins(compare: Compare) -> None:
    report = read_report_input(compare({"dp-fedavg": {"accuracy": 0.83}}))
    assert finding(report) == (
        "At the same joint ε of 3.00, dp-fedavg comes closest to fedavg (85.0 %), at 83.0 %, "
        "2.0 percentage points below it; niss-kappa-4 falls 2.9 percentage points behind fedavg, at 82.1 %."
    )


def test_methods_that_trust_the_server_or_prove_nothing_are_never_the_finding(demo: Path) -> None:
    report = read_report_input(demo)
    assert "central-dp" not in finding(report)
    assert "niss-as-printed" not in finding(report)
    beside = " ".join(caveats(report))
    assert "central-dp (84.0 %) trusts the server" in beside
    assert "niss-as-printed (84.8 %) has no guarantee in the joint view" in beside


def test_a_method_over_the_target_is_left_out_and_said_to_be(compare: Compare) -> None:
    report = read_report_input(compare({"niss-kappa-4": {"epsilon_joint": 9.0}}))
    assert "niss-kappa-1 comes closest" in finding(report)
    assert "niss-kappa-4 (82.1 %) spends more than the target" in " ".join(caveats(report))


def test_different_budgets_are_not_called_the_same(compare: Compare) -> None:
    report = read_report_input(compare({"niss-kappa-4": {"epsilon_joint": 9.0}}, target_epsilon=None))
    assert finding(report).startswith("At a joint ε of at most 9.00, niss-kappa-4 comes closest")


def test_a_tie_as_printed_names_both(compare: Compare) -> None:
    report = read_report_input(compare({"niss-kappa-1": {"accuracy": 0.82104}}))
    assert "niss-kappa-1 and niss-kappa-4 come closest" in finding(report)


def test_being_level_with_or_above_fedavg_is_said_plainly(compare: Compare) -> None:
    level = read_report_input(compare({"niss-kappa-4": {"accuracy": 0.85}}))
    assert "niss-kappa-4 does as well as fedavg, at 85.0 %" in finding(level)


def test_above_fedavg(compare: Compare) -> None:
    above = read_report_input(compare({"niss-kappa-4": {"accuracy": 0.86}}))
    assert "niss-kappa-4 reaches 86.0 %, 1 percentage point above fedavg (85.0 %)" in finding(above)


def test_without_fedavg_nothing_is_measured_against_it(compare: Compare) -> None:
    report = read_report_input(compare({"fedavg": None}))
    assert finding(report) == (
        "At the same joint ε of 3.00, niss-kappa-4 reaches the highest accuracy, 82.1 %; "
        "dp-fedavg falls 61.1 percentage points behind niss-kappa-4, at 21.0 %."
    )


def test_without_any_joint_guarantee_there_is_no_winner(compare: Compare) -> None:
    unproven = {"epsilon_joint": None}
    names = ("dp-fedavg", "niss-kappa-1", "niss-kappa-4")
    assert finding(read_report_input(compare(dict.fromkeys(names, unproven)))).startswith(
        "No method here has both"
    )


def test_an_unfinished_run_draws_no_finding(run_folder: Path) -> None:
    report = read_report_input(run_folder)
    assert finding(report).startswith("This run is unfinished: 30 of 30 rounds are done")
    assert caveats(report) == []
