"""Terms made from a plan keep its promise, and a round is proposed on the first graph that does."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from niss.accounting import (
    CommittedAccount,
    DrawnAccount,
    Plan,
    Promise,
    forecast,
    make_schedule,
    make_terms,
    propose_carried_round,
    run_grid_delta,
    scheduled_run,
)
from niss.accounting.discretisation import check_run_discretisation
from niss.errors import ConfigError, PrivacyError, RemoteProtocolError
from niss.protocol.agreement import agree
from niss.protocol.messages import RecordTerms, Terms
from niss.protocol.schedule import Schedule
from support.protocol_round import (
    NOISY,
    RUN,
    CarriedFederation,
    Federation,
    changed,
    schedule,
)

CASES = [
    ("complete", 12, {}),
    ("complete", 12, {"collusion": 0.2}),
    ("sparse", 24, {"neighbours": 11.0}),
    ("sparse, collusion", 40, {"neighbours": 16.0, "collusion": 0.05}),
]


def wanted_mu(plan: Plan) -> float:
    return float(plan.round_mu(np.zeros(1, dtype=np.int64))[0])


def terms_of(plan: Plan, size: int, coordinates: int = 3, **given: Any) -> Terms:
    return make_terms(plan, participants=size, coordinates=coordinates, run=b"run", number=1, **given)


CARRIED: dict[str, Any] = {"method": "niss-carried", "graph": "complete", "clip": 0.5, "kappa": 20.0}
# So rarely that in a million rounds none loses two.
ONE_MAY_BE_LOST: dict[str, Any] = {"mode": "repair", "dropout": 1e-4}


def run_plan(size: int = 6, rounds: int = 9, apart: int = 3, **changes: Any) -> Plan:
    """Of a run that carries noise."""
    times = {"participations": rounds // apart, "horizon": rounds, "separation": apart}
    return Plan(**{**CARRIED, **times, "participants": size, **changes})


def schedule_of(plan: Plan, size: int = 6, coordinates: int = 100, **given: Any) -> Schedule:
    return make_schedule(plan, participants=size, coordinates=coordinates, **given)


@pytest.mark.parametrize("mode", ["tolerate", "repair"])
@pytest.mark.parametrize(("name", "size", "settings"), CASES, ids=[case[0] for case in CASES])
def test_clients_accept_what_the_plan_promised(
    name: str, size: int, settings: dict[str, Any], mode: str
) -> None:
    dropout = 0.02 if mode == "repair" else 0.0
    plan = forecast(participants=size, mode=mode, dropout=dropout, clip=1.0, **settings).plan
    terms = terms_of(plan, size)
    wanted = wanted_mu(plan)
    for draw in range(2):
        federation = Federation(size, f"{name} {draw}", colluders=plan.assumed(size).colluders, mu=wanted)
        seat = federation.seats[0]
        seat.assess = DrawnAccount(failure=plan.failure)
        seat.restart()
        opened = federation.open(terms)
        seat.client.upload(opened, np.zeros(3), federation.entropy)
        ((_, _, charged),) = seat.charges
        assert charged <= wanted
        # Nor is it far on the safe side: little more noise than the promise needs.
        assert charged > 0.8 * wanted
        assert agree(opened).graph.kind == name.split(",")[0].replace("sparse", "regular")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pattern": "any"},
        {"relation": "replace-one"},
        {"collusion": 2 / 6},
        {"closing": True},
        {"tau2": 0.5},
        ONE_MAY_BE_LOST,
        {**ONE_MAY_BE_LOST, "collusion": 1 / 6},
        {**ONE_MAY_BE_LOST, "closing": True},
        {**ONE_MAY_BE_LOST, "pattern": "any"},
    ],
    ids=str,
)
def test_a_schedule_is_worth_what_its_plan_promises(changes: dict[str, Any]) -> None:
    """Recomputed from its numbers alone, as a client does; and no more than is promised in any allowed pattern."""
    plan = run_plan(**changes)
    made, colluders = schedule_of(plan), plan.assumed(6).colluders
    worth = scheduled_run(made, relation=plan.relation, colluders=colluders)
    np.testing.assert_allclose(worth.matrix, plan.committed(6).matrix, rtol=1e-9)
    assert worth.mu == pytest.approx(plan.committed(6).mu, rel=1e-9)
    assert made.rounds == 9 + plan.closing
    if plan.tau2 is None:
        assert worth.mu == pytest.approx(float(plan.budget(1)[0]), rel=1e-6)
    if plan.settled_mode == "tolerate":
        return
    assert (made.mode, made.noise.dropped, made.noise.committee) == ("repair", 1, 6)
    assert made.noise.threshold == (6 + colluders) // 2 + 1
    # The self-mask costs nothing; a weaker one is charged for, and whoever may be called dropped like a colluder.
    assert worth.mu > scheduled_run(changed(made, dropped=0), relation=plan.relation, colluders=0).mu
    weak = changed(made, self_mask=made.noise.self_mask / 4.0)
    assert scheduled_run(weak, relation=plan.relation, colluders=colluders).mu > worth.mu
    alone = (plan.clip / 6) ** 2 / (weak.noise.residual + weak.noise.self_mask)
    assert CommittedAccount(weak, colluders=colluders).cost(0) == pytest.approx(alone)


@pytest.mark.parametrize("relation", ["zero-out", "replace-one"])
def test_the_relation_is_the_plans(relation: str) -> None:
    plan = replace(forecast(participants=10, mode="repair", dropout=0.05).plan, relation=relation)
    terms = terms_of(plan, 10)
    federation = Federation(10, "relation")
    mu = DrawnAccount(relation=relation)(agree(federation.open(terms)), 0)
    assert mu <= wanted_mu(plan)
    assert mu == pytest.approx(wanted_mu(plan), rel=0.05)


def test_residual_and_self_mask_reach_the_target_alone() -> None:
    planned = forecast(participants=20, mode="repair", dropout=0.05, collusion=0.1)
    terms, assumed = terms_of(planned.plan, 20), planned.plan.assumed(20)
    assert terms.residual_variance + terms.self_variance >= planned.sigma**2
    assert (terms.revealed, terms.dropped) == (assumed.revealed, assumed.dropped)
    assert (terms.committee, terms.threshold) == (assumed.committee, assumed.threshold)
    assert terms.threshold > (terms.committee + 2) / 2
    tolerated = terms_of(replace(planned.plan, mode="tolerate"), 20)
    assert (tolerated.self_variance, tolerated.revealed, tolerated.dropped) == (0.0, 0, 0)
    assert (tolerated.committee, tolerated.threshold) == (0, 0)


def test_no_plan_is_refused_for_the_last_bit_of_a_float() -> None:
    """Residual and self-mask add up to the target after rounding too: once every fifth plan failed here."""
    draw = np.random.default_rng(5)
    for _ in range(300):
        size = int(draw.integers(3, 12))
        plan = Plan(
            clip=float(draw.uniform(0.1, 3.0)),
            epsilon=float(draw.uniform(0.3, 10.0)),
            neighbours=float(size - 1),
            tau2=float(draw.uniform(0.0, 0.05)),
            participations=int(draw.integers(1, 40)),
            mode="repair",
        )
        terms = terms_of(plan, size, coordinates=1)
        alone = terms.residual_variance + terms.self_variance
        assert terms.clip / size / math.sqrt(alone) <= wanted_mu(plan)


def test_a_given_distortion_is_taken_as_it_is() -> None:
    plan = Plan(tau2=0.25, neighbours=5.0, kappa=2.0)
    terms = terms_of(plan, 10)
    assert terms.residual_variance == pytest.approx(0.25 * terms.unit_variance * 5.0)
    own = (plan.clip / 10 / wanted_mu(plan)) ** 2
    assert terms.unit_variance == pytest.approx(2.0 * own / 5.0)
    assert math.isfinite(DrawnAccount()(agree(Federation(10, "given").open(terms)), 0))


def test_terms_of_a_plan_for_records_follow_its_batch_and_cost_what_it_says() -> None:
    """The divisor is the planned batch of all silos, whoever takes part, and a record's entries are some steps long."""
    plan = Plan(
        **{"unit": "record", "batch": 0.5, "records": 400, "clip": 0.5, "epsilon": 4.0, "participations": 2},
        **{"neighbours": 9.0, "graph": "complete", "kappa": 4.0},
    )
    terms = make_terms(plan, participants=10, coordinates=4000, run=b"run", number=0)
    assert terms.records == RecordTerms(0.5, 200.0)
    assert terms.divisor(10) == terms.divisor(7) == 200.0
    assert terms.clip / 200.0 / math.sqrt(4000) * 2**terms.grid_bits >= 4.0
    own = (0.5 / 200.0 / wanted_mu(plan)) ** 2
    assert terms.neighbours * terms.unit_variance == pytest.approx(4.0 * own)
    assert own / 10.0 < terms.residual_variance < own


@pytest.mark.parametrize(
    ("make", "plan", "match"),
    [
        (terms_of, Plan(method="dp-fedavg"), "the protocol runs niss"),
        (terms_of, Plan(unit="nbafl", tau2=0.5), "the protocol runs niss"),
        (terms_of, Plan(epsilon=(1.0, 2.0)), "one target for all"),
        (terms_of, Plan(tau2=(0.1, 0.2)), "one tau2 for all"),
        (terms_of, run_plan(size=10), "follow from its schedule"),
        (schedule_of, Plan(clip=1.0, epsilon=3.0), "carries noise over"),
        (partial(terms_of, grid_bits=3), Plan(neighbours=9.0), "too narrow"),
        (partial(schedule_of, grid_bits=3), run_plan(), "too narrow"),
        (partial(schedule_of, grid_bits=2), run_plan(), "too narrow"),
    ],
)
def test_plans_and_grids_the_protocol_cannot_run_are_refused(
    make: Callable[..., object], plan: Plan, match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        make(plan, plan.participants or 10)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["tolerate", "repair"])
@pytest.mark.parametrize(
    ("size", "neighbours", "collusion"), [(100, 20.0, 0.1), (200, 30.0, 0.1), (100, 20.0, 0.0)]
)
def test_many_drawn_graphs_keep_the_promise(
    size: int, neighbours: float, collusion: float, mode: str
) -> None:
    """The margin over a few graphs covers twenty others."""
    dropout = 0.01 if mode == "repair" else 0.0
    planned = forecast(
        participants=size, neighbours=neighbours, collusion=collusion, mode=mode, dropout=dropout
    )
    terms = terms_of(planned.plan, size)
    assess = DrawnAccount(failure=planned.plan.failure)
    costs = []
    for draw in range(20):
        federation = Federation(size, f"many {draw}")
        costs.append(assess(agree(federation.open(terms)), planned.plan.assumed(size).colluders))
    assert max(costs) <= wanted_mu(planned.plan)


@pytest.mark.parametrize(("epsilon", "coordinates"), [(8.0, 1_000), (3.0, 200_000), (1.0, 2_000_000)])
def test_the_grid_is_fine_enough_for_noise_and_update(epsilon: float, coordinates: int) -> None:
    plan = Plan(clip=1.0, epsilon=epsilon, kappa=10.0, neighbours=10.0, participations=10)
    terms = terms_of(plan, 200, coordinates=coordinates)
    step = 2.0**-terms.grid_bits
    entry = 1.0 / (200 * math.sqrt(coordinates))
    assert math.sqrt(terms.residual_variance) >= 256 * step
    assert entry >= step
    # One bit less would not do.
    assert min(math.sqrt(terms.residual_variance) / 256, entry) < 2 * step


LARGE = [
    (size, neighbours, epsilon, participations, mode)
    for size, neighbours in ((10, 9.0), (100, 30.0))
    for epsilon, participations in ((1.0, 1), (8.0, 1), (3.0, 100))
    for mode in ("tolerate", "repair")
]


@pytest.mark.parametrize("kappa", [0.25, 100.0])
@pytest.mark.parametrize("coordinates", [10, 10_000_000])
def test_clients_accept_the_grid_of_every_plan(coordinates: int, kappa: float) -> None:
    """Also of the largest models and the widest shares, where the grid used to be finest."""
    for size, neighbours, epsilon, participations, mode in LARGE:
        plan = Plan(
            clip=1.0,
            epsilon=epsilon,
            participations=participations,
            kappa=kappa,
            neighbours=neighbours,
            graph="complete" if neighbours == size - 1 else "regular",
            mode=mode,
        )
        terms = terms_of(plan, size, coordinates=coordinates)
        federation = Federation(size, "large")
        mu = DrawnAccount(promise=Promise.of(plan))(agree(federation.open(terms)), 0)
        assert mu <= wanted_mu(plan)
        assert math.sqrt(terms.residual_variance) * 2.0**terms.grid_bits >= 16.0


@pytest.mark.parametrize(
    ("size", "rounds", "coordinates"),
    [(6, 9, 10), (6, 9, 100_000), (6, 100, 100), (100, 100, 2_000_000), (400, 100, 1_000)],
)
def test_clients_accept_the_grid_of_every_run(size: int, rounds: int, coordinates: int) -> None:
    """Of many clients each carries a narrow share to everyone: it has to be some steps wide too.

    All rounds together, however often a client takes part, stay within the grid's part of delta.
    """
    plan = run_plan(size, rounds, 3 if rounds == 9 else 10)
    made, promise = schedule_of(plan, size, coordinates), Promise.of(plan)
    cost = run_grid_delta(made, promise)
    assert 0.0 < cost <= plan.grid_delta
    assert run_grid_delta(replace(made, rounds=10 * rounds), promise) > cost
    account = CommittedAccount(made, promise=promise)
    for number in (0, 1, rounds - 1):
        check_run_discretisation(account.schedule, math.sqrt(account.cost(number)), account._promise)
    coarser = CommittedAccount(replace(made, grid_bits=made.grid_bits - 8), promise=promise)
    with pytest.raises(RemoteProtocolError, match="a few grid steps wide"):
        check_run_discretisation(coarser.schedule, 0.1, coarser._promise)


def test_a_committee_is_paid_for_in_delta_unless_everyone_is_in_it() -> None:
    everyone = Plan(collusion=0.1, graph="complete", neighbours=29.0, mode="repair", participations=4)
    assert everyone.assumed(30).committee == 30
    assert everyone.failure == everyone.failing_delta == 0.0
    # On a sparse graph the two bounds share what one had.
    sparse = replace(everyone, graph="regular", neighbours=12.0)
    assert 10 <= sparse.assumed(100).committee < 100
    assert sparse.failing_delta == replace(sparse, mode="tolerate").failing_delta
    assert sparse.failing_delta == pytest.approx(0.1 * sparse.delta)
    assert sparse.gaussian_delta < everyone.gaussian_delta
    assert sparse.assumed(100).failure == pytest.approx(0.5 * sparse.failure)
    assert replace(sparse, mode="tolerate").assumed(100).failure == sparse.failure
    assert replace(sparse, collusion=0.0).failure == 0.0


@pytest.mark.parametrize("collusion", [0.0, 0.1, 0.2])
def test_a_planned_committee_is_accepted_by_the_clients_it_was_planned_for(collusion: float) -> None:
    plan = forecast(participants=40, mode="repair", dropout=0.05, collusion=collusion, kappa=4.0).plan
    colluders = plan.assumed(40).colluders
    terms = terms_of(plan, 40)
    agreed = agree(Federation(40, "planned").open(terms))
    assess = DrawnAccount(failure=plan.failure)
    assert assess(agreed, colluders) <= wanted_mu(plan)
    with pytest.raises(RemoteProtocolError, match="members of the committee"):
        assess(agreed, colluders + 6)


def test_a_carried_round_that_no_client_would_accept_is_not_proposed() -> None:
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
