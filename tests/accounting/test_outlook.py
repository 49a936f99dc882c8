"""Whether a plan can learn anything is said in words before it is run."""

from __future__ import annotations

import json
import math
import re

import pytest
from typer.testing import CliRunner

from niss.accounting import Outlook, Plan, forecast, make_terms, outlook
from niss.cli import app


def of(participants: int, parameters: int, *, epsilon: float = 8.0, rounds: int = 10) -> Outlook:
    plan = Plan(
        clip=2.0, epsilon=epsilon, participations=rounds, kappa=4.0, neighbours=min(10, participants - 1)
    )
    terms = make_terms(
        plan, participants=participants, coordinates=parameters, run=bytes(16), number=0, grid_bits=24
    )
    return outlook(
        parameters=parameters, rounds=rounds, clip=2.0, variance=participants * terms.residual_variance
    )


def test_ten_nodes_and_a_large_model_are_hopeless():
    judged = of(10, 62_000)
    assert judged.verdict == "hopeless"
    assert (
        judged.words
        == "noise 16 times the signal; above 12 next to nothing is learned; `niss plan` shows what helps"
    )
    for help_ in ("more clients", "fewer parameters", "LoRA", "carried"):
        assert help_ in judged.helps


def test_the_example_app_is_not():
    assert of(30, 1_970).verdict == "good"
    assert of(1_000, 62_000).verdict == "good"
    assert of(9, 1_970).verdict == "noisy"
    assert of(9, 1_970).finding.endswith("; above 1 accuracy suffers")
    assert of(30, 1_970).words == of(30, 1_970).finding


def test_the_ratio_does_not_depend_on_the_number_of_rounds():
    assert of(30, 1_970, rounds=3).ratio == pytest.approx(of(30, 1_970, rounds=100).ratio, rel=1e-6)


def test_the_norm_is_that_of_the_noise():
    judged = outlook(parameters=400, rounds=4, clip=2.0, variance=0.09)
    assert judged.noise_norm == pytest.approx(0.3 * 20)
    assert judged.ratio == pytest.approx(6.0 / (2.0 * math.sqrt(4)))


def test_without_noise_there_is_nothing_to_say_against_it():
    assert outlook(parameters=10**9, rounds=1, clip=1.0, variance=0.0).verdict == "good"


@pytest.mark.parametrize(
    ("norm", "verdict"), [(0.3, "good"), (0.4, "good"), (0.8, "noisy"), (1.9, "noisy"), (14.0, "hopeless")]
)
@pytest.mark.parametrize(("parameters", "rounds"), [(62, 40), (26_010, 600)])
def test_for_records_the_noise_of_one_round_counts(norm: float, verdict: str, parameters: int, rounds: int):
    judged = outlook(
        parameters=parameters, rounds=rounds, clip=0.1, variance=(0.1 * norm) ** 2 / parameters, unit="record"
    )
    assert judged.ratio == pytest.approx(norm)
    assert judged.verdict == verdict
    assert (judged.largest >= 0.9 * parameters) == (verdict == "good")
    assert "more records" in judged.helps


def test_for_records_a_model_is_assumed_and_the_answer_says_so():
    silos = "--unit record --participants 10 --records 10000 --batch 0.5 --rounds 4 --epsilon 2"
    said = " ".join(asked(silos).split())
    assumed = " in a model of 10,000 parameters, which is assumed"
    assert f"outlook: noise 0.062 times the signal{assumed}; up to 0.5 little is lost" in said
    assert re.search(r"largest model [0-9,]+ parameters that lose little", said)
    named = " ".join(asked(silos, "--parameters 10000").split())
    assert named == said.replace(assumed, "")
    values = json.loads(asked(silos, "--json"))["outlook"]
    larger = json.loads(asked(silos, f"--json --parameters {2 * values['largest']}"))["outlook"]
    assert (values["verdict"], larger["verdict"]) == ("good", "noisy")
    assert values["assumed"] is True
    assert larger["assumed"] is False


def asked(*options: str, code: int = 0) -> str:
    """What `niss plan` prints."""
    said = CliRunner().invoke(app, ["plan", "--clip", "2", *" ".join(options).split()])
    assert said.exit_code == code, said.output
    return said.output


PLAIN = "--participants 10 --epsilon 8 --rounds 10"
CARRIED = "--participants 20 --clients 100 --rounds 30 --carry"


@pytest.mark.parametrize("options", [PLAIN, CARRIED])
def test_only_who_names_a_model_is_told(options: str):
    assert "outlook" not in asked(options)
    asked(options, "--parameters 0", code=1)


def test_niss_plan_says_it_too():
    values = json.loads(asked(PLAIN, "--parameters 62000 --json"))
    said = " ".join(asked(PLAIN, "--parameters 62000").split())  # wherever the terminal breaks its lines
    assert f"outlook: {values['outlook']['finding']}" in said
    assert f"helps: {values['outlook']['helps']}" in said
    planned = forecast(participants=10, epsilon=8.0, participations=10, clip=2.0)
    terms = make_terms(
        planned.plan, participants=10, coordinates=62_000, run=bytes(16), number=0, grid_bits=24
    )
    # The protocol takes a margin of a few percent over what a typical graph needs.
    assert values["outlook"]["deviation"] == pytest.approx(math.sqrt(10 * terms.residual_variance), rel=0.1)


def test_niss_run_says_it_before_the_first_round(tmp_path):
    pytest.importorskip("torch")
    options = ["run", "--dataset", "mnist-mini", "--model", "mlp", "--method", "dp-fedavg", "--rounds", "1"]
    options += ["--clients", "4", "--participants", "4", "--epochs", "1", "--epsilon", "0.5"]
    said = CliRunner().invoke(app, [*options, "--out", str(tmp_path / "run")])
    assert said.exit_code == 0, said.output
    assert re.search("dp-fedavg: noise [0-9,]+ times the signal; above", " ".join(said.output.split()))


def test_carried_noise_is_judged_by_what_is_left_in_the_final_model():
    said = json.loads(asked(CARRIED, "--parameters 62000 --json"))
    judged = said["outlook"]
    assert judged["ratio"] == pytest.approx((said["over_rounds"]["niss"][-1] * 62000) ** 0.5 / (2.0 * 30))
    fresh = asked("--participants 20 --rounds 30 --participations 6 --parameters 62000 --json")
    assert judged["ratio"] < json.loads(fresh)["outlook"]["ratio"], "else there would be no point in it"
    assert "carried from round to round" not in judged["helps"], "it is already"
