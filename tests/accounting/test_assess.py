"""A client's assessment of a round equals the accountant's numbers for the worst case it stands for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from niss import effective_variance
from niss.accounting import LedgerFile, Plan
from niss.accounting.protocol_rounds import Assessor, charge_to, make_terms
from niss.errors import ConfigError, PrivacyError, RemoteProtocolError
from niss.protocol.agreement import Agreed, agree
from niss.views import Corruption, worst_case
from support.protocol_round import Federation
from support.what_left import Held


def proposed(size: int = 10, **changes: Any) -> Agreed:
    """A round with residual noise, as every participant sees it."""
    federation = Federation(size, "assess")
    values = {"neighbours": float(size - 1), "residual_variance": 0.2, "unit_variance": 0.25, **changes}
    return agree(federation.open(federation.terms(**values)))


def mu_of(agreed: Agreed, variance: float) -> float:
    return agreed.terms.clip / len(agreed.participants) / math.sqrt(variance)


@pytest.mark.parametrize("neighbours", [9.0, 3.0])
def test_without_colluders_it_is_the_joint_view_of_the_worst_client(neighbours: float) -> None:
    agreed = proposed(neighbours=neighbours)
    variance = effective_variance(agreed.graph, unit_variance=0.25, residual_variance=0.2)
    assert Assessor()(agreed, 0) == pytest.approx(mu_of(agreed, float(variance.min())))
    assert Assessor(relation="replace-one")(agreed, 0) == pytest.approx(
        2.0 * mu_of(agreed, float(variance.min()))
    )


@pytest.mark.parametrize("colluders", [1, 3, 8])
def test_colluders_on_a_complete_graph_are_all_alike(colluders: int) -> None:
    agreed = proposed()
    variance = effective_variance(
        agreed.graph, unit_variance=0.25, residual_variance=0.2, colluders=range(colluders)
    )
    assert Assessor()(agreed, colluders) == pytest.approx(mu_of(agreed, float(variance.min())))


def test_on_a_sparse_graph_every_set_of_colluders_is_covered() -> None:
    agreed = proposed(neighbours=3.0)
    worst = min(
        float(
            effective_variance(
                agreed.graph, unit_variance=0.25, residual_variance=0.2, colluders=(one, two)
            ).min()
        )
        for one in range(10)
        for two in range(one)
    )
    assert Assessor()(agreed, 2) == pytest.approx(mu_of(agreed, worst))


@pytest.mark.parametrize(("revealed", "dropped"), [(0, 0), (2, 2), (1, 3), (3, 1)])
def test_a_repair_counts_reveals_and_dropped_clients_like_colluders(revealed: int, dropped: int) -> None:
    agreed = proposed(
        mode="repair", revealed=revealed, dropped=dropped, self_variance=50.0, colluding_neighbours=2
    )
    corruption = Corruption(colluders=2, revealed=revealed, dropped=dropped)
    found = worst_case(
        agreed.graph, corruption, unit_variance=0.25, residual_variance=0.2, target_variance=1.0
    )
    gone = range(2 + max(revealed, dropped))
    variance = effective_variance(agreed.graph, unit_variance=0.25, residual_variance=0.2, colluders=gone)
    assert found.ratio == pytest.approx(float(variance.min()))
    assert Assessor()(agreed, 2) == pytest.approx(mu_of(agreed, found.ratio))


def test_tolerating_charges_no_reveals() -> None:
    caps = {"revealed": 3, "dropped": 3}
    assert Assessor()(proposed(**caps), 1) == pytest.approx(Assessor()(proposed(), 1))


@pytest.mark.parametrize("alone", [0.0, 0.1, 0.5])
def test_a_self_mask_must_protect_alone(alone: float) -> None:
    agreed = proposed(mode="repair", self_variance=alone, revealed=0, dropped=0)
    assert Assessor()(agreed, 0) == pytest.approx(mu_of(agreed, 0.2 + alone))


def test_a_threshold_too_small_for_the_colluders_is_refused() -> None:
    repair = {"mode": "repair", "self_variance": 1.0, "revealed": 0, "dropped": 0}
    with pytest.raises(RemoteProtocolError, match="the terms allow for 1"):
        Assessor()(proposed(colluding_neighbours=1, **repair), 2)
    assert Assessor()(proposed(colluding_neighbours=2, **repair), 2) < math.inf
    # All neighbours may collude: no threshold helps.
    sparse = proposed(20, neighbours=2.0, colluding_neighbours=19, **repair)
    with pytest.raises(RemoteProtocolError, match="may collude"):
        Assessor()(sparse, 18)
    # In `tolerate` nothing is revealed, and no threshold is needed.
    assert Assessor()(proposed(colluding_neighbours=0), 2) < math.inf


def test_a_failure_probability_buys_fewer_colluding_neighbours() -> None:
    agreed = proposed(40, neighbours=6.0, mode="repair", self_variance=5.0, colluding_neighbours=6)
    with pytest.raises(RemoteProtocolError, match="may collude"):
        Assessor()(agreed, 8)
    assert Assessor(failure=1e-3)(agreed, 8) < math.inf


def test_too_few_participants_or_too_many_reveals_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="too few"):
        Assessor()(proposed(5), 4)
    repair = proposed(5, mode="repair", self_variance=1.0, revealed=3, dropped=3, colluding_neighbours=1)
    with pytest.raises(PrivacyError, match="nobody to share"):
        Assessor()(repair, 1)
    with pytest.raises(ConfigError, match="relation"):
        Assessor(relation="swap")


def test_no_residual_noise_is_no_guarantee() -> None:
    assert Assessor()(proposed(residual_variance=0.0), 0) == math.inf


@pytest.mark.parametrize("grid_bits", [0, 2, 3])
def test_noise_that_a_coarse_grid_swallows_gets_no_credit(grid_bits: int) -> None:
    """A server may choose a grid on which shares and masks round to nothing; the residual alone is safe."""
    coarse = proposed(grid_bits=grid_bits)
    assert Assessor()(coarse, 0) == pytest.approx(mu_of(coarse, 0.2))
    masked = proposed(grid_bits=grid_bits, mode="repair", self_variance=1.0, revealed=0, dropped=0)
    assert Assessor()(masked, 0) == pytest.approx(mu_of(masked, 0.2))
    fine = proposed(grid_bits=8)
    assert Assessor()(fine, 0) < 0.6 * mu_of(fine, 0.2)


def test_a_second_question_about_the_same_round_is_answered_alike() -> None:
    assess, agreed, other = Assessor(), proposed(), proposed(residual_variance=0.3)
    first = assess(agreed, 1)
    assert assess(agreed, 1) == first
    assert assess(agreed, 2) > first
    assert assess(other, 1) < first
    assert assess(agreed, 1) == first


def test_charges_reach_the_ledger_once(tmp_path: Path) -> None:
    with LedgerFile.create(
        tmp_path / "ledger", run="run", budgets={"me": 1.0}, delta=1e-5, unit="client", relation="zero-out"
    ) as ledger:
        charge, agreed = charge_to(ledger, "me", relation="zero-out"), proposed()
        charge(agreed, 0.6)
        assert ledger.spent("me") == pytest.approx(0.6)
        assert ledger.spent("me", view="marginal") == pytest.approx(mu_of(agreed, 2.0 * 0.25 * 9.0 + 0.2))
        with pytest.raises(PrivacyError, match="charged before"):
            charge(agreed, 0.6)
        with pytest.raises(PrivacyError, match="overspend"):
            charge(proposed(round=2), 0.9)


def test_a_round_without_shares_can_be_charged_too(tmp_path: Path) -> None:
    """The residual noise protects an upload alone; without that either there is no marginal guarantee."""
    with LedgerFile.create(
        tmp_path / "ledger", run="run", delta=1e-5, unit="client", relation="zero-out"
    ) as ledger:
        charge, residual = charge_to(ledger, "me", relation="zero-out"), proposed(unit_variance=0.0)
        charge(residual, 0.5)
        assert ledger.spent("me") == pytest.approx(0.5)
        assert ledger.spent("me", view="marginal") == pytest.approx(mu_of(residual, 0.2))
        charge(proposed(round=2, unit_variance=0.0, residual_variance=0.0), 0.5)
        assert ledger.spent("me", view="marginal") == math.inf


@pytest.mark.parametrize("relation", ["zero-out", "replace-one"])
@pytest.mark.parametrize("tau2", [0.0, 0.3])
def test_a_charge_costs_what_the_simulator_says_of_the_same_round(relation: str, tau2: float) -> None:
    """One upload looked at alone: the client's own ledger and the simulator's `RoundPlan` agree."""
    size, plan = (
        10,
        Plan(clip=0.7, epsilon=2.0, relation=relation, neighbours=9.0, graph="complete", tau2=tau2),
    )
    simulated = plan.for_round(range(size), weights=1.0 / size, records=1.0, beacon=b"b")
    terms = make_terms(plan, participants=size, coordinates=4, run=bytes(16), number=0)
    agreed = agree(Federation(size, "assess").open(terms))
    charged: list[tuple[float, float]] = []

    class Recorder:
        def charge(self, round: int, attempt: int, mus: Any, basis: Any) -> None:  # noqa: ARG002
            charged.append(mus["me"])

    charge_to(Recorder(), "me", relation=relation)(agreed, 0.25)
    assert charged == [(0.25, pytest.approx(float(simulated.marginal_mu[0]), rel=1e-12))]


@pytest.mark.parametrize("neighbours", [3.0, 9.0])
def test_shares_far_above_the_residual_noise_are_not_charged_less_for_rounding(neighbours: float) -> None:
    """Where variances are 10^13 apart, the inverse of the covariance is off by a thousandth, to either side."""
    for power in range(0, 44, 2):
        agreed = proposed(10, neighbours=neighbours, unit_variance=2.0**power, grid_bits=8)
        held = Held(agreed.opened, ())
        held.uploads = dict.fromkeys(range(10))
        assert max(held.true_mu().values()) <= Assessor()(agreed, 0) * (1.0 + 1e-6)
