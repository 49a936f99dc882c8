"""A client's assessment of a round equals the accountant's numbers for the worst case it stands for."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from niss import effective_variance
from niss.accounting import (
    Charge,
    CommittedAccount,
    DrawnAccount,
    LedgerFile,
    LedgerHeader,
    Plan,
    Promise,
    make_terms,
    run_grid_delta,
    scheduled_run,
)
from niss.accounting.assumed import committee_size, committee_threshold, most_dropped
from niss.errors import ConfigError, LocalProtocolError, PrivacyError, RemoteProtocolError
from niss.protocol.agreement import Agreed, agree
from niss.views import Corruption, colluding_neighbours, worst_case
from support.protocol_round import NOISY, CarriedFederation, Federation, changed, repairing, schedule
from support.what_left import Held


def proposed(size: int = 10, **changes: Any) -> Agreed:
    """A round with residual noise, as every participant sees it."""
    federation = Federation(size, "assess")
    values = {"neighbours": float(size - 1), "residual_variance": 0.2, "unit_variance": 0.25, **changes}
    return agree(federation.open(federation.terms(**values)))


def mu_of(agreed: Agreed, variance: float) -> float:
    return agreed.terms.clip / len(agreed.participants) / math.sqrt(variance)


def judged(carried: bool, colluders: int = 0, *, residual: float = 0.0625) -> float:
    """mu of a round by its own graph, or as a part of a run that carries noise."""
    if carried:
        return math.sqrt(CommittedAccount(schedule(residual=residual), colluders=colluders).cost(2))
    return DrawnAccount()(proposed(residual_variance=residual), colluders)


class Book:
    """A ledger that notes what it is charged: (round, charge, basis)."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, Charge, dict[str, Any]]] = []

    def charge(self, round: int, attempt: int, charges: Any, basis: Any) -> None:
        assert attempt == 0
        self.entries.append((round, charges["me"], dict(basis)))


@pytest.mark.parametrize(
    ("neighbours", "colluders"), [(9.0, 0), (3.0, 0), (9.0, 1), (9.0, 3), (9.0, 8), (3.0, 2)]
)
def test_it_is_the_joint_view_of_the_worst_client_with_the_worst_colluders(
    neighbours: float, colluders: int
) -> None:
    agreed = proposed(neighbours=neighbours)
    noise = {"unit_variance": 0.25, "residual_variance": 0.2}
    worst = min(
        float(effective_variance(agreed.graph, colluders=known, **noise).min())
        for known in itertools.combinations(range(10), colluders)
    )
    assert DrawnAccount()(agreed, colluders) == pytest.approx(mu_of(agreed, worst))
    replaced = DrawnAccount(relation="replace-one")(agreed, colluders)
    assert replaced == pytest.approx(2.0 * mu_of(agreed, worst))


@pytest.mark.parametrize(("revealed", "dropped"), [(0, 0), (2, 2), (1, 3), (3, 1)])
def test_a_repair_counts_reveals_and_dropped_clients_like_colluders(revealed: int, dropped: int) -> None:
    agreed = proposed(mode="repair", revealed=revealed, dropped=dropped, self_variance=50.0, threshold=7)
    corruption = Corruption(colluders=2, revealed=revealed, dropped=dropped)
    found = worst_case(
        agreed.graph, corruption, unit_variance=0.25, residual_variance=0.2, target_variance=1.0
    )
    gone = range(2 + max(revealed, dropped))
    variance = effective_variance(agreed.graph, unit_variance=0.25, residual_variance=0.2, colluders=gone)
    assert found.ratio == pytest.approx(float(variance.min()))
    assert DrawnAccount()(agreed, 2) == pytest.approx(mu_of(agreed, found.ratio))


def test_tolerating_charges_no_reveals() -> None:
    caps = {"revealed": 3, "dropped": 3}
    assert DrawnAccount()(proposed(**caps), 1) == pytest.approx(DrawnAccount()(proposed(), 1))


@pytest.mark.parametrize("alone", [0.0, 0.1, 0.5])
def test_a_self_mask_must_protect_alone(alone: float) -> None:
    agreed = proposed(mode="repair", self_variance=alone, revealed=0, dropped=0)
    assert DrawnAccount()(agreed, 0) == pytest.approx(mu_of(agreed, 0.2 + alone))


def test_a_threshold_too_small_for_the_colluders_is_refused() -> None:
    """Of ten members, two of whom collude, two survivor sets could each gather six."""
    repair = {"mode": "repair", "self_variance": 1.0, "revealed": 0, "dropped": 0}
    with pytest.raises(RemoteProtocolError, match=r"6 of the 10 members of the committee can .* but 7 must"):
        DrawnAccount()(proposed(threshold=6, **repair), 2)
    assert DrawnAccount()(proposed(threshold=7, **repair), 2) < math.inf
    # Nearly all members may collude: no threshold helps.
    small = proposed(20, committee=10, threshold=10, **repair)
    assert DrawnAccount()(small, 9) < math.inf
    with pytest.raises(RemoteProtocolError, match="but 11 must"):
        DrawnAccount()(small, 10)
    # In `tolerate` nothing is revealed, and nobody repairs.
    assert DrawnAccount()(proposed(), 2) < math.inf
    # A run is refused before its first round.
    loose = repairing(**NOISY)
    assert CommittedAccount(loose, colluders=0).plan is not None
    with pytest.raises(RemoteProtocolError, match="but 4 must"):
        CommittedAccount(loose, colluders=2)
    assert CommittedAccount(changed(loose, threshold=4), colluders=2).plan is not None


def test_a_failure_probability_buys_fewer_colluding_members() -> None:
    agreed = proposed(40, neighbours=39.0, mode="repair", self_variance=5.0, committee=12, threshold=10)
    with pytest.raises(RemoteProtocolError, match="members of the committee"):
        DrawnAccount()(agreed, 8)
    assert DrawnAccount(failure=1e-2)(agreed, 8) < math.inf
    # A larger committee in a smaller round has all of them, whatever may fail.
    everyone = proposed(
        12, mode="repair", self_variance=5.0, revealed=0, dropped=0, committee=12, threshold=10
    )
    with pytest.raises(RemoteProtocolError, match="members of the committee"):
        DrawnAccount(failure=0.5)(everyone, 8)


@pytest.mark.parametrize("colluders", [0, 1, 3, 10])
@pytest.mark.parametrize("members", [10, 13, 40])
def test_one_survivor_set_gathers_the_threshold_whoever_colludes(members: int, colluders: int) -> None:
    """a + c >= t and b + c >= t for two sets would take more honest members than there are."""
    for failure in (0.0, 1e-6, 1e-2):
        threshold = committee_threshold(40, members, colluders, failure)
        feared = min(members, colluders)
        if failure and members < 40:
            feared = colluding_neighbours(40, members, colluders, failure)
        honest = members - feared
        assert 2 * (threshold - feared) > honest
        assert 2 * (threshold - 1 - feared) <= honest


def test_the_bound_on_members_holds_as_often_as_it_says() -> None:
    """All committees of 10 of 40 with 8 colluders: hypergeometric, counted exactly."""
    failure = 1e-4
    threshold = committee_threshold(40, 10, 8, failure)
    allowed = 2 * threshold - 10 - 1
    more = sum(math.comb(8, bad) * math.comb(32, 10 - bad) for bad in range(allowed + 1, 9))
    assert more / math.comb(40, 10) <= failure


def test_a_committee_is_as_small_as_dropouts_allow() -> None:
    assert committee_size(100, 0, 0.0, 0.0) == 10
    sizes = {rate: committee_size(100, 0, 0.0, rate) for rate in (0.05, 0.2)}
    assert 10 <= sizes[0.05] < sizes[0.2] < 100
    assert committee_size(12, 4, 1e-6, 0.3) is None
    for rate, size in sizes.items():
        assert most_dropped(size, rate, 1.0) <= size - committee_threshold(100, size, 0, 0.0)


def test_too_few_participants_or_too_many_reveals_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="too few"):
        DrawnAccount()(proposed(5), 4)
    repair = proposed(5, mode="repair", self_variance=1.0, revealed=3, dropped=3, threshold=4)
    with pytest.raises(PrivacyError, match="nobody to share"):
        DrawnAccount()(repair, 1)
    with pytest.raises(ConfigError, match="relation"):
        DrawnAccount(relation="swap")


@pytest.mark.parametrize("carried", [False, True])
def test_more_colluders_cost_more_and_no_residual_noise_is_no_guarantee(carried: bool) -> None:
    costs = [judged(carried, count) for count in range(3)]
    assert 0.0 < costs[0] < costs[1] < costs[2] < math.inf
    assert judged(carried, residual=0.0) == math.inf
    if carried:
        assert not scheduled_run(schedule(), relation="zero-out", colluders=0).private
        assert run_grid_delta(schedule(), Promise()) == 0.0


@pytest.mark.parametrize(
    ("changes", "colluders", "match"),
    [
        ({"carried": 4e9}, 0, "cannot be accounted for"),
        ({"carried": 1e308, "residual": 1e-308}, 0, "cannot be accounted for"),
        ({"clip": 0.0}, 0, "schedule"),
        ({"clip": 1e-200}, 0, "schedule"),
        ({"residual": 1e-320}, 0, "cannot be accounted for"),
        ({}, 4, "no honest client"),
    ],
)
def test_schedules_that_cannot_be_accounted_for_are_refused(
    changes: dict[str, Any], colluders: int, match: str
) -> None:
    with pytest.raises(RemoteProtocolError, match=match):
        CommittedAccount(schedule(**{**NOISY, **changes}), colluders=colluders)


def test_a_longest_run_is_accounted_for_and_no_participation_past_its_end() -> None:
    account = CommittedAccount(schedule(rounds=2_000, **NOISY))
    assert 0.0 < account.cost(1_999) < math.inf
    with pytest.raises(PrivacyError, match="past the committed end"):
        CommittedAccount(schedule(rounds=5, **NOISY)).plan.charge(5, ())


def test_an_account_is_of_one_run_or_of_single_rounds_and_for_the_colluders_it_was_made_for() -> None:
    federation = CarriedFederation(schedule(**NOISY))
    agreed = agree(federation.open_next(0))
    for account, match in (
        (CommittedAccount(federation.schedule, colluders=1), "assumes 1 colluders, not 0"),
        (DrawnAccount(), "depends on its whole run"),
    ):
        with pytest.raises(LocalProtocolError, match=match):
            account(agreed, 0)
    with pytest.raises(RemoteProtocolError, match="not those of the schedule"):
        CommittedAccount(schedule(rounds=7, **NOISY))(agreed, 0)


@pytest.mark.parametrize("grid_bits", [0, 2, 3])
def test_noise_that_a_coarse_grid_swallows_gets_no_credit(grid_bits: int) -> None:
    """A server may choose a grid on which shares and masks round to nothing; the residual alone is safe."""
    coarse = proposed(grid_bits=grid_bits)
    assert DrawnAccount()(coarse, 0) == pytest.approx(mu_of(coarse, 0.2))
    masked = proposed(grid_bits=grid_bits, mode="repair", self_variance=1.0, revealed=0, dropped=0)
    assert DrawnAccount()(masked, 0) == pytest.approx(mu_of(masked, 0.2))
    fine = proposed(grid_bits=8)
    assert DrawnAccount()(fine, 0) < 0.6 * mu_of(fine, 0.2)


def test_a_second_question_about_the_same_round_is_answered_alike() -> None:
    assess, agreed, other = DrawnAccount(), proposed(), proposed(residual_variance=0.3)
    first = assess(agreed, 1)
    assert assess(agreed, 1) == first
    assert assess(agreed, 2) > first
    assert assess(other, 1) < first
    assert assess(agreed, 1) == first


def test_charges_reach_the_ledger_once(tmp_path: Path) -> None:
    header = LedgerHeader(run="run", budgets={"me": 1.0}, delta=1e-5)
    with LedgerFile.create(tmp_path / "ledger", header) as ledger:
        charge, agreed = DrawnAccount().charging(ledger, "me"), proposed()
        charge(agreed, 0.6)
        assert ledger.spent("me") == pytest.approx(0.6)
        assert ledger.spent_alone("me") == pytest.approx(mu_of(agreed, 2.0 * 0.25 * 9.0 + 0.2))
        with pytest.raises(PrivacyError, match="charged before"):
            charge(agreed, 0.6)
        with pytest.raises(PrivacyError, match="overspend"):
            charge(proposed(round=2), 0.9)


def test_a_round_without_shares_can_be_charged_too(tmp_path: Path) -> None:
    """The residual noise protects an upload alone; without that either there is no marginal guarantee."""
    with LedgerFile.create(tmp_path / "ledger", LedgerHeader(run="run", delta=1e-5)) as ledger:
        charge, residual = DrawnAccount().charging(ledger, "me"), proposed(unit_variance=0.0)
        charge(residual, 0.5)
        assert ledger.spent("me") == pytest.approx(0.5)
        assert ledger.spent_alone("me") == pytest.approx(mu_of(residual, 0.2))
        charge(proposed(round=2, unit_variance=0.0, residual_variance=0.0), 0.5)
        assert ledger.spent_alone("me") == math.inf


@pytest.mark.parametrize("relation", ["zero-out", "replace-one"])
@pytest.mark.parametrize("tau2", [0.0, 0.3])
def test_a_charge_costs_what_the_simulator_says_of_the_same_round(relation: str, tau2: float) -> None:
    """One upload looked at alone: the client's own ledger and the simulator's `RoundPlan` agree."""
    size = 10
    plan = Plan(clip=0.7, epsilon=2.0, relation=relation, neighbours=9.0, graph="complete", tau2=tau2)
    simulated = plan.for_round(range(size), weights=1.0 / size, records=1.0, beacon=b"b")
    terms = make_terms(plan, participants=size, coordinates=4, run=bytes(16), number=0)
    agreed = agree(Federation(size, "assess").open(terms))
    book = Book()
    DrawnAccount(relation=relation).charging(book, "me")(agreed, 0.25)
    marginal = pytest.approx(float(simulated.marginal_mu[0]) ** 2, rel=1e-12)
    assert [charge for _, charge, _ in book.entries] == [Charge(0.0625, marginal)]


@pytest.mark.parametrize(("rounds", "closing"), [(6, False), (3, True)])
def test_every_participation_in_a_run_is_charged_what_it_adds(rounds: int, closing: bool) -> None:
    """`Delta' K[P, P] Delta` along the way, cross terms and all; the whole run's grid once, with the first."""
    federation, book = CarriedFederation(schedule(rounds=rounds, closing=closing, **NOISY)), Book()
    account, seat = CommittedAccount(federation.schedule), federation.seats[0]
    seat.assess, seat.book = account, account.charging(book, "me")
    seat.restart()
    for number in range(rounds):
        federation.play_round(number)
    charges, visits = [charge for _, charge, _ in book.entries], [number for number, _, _ in book.entries]
    assert visits == list(range(0, rounds - closing, 2))
    matrix = scheduled_run(federation.schedule, relation="zero-out", colluders=0).matrix
    whole = matrix[np.ix_(visits, visits)].sum()
    assert sum(charge.mu2 for charge in charges) == pytest.approx(whole, rel=1e-9)
    whole_run = run_grid_delta(federation.schedule, Promise(rounds=rounds))
    assert [charge.grid_delta for charge in charges] == [whole_run] + [0.0] * (len(visits) - 1)
    assert {basis["rounds"] for *_, basis in book.entries} == {rounds}
    if closing:
        assert account.cost(rounds - 1) == 0.0
        return
    assert whole > sum(matrix[one, one] for one in visits) * 1.01
    # One upload alone has more noise inside the run than at its ends.
    assert charges[0].marginal > charges[1].marginal == charges[2].marginal


@pytest.mark.parametrize("neighbours", [3.0, 9.0])
def test_shares_far_above_the_residual_noise_are_not_charged_less_for_rounding(neighbours: float) -> None:
    """Where variances are 10^13 apart, the inverse of the covariance is off by a thousandth, to either side."""
    for power in range(0, 42, 2):
        agreed = proposed(10, neighbours=neighbours, unit_variance=2.0**power, grid_bits=8)
        held = Held(agreed.opened, ())
        held.uploads = dict.fromkeys(range(10))
        assert max(held.true_mu().values()) <= DrawnAccount()(agreed, 0) * (1.0 + 1e-6)
