"""Plans for silos that hide single records: noise beside that of one curator, what it rests on, what changes it."""

from __future__ import annotations

from typing import Any

import pytest

from niss.accounting import Plan, PlanQuestion, forecast
from niss.accounting.assumed import fewest_participants
from niss.errors import PrivacyError
from niss.simulation import settings_of_plan

LAB: dict[str, Any] = {"unit": "record", "records": 60_000, "batch": 0.05, "rounds": 600, "epsilon": 1.0}


@pytest.mark.parametrize(
    ("silos", "fifth", "third"),
    [
        (5, 1.27, 1.69),
        (6, 1.52, 1.52),
        (7, 1.42, 1.78),
        (8, 1.35, 1.62),
        (10, 1.27, 1.45),
        (15, 1.27, 1.52),
        (30, 1.27, 1.45),
    ],
)
def test_the_noise_is_hardly_more_than_one_curators(silos: int, fifth: float, third: float) -> None:
    """With nobody trusted; colluders take their share, rounded up, out of those who hide each other."""
    for collusion, ratio in ((0.0, 1.013), (0.2, fifth), (0.3, third)):
        planned = forecast(participants=silos, mode="tolerate", collusion=collusion, **LAB)
        assert planned.aggregate_variance_ratio_to_central == pytest.approx(ratio, abs=0.0051)
        assert planned.epsilon_joint == pytest.approx(1.0, abs=1e-3)
        assert planned.noise_multiplier == pytest.approx(4.693, abs=1e-3)


def test_a_lost_silo_is_repaired_unless_something_else_is_asked_for() -> None:
    question = PlanQuestion(participants=10, **LAB)
    values = question.to_json(question.forecast())
    assert values["plan"]["mode"] == Plan(unit="record", batch=0.05, records=60).settled_mode == "repair"
    # What is left if all batches became known.
    assert values["epsilon_batches_known"] == pytest.approx(5.64, abs=0.01)
    assert values["epsilon_joint"] == pytest.approx(1.0, rel=1e-3)
    assert 51.0 < values["one_lost_tolerated"] < 72.0
    assert values["one_lost_repaired"] == values["aggregate_variance_ratio_to_central"]
    assert 1.2 < values["one_lost_repaired"] < 1.8
    assert PlanQuestion(participants=10).forecast().plan.mode == Plan().settled_mode == "tolerate"
    with pytest.raises(PrivacyError, match="a repair needs 5 of 5 participants"):
        forecast(participants=5, collusion=0.6, **LAB)


def test_levers_and_share_of_the_signal() -> None:
    """Deviation of the noise in a coordinate of the average gradient over the clip, `z sqrt(ratio) / (q N)`."""
    question = PlanQuestion(participants=10, collusion=0.3, **LAB)
    planned = question.forecast()
    share = planned.noise_multiplier * planned.aggregate_variance_ratio_to_central**0.5 / 3_000
    assert planned.noise_share == pytest.approx(share, rel=1e-9)
    levers = question.to_json(planned)["levers"]
    assert set(levers) == {"twice the rounds", "twice the batch", "twice the silos", "no colluders"}
    assert levers["no colluders"] == pytest.approx((1.693 / 2.543) ** 0.5, abs=0.01)
    assert 0.9 < levers["twice the rounds"] < 1.0
    assert 0.9 < levers["twice the batch"] < 1.0
    half = forecast(participants=10, collusion=0.3, **{**LAB, "records": 30_000})
    assert half.noise_share == pytest.approx(2.0 * planned.noise_share, rel=1e-9)


def test_the_simulator_is_given_silos() -> None:
    question = PlanQuestion(participants=10, **LAB)
    found, method = settings_of_plan(question.to_json(question.forecast()))
    assert (found["data.silos"], found["privacy.unit"], found["privacy.mode"]) == (10, "record", "repair")
    assert not {"data.clients", "training.participants", "privacy.participations"} & found.keys()
    assert method["graph"] == "complete"


@pytest.mark.parametrize(
    ("settings", "fewest"),
    [({}, 2), ({"mode": "repair"}, 3), ({"collusion": 0.3}, 3), ({"collusion": 0.9}, 20)],
)
def test_the_fewest_participants_are_those_with_which_a_round_can_be_had(
    settings: dict[str, Any], fewest: int
) -> None:
    plan = Plan(graph="complete", **settings)
    assert fewest_participants(plan) == fewest
    if fewest > 2:
        with pytest.raises(PrivacyError):
            plan.assumed(fewest - 1)


@pytest.mark.parametrize(
    ("colluders", "threshold", "dropped"), [(0, 3, 2), (1, 4, 1), (2, 4, 1)], ids=lambda one: str(one)
)
def test_five_silos_repair_what_their_committee_can_lose(
    colluders: int, threshold: int, dropped: int
) -> None:
    assumed = Plan(graph="complete", mode="repair", collusion=colluders / 5).assumed(5)
    assert (assumed.colluders, assumed.committee, assumed.threshold) == (colluders, 5, threshold)
    assert assumed.dropped == assumed.revealed == dropped


def test_a_repair_with_defaults_repairs_and_leaves_less_than_tolerating_two_of_twelve() -> None:
    """It used to repair nothing, and cost more: 5 % are expected to be lost, and at least one."""
    assumed = Plan(mode="repair", neighbours=11.0, graph="complete").assumed(12)
    assert assumed.dropped >= 2
    tolerated, repaired = (
        forecast(participants=12, neighbours=11.0, mode=mode, dropout=2 / 12)
        for mode in ("tolerate", "repair")
    )
    assert repaired.aggregate_variance_ratio_to_central < tolerated.aggregate_variance_ratio_to_central
