"""Runs with carried shares over the protocol: from a plan to a schedule, and what that costs a client."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from niss.accounting import (
    Charge,
    CommittedAccount,
    DrawnAccount,
    Plan,
    Promise,
    make_schedule,
    make_terms,
    propose_carried_round,
    run_grid_delta,
    scheduled_run,
)
from niss.accounting.discretisation import check_run_discretisation
from niss.errors import ConfigError, LocalProtocolError, PrivacyError, RemoteProtocolError
from niss.protocol.agreement import agree, previous_of
from support.protocol_round import GRID, NOISY, RUN, CarriedFederation, changed, repairing, schedule

SIZE, ROUNDS, APART = 6, 9, 3
# So rarely that in a million rounds none loses two.
ONE_MAY_BE_LOST: dict[str, Any] = {"mode": "repair", "dropout": 1e-4}


def plan_for(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "method": "niss-carried",
        "graph": "complete",
        "clip": 0.5,
        "epsilon": 3.0,
        "kappa": 20.0,
        "participations": ROUNDS // APART,
        "horizon": ROUNDS,
        "separation": APART,
        "participants": SIZE,
    }
    return Plan(**{**values, **changes})


class Book:
    """A ledger that notes what it is charged."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, Charge, dict[str, Any]]] = []

    def charge(self, round: int, attempt: int, charges: Any, basis: Any) -> None:
        assert attempt == 0
        self.entries.append((round, charges["me"], dict(basis)))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pattern": "any"},
        {"relation": "replace-one"},
        {"collusion": 2 / SIZE},
        {"closing": True},
        {"tau2": 0.5},
    ],
    ids=str,
)
def test_a_schedule_is_worth_what_its_plan_promises(changes: dict[str, Any]) -> None:
    """Recomputed from its numbers alone, as a client does; and no more than is promised in any allowed pattern."""
    plan = plan_for(**changes)
    committed = make_schedule(plan, participants=SIZE, coordinates=100)
    worth = scheduled_run(committed, relation=plan.relation, colluders=plan.assumed(SIZE).colluders)
    promise = plan.committed(SIZE)
    assert worth.mu == pytest.approx(promise.mu, rel=1e-9)
    assert committed.rounds == ROUNDS + bool(changes.get("closing"))
    if plan.tau2 is None:
        assert worth.mu == pytest.approx(float(plan.budget(1)[0]), rel=1e-6)


def test_the_grid_has_its_part_of_delta_whether_noise_is_carried_or_not() -> None:
    assert plan_for().grid_delta == Plan(clip=1.0, epsilon=3.0).grid_delta == pytest.approx(0.02 * 1e-5)
    assert plan_for(tau2=0.5).grid_delta == 0.0


@pytest.mark.parametrize("coordinates", [10, 100_000])
def test_the_grid_of_a_run_stays_within_its_part_of_delta(coordinates: int) -> None:
    """All its rounds count, however often a client takes part."""
    plan = plan_for()
    committed = make_schedule(plan, participants=SIZE, coordinates=coordinates)
    cost = run_grid_delta(committed, Promise.of(plan))
    assert cost > 0.0
    # Each of its three participations pays for all rounds.
    assert 3 * cost <= plan.grid_delta
    longer = replace(committed, rounds=10 * ROUNDS)
    assert run_grid_delta(longer, Promise.of(plan)) > cost


@pytest.mark.parametrize(("size", "coordinates"), [(6, 100), (100, 2_000_000), (400, 1_000)])
def test_clients_accept_the_grid_that_is_chosen(size: int, coordinates: int) -> None:
    """Of many clients each carries a narrow share to everyone: it has to be some steps wide too."""
    plan = plan_for(participants=size, horizon=100, separation=10, participations=10)
    committed = make_schedule(plan, participants=size, coordinates=coordinates)
    account = CommittedAccount(committed, promise=Promise.of(plan))
    for number in (0, 1, 99):
        check_run_discretisation(account.schedule, math.sqrt(account.cost(number)), account._promise)
    coarser = CommittedAccount(
        replace(committed, grid_bits=committed.grid_bits - 8), promise=Promise.of(plan)
    )
    with pytest.raises(RemoteProtocolError, match="a few grid steps wide"):
        check_run_discretisation(coarser.schedule, 0.1, coarser._promise)


def test_without_fresh_noise_nothing_is_promised_and_the_grid_costs_nothing() -> None:
    committed = make_schedule(plan_for(tau2=0.0), participants=SIZE, coordinates=10)
    assert not scheduled_run(committed, relation="zero-out", colluders=0).private
    assert CommittedAccount(committed).cost(0) == math.inf
    assert run_grid_delta(committed, Promise()) == 0.0


@pytest.mark.parametrize("grid_bits", [3, 2])
def test_a_grid_that_is_asked_for_has_to_be_fine_enough(grid_bits: int) -> None:
    with pytest.raises(ConfigError, match="too narrow"):
        make_schedule(plan_for(), participants=SIZE, coordinates=10, grid_bits=grid_bits)


def test_plans_of_other_kinds_have_no_schedule_and_carried_ones_no_single_terms() -> None:
    with pytest.raises(ConfigError, match="carries noise over"):
        make_schedule(Plan(clip=1.0, epsilon=3.0), participants=4, coordinates=10)
    with pytest.raises(ConfigError, match="follow from its schedule"):
        make_terms(plan_for(), participants=SIZE, coordinates=10, run=b"run", number=0)
    for graph in ("regular", "random"):
        with pytest.raises(ConfigError, match="everyone shares with everyone") as refused:
            plan_for(graph=graph)
        assert "complete" in str(refused.value.hint)


@pytest.mark.parametrize(
    "changes", [{}, {"collusion": 1 / SIZE}, {"closing": True}, {"pattern": "any"}], ids=str
)
def test_repairs_are_charged_as_planned_and_their_self_mask_costs_nothing(changes: dict[str, Any]) -> None:
    plan = plan_for(**ONE_MAY_BE_LOST, **changes)
    committed, colluders = (
        make_schedule(plan, participants=SIZE, coordinates=100),
        plan.assumed(SIZE).colluders,
    )
    assert (committed.mode, committed.noise.dropped, committed.noise.committee) == ("repair", 1, SIZE)
    assert committed.noise.threshold == (SIZE + colluders) // 2 + 1
    worth = scheduled_run(committed, relation=plan.relation, colluders=colluders)
    np.testing.assert_allclose(worth.matrix, plan.committed(SIZE).matrix, rtol=1e-9)
    assert worth.mu == pytest.approx(float(plan.budget(1)[0]), rel=1e-6)
    # Whoever may be called dropped counts like a colluder, and a weaker mask is charged for.
    assert worth.mu > scheduled_run(changed(committed, dropped=0), relation=plan.relation, colluders=0).mu
    weak = changed(committed, self_mask=committed.noise.self_mask / 4.0)
    assert scheduled_run(weak, relation=plan.relation, colluders=colluders).mu > worth.mu
    assert CommittedAccount(weak, colluders=colluders).cost(0) == pytest.approx(
        (plan.clip / SIZE) ** 2 / (weak.noise.residual + weak.noise.self_mask)
    )


def test_a_committee_that_colluders_could_outvote_is_refused() -> None:
    loose = repairing(**NOISY)
    assert CommittedAccount(loose, colluders=0).plan is not None
    with pytest.raises(RemoteProtocolError, match="but 4 must"):
        CommittedAccount(loose, colluders=2)
    assert CommittedAccount(changed(loose, threshold=4), colluders=2).plan is not None


@pytest.mark.parametrize("called", [(0, 0, 0, 0), (1, 2, 3, 4), (0, 0, 1, 1), (None, 3, 3, None)])
def test_the_charge_covers_clients_that_are_called_dropped_although_they_uploaded(called: tuple) -> None:
    """Everyone uploads, but the server says that one a round did not: it holds that upload, and all its shares."""
    plan = plan_for(
        **ONE_MAY_BE_LOST, horizon=4, separation=2, participations=2, participants=5, kappa=3.0, clip=2.0
    )
    committed = make_schedule(plan, participants=5, coordinates=8, grid_bits=GRID)
    federation = CarriedFederation(committed)
    for number, seat in enumerate(called):
        outcome = federation.play_round(number, pretended=() if seat is None else (seat,))
        assert outcome.exact
    identity = {
        (number, seat): federation.listed(number)[seat].identity
        for number, seat in enumerate(called)
        if seat is not None
    }
    stripped = {(owner, number) for (number, _), owner in identity.items()}
    charged = {seat.identity.public: sum(mu**2 for _, _, mu in seat.charges) for seat in federation.seats}
    found = federation.seen.mu2(stripped=stripped)
    assert len(found) == 10
    assert all(mu2 <= charged[owner] * (1.0 + 1e-9) for owner, mu2 in found.items())
    assert max(mu2 / charged[owner] for owner, mu2 in found.items()) > 0.5


def booked(rounds: int, **changes: Any) -> tuple[CarriedFederation, CommittedAccount, Book]:
    """A run of which the first client's charges are noted."""
    federation = CarriedFederation(schedule(rounds=rounds, **changes, **NOISY))
    account, book, seat = CommittedAccount(federation.schedule), Book(), federation.seats[0]
    seat.assess, seat.book = account, account.charging(book, "me")
    seat.restart()
    for number in range(rounds):
        federation.play_round(number)
    return federation, account, book


def test_every_participation_is_charged_what_it_adds() -> None:
    """`Delta' K[P, P] Delta` along the way, cross terms and all; the whole run's grid once, with the first."""
    federation, _, book = booked(rounds=6)
    assert [entry[0] for entry in book.entries] == [0, 2, 4]
    worth = scheduled_run(federation.schedule, relation="zero-out", colluders=0)
    whole = worth.matrix[np.ix_([0, 2, 4], [0, 2, 4])].sum()
    spent = sum(charge.mu2 for _, charge, _ in book.entries)
    assert spent == pytest.approx(whole, rel=1e-9)
    assert spent > sum(worth.matrix[one, one] for one in (0, 2, 4)) * 1.01
    whole_run = run_grid_delta(federation.schedule, Promise(rounds=6))
    assert [charge.grid_delta for _, charge, _ in book.entries] == [whole_run, 0.0, 0.0]
    assert {basis["rounds"] for _, _, basis in book.entries} == {6}
    # One upload alone has more noise inside the run than at its ends.
    marginal = [charge.marginal for _, charge, _ in book.entries]
    assert marginal[0] > marginal[1] == marginal[2]


def test_a_closing_round_is_not_charged() -> None:
    _, account, book = booked(rounds=3, closing=True)
    assert [entry[0] for entry in book.entries] == [0]
    assert account.cost(2) == 0.0


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
    assert account.plan is not None
    with pytest.raises(PrivacyError, match="past the committed end"):
        CommittedAccount(schedule(rounds=5, **NOISY)).plan.charge(5, ())


def test_an_account_is_for_the_colluders_it_was_made_for_and_an_assessor_for_single_rounds() -> None:
    federation = CarriedFederation(schedule(**NOISY))
    agreed = agree(federation.open_next(0))
    account = CommittedAccount(federation.schedule, colluders=1)
    with pytest.raises(LocalProtocolError, match="assumes 1 colluders, not 0"):
        account(agreed, 0)
    with pytest.raises(LocalProtocolError, match="depends on its whole run"):
        DrawnAccount()(agreed, 0)
    other = CommittedAccount(schedule(rounds=7, **NOISY))
    with pytest.raises(RemoteProtocolError, match="not those of the schedule"):
        other(agreed, 0)


def test_more_colluders_cost_more() -> None:
    costs = [CommittedAccount(schedule(**NOISY), colluders=count).cost(2) for count in range(3)]
    assert costs == sorted(costs)
    assert costs[0] < costs[1] < costs[2]


def test_a_proposed_round_is_committed_to_with_its_next_cohort() -> None:
    federation = CarriedFederation(schedule(rounds=3, **NOISY), "proposed")
    account, previous = CommittedAccount(federation.schedule), None
    for number in range(3):
        parts = {"following": federation.listed(number + 1), "previous": previous}
        proposed = propose_carried_round(
            federation.schedule,
            number,
            run=RUN,
            participants=federation.listed(number),
            release=partial(federation.chain.release, number),
            account=account,
            **parts,
        )
        opened = federation.server.open_round(proposed.terms, proposed.participants, proposed.beacon, **parts)
        for one in federation.cohort(number):
            federation.server.take_upload(federation.answer(one, opened))
        assert len(federation.server.finish().survivors) == 4
        previous = previous_of(opened)


def test_a_round_that_no_client_would_accept_is_not_proposed() -> None:
    """Noise that is narrower than the grid counts nothing."""
    federation = CarriedFederation(schedule(grid_bits=3, **NOISY), "proposed")
    with pytest.raises(PrivacyError, match="a few grid steps"):
        propose_carried_round(
            federation.schedule,
            0,
            run=RUN,
            participants=federation.listed(0),
            following=federation.listed(1),
            previous=None,
            release=partial(federation.chain.release, 0),
            account=CommittedAccount(federation.schedule),
        )
