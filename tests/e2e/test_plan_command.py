"""`niss plan` as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

NISS = Path(sys.executable).with_name("niss")
PAPER = [
    *(
        "plan",
        "--participants",
        "30",
        "--neighbours",
        "29",
        "--clip",
        "3",
        "--epsilon",
        "8",
        "--delta",
        "1e-5",
    ),
    *("--rounds", "100", "--participations", "30", "--collusion", "0.2", "--dropout", "0.05"),
]


def niss(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(NISS), *arguments], capture_output=True, text=True, timeout=120, check=False)


def test_the_plan_as_text_and_as_json_agree() -> None:
    text, data = niss(*PAPER), niss(*PAPER, "--json")
    assert text.returncode == data.returncode == 0, text.stderr + data.stderr
    plan = json.loads(data.stdout)
    assert plan["rounds"] == 100
    assert f"{plan['kappa']:.3g}" in text.stdout
    assert f"{plan['tau2']:.4g}" in text.stdout
    assert "epsilon 8.00" in text.stdout
    assert "6 static colluders of 30" in text.stdout


def test_what_a_tau2_promises() -> None:
    assert "no guarantee" in niss("plan", "--participants", "30", "--tau2", "0").stdout
    asked = json.loads(niss("plan", "--participants", "30", "--tau2", "0.3", "--json").stdout)
    assert asked["tau2"] == 0.3
    assert asked["epsilon_joint"] < 3.0


CARRY = ["plan", "--carry", "--rounds", "40", "--participants", "50", "--clients", "250"]


def test_a_plan_that_carries_shares_says_what_it_promises_and_asks() -> None:
    faults = ["--collusion", "0.1", "--dropout", "0.02", "--mode", "repair", "--pattern", "any"]
    text, data = niss(*CARRY, *faults), niss(*CARRY, *faults, "--json")
    assert text.returncode == data.returncode == 0, text.stderr + data.stderr
    plan = json.loads(data.stdout)
    assert (plan["separation"], plan["participations"], plan["rounds"]) == (5, 8, 40)
    assert plan["plan"]["noise"]["colluders"] == 5
    assert (plan["dropout"], plan["mode"], plan["plan"]["pattern"]) == (0.02, "repair", "any")
    for name in ("to_central_mean", "to_central_final", "to_best"):
        assert f"{plan['model_variance_ratio_' + name]:.3g} x" in text.stdout
    assert f"{plan['carried_to_residual']:.3g}" in text.stdout
    for words in (
        "over all 40 rounds",
        "at least so many rounds",
        "5 static colluders of 50",
        "going on is a new run",
        "Adam",
    ):
        assert words in " ".join(text.stdout.split())


def test_where_carrying_does_not_help_the_plan_says_so() -> None:
    crowded = niss("plan", "--carry", "--rounds", "20", "--participants", "50", "--clients", "50")
    assert "hides nothing" in " ".join(crowded.stdout.split())
    assert "the run is short" in " ".join(niss(*CARRY, "--rounds", "3").stdout.split())


@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize("plan", [PAPER, CARRY], ids=["trade-off", "rounds"])
def test_a_plan_is_drawn(tmp_path: Path, plan: list[str], suffix: str) -> None:
    path = tmp_path / f"plan.{suffix}"
    done = niss(*plan, "--plot", str(path))
    assert done.returncode == 0, done.stderr
    assert path.stat().st_size > 5_000


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "--participants"),
        (["--participants", "10", "--collusion", "0.95"], 4, "infeasible"),
        (["--participants", "10", "--rounds", "3", "--participations", "5"], 2, "--participations"),
        (["--participants", "10", "--plot", "plan.docx"], 2, "neither .png nor .svg"),
        (["--participants", "10", "--epsilon", "0"], 2, "epsilon"),
        ([*CARRY[1:], "--clients", "260"], 2, "do not make whole cohorts of 50"),
        ([*CARRY[1:], "--clients", "40"], 2, "cannot fill a round of 50"),
        ([*CARRY[1:], "--delta", "2"], 2, "less than 1"),
        ([*CARRY[1:], "--clip", "-1"], 2, "clip"),
        ([*CARRY[1:], "--tau2", "0.1"], 2, "--tau2"),
        ([*CARRY[1:], "--kappa", "0"], 2, "kappa"),
        ([*CARRY[1:], "--collusion", "0.97", "--dropout", "0.3", "--mode", "repair"], 4, "colluders"),
        (["--carry", "--participants", "50", "--clients", "250"], 2, "--rounds"),
        (["--participants", "50", "--clients", "250"], 2, "carry shares too"),
    ],
)
def test_wrong_input_is_refused(arguments: list[str], code: int, message: str) -> None:
    done = niss("plan", *arguments)
    assert done.returncode == code
    assert message in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
