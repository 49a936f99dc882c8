"""Uniform masks: what a plan promises and costs, what a client is charged, and stories that a server may tell."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from niss.accounting import Assessor, Ledger, LedgerFile, Plan, Promise, charge_to, forecast, make_terms
from niss.accounting.discretisation import Draws, grid_delta
from niss.accounting.protocol_rounds import upload_mu
from niss.accounting.statement import make_statement
from niss.errors import ConfigError, PrivacyError, RemoteProtocolError
from niss.mechanism.grid import aliasing_distance
from niss.protocol.agreement import Agreed, agree
from support.protocol_round import Federation

ROUND = {"coordinates": 3, "run": b"run", "number": 1, "mode": "repair"}


def allowed(plan: Plan) -> float:
    return float(plan.round_mu(np.zeros(1, dtype=np.int64))[0])


def drawn(plan: Plan, size: int, label: str = "masks", **changes: Any) -> Agreed:
    """A round under the terms of the plan, with some of them changed by its server."""
    terms = make_terms(plan, participants=size, **ROUND)
    federation = Federation(size, label)
    return agree(federation.open(replace(terms, **changes)))


@pytest.mark.parametrize(("size", "collusion"), [(10, 0.0), (30, 0.2), (30, 0.5), (100, 0.2), (1000, 0.1)])
def test_the_noise_in_the_sum_is_that_of_ideal_secure_aggregation(size: int, collusion: float) -> None:
    planned = forecast(participants=size, collusion=collusion, mode="repair", shares="uniform")
    assert planned.aggregate_variance_ratio_to_central == pytest.approx(1.0 / (1.0 - collusion), rel=1e-12)
    assert planned.epsilon_joint == pytest.approx(3.0)
    assert planned.epsilon_marginal == 0.0
    gaussian = forecast(participants=size, collusion=collusion, mode="repair")
    assert gaussian.aggregate_variance_ratio_to_central > planned.aggregate_variance_ratio_to_central


def test_those_who_may_be_called_dropped_are_paid_for() -> None:
    planned = forecast(participants=100, collusion=0.2, dropout=0.05, mode="repair", shares="uniform")
    plan = planned.plan
    assert plan.dropped > 5
    expected = 0.95 * 100 / (100 - 20 - max(plan.dropped, plan.revealed))
    assert planned.aggregate_variance_ratio_to_central == pytest.approx(expected)
    assert any("is void" in note for note in planned.notes)


def test_the_forecast_is_json_without_infinities() -> None:
    planned = forecast(participants=30, mode="repair", shares="uniform")
    values = json.loads(json.dumps(planned.to_json(), allow_nan=False))
    assert (values["kappa"], values["tau2"], values["curve"]) == (None, None, [])
    assert values["plan"]["shares"] == "uniform"


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"mode": "tolerate"}, "mode"),
        ({"kappa": 4.0}, "kappa"),
        ({"tau2": 0.1}, "tau2"),
        ({"search": True}, "search"),
        ({"shares": "round"}, "shares"),
    ],
)
def test_what_masks_cannot_have_is_refused(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        forecast(**{"participants": 30, "mode": "repair", "shares": "uniform", **settings})
    assert refused.value.field == field


def test_a_plan_that_distorts_or_leaves_somebody_out_is_refused() -> None:
    for settings in ({"tau2": 0.1}, {"graph": "random"}, {"method": "niss-carried", "graph": "complete"}):
        with pytest.raises(ConfigError, match="uniform"):
            Plan(shares="uniform", **settings)  # type: ignore[arg-type]
    # Methods that share nothing do not mind.
    assert not Plan(method="dp-fedavg", shares="uniform").uniform


def test_a_sparse_graph_that_cannot_be_shown_to_be_connected_is_refused() -> None:
    with pytest.raises(PrivacyError, match="cut a client off"):
        forecast(participants=200, neighbours=5, collusion=0.4, mode="repair", shares="uniform")
    plan = Plan(shares="uniform", neighbours=5, colluders=80, clip=1.0)
    with pytest.raises(PrivacyError, match="cut a client off"):
        make_terms(plan, participants=200, **ROUND)
    with pytest.raises(PrivacyError, match="cut a client off"):
        plan.for_round(range(200), weights=1 / 200, records=1.0, beacon=bytes(32))


@pytest.mark.parametrize("relation", ["zero-out", "replace-one"])
@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (12, {}),
        (12, {"collusion": 0.25, "dropout": 0.02}),
        (120, {"neighbours": 30.0, "collusion": 0.05, "dropout": 0.01}),
    ],
)
def test_clients_accept_what_the_plan_promised(size: int, settings: dict[str, Any], relation: str) -> None:
    plan = forecast(
        participants=size, mode="repair", shares="uniform", clip=1.0, relation=relation, **settings
    ).plan
    assess = Assessor(relation=relation, failure=plan.corruption.failure, promise=Promise.of(plan))
    agreed = drawn(plan, size)
    assert agreed.terms.uniform
    assert agreed.terms.self_variance == math.inf
    mu = assess(agreed, plan.colluders)
    assert mu <= allowed(plan)
    assert mu == pytest.approx(allowed(plan), rel=1e-6)


def test_the_charge_is_the_limit_of_that_for_strong_gaussian_shares() -> None:
    """The same residual noise under Gaussian shares a million times as strong, self-mask included."""
    plan = forecast(participants=12, collusion=0.2, dropout=0.02, mode="repair", shares="uniform").plan
    endless = drawn(plan, 12)
    strong = 1e6 * endless.terms.residual_variance
    # A coarser grid, since the sampler draws at most 2^30 steps; the client's own limits on it are another matter.
    terms = replace(endless.terms, unit_variance=strong, self_variance=strong)
    federation = Federation(12, "limit")
    gaussian = agree(federation.open(terms))
    loose = Promise(epsilon=1.0, delta=0.5)
    one, other = (Assessor(promise=loose)(agreed, plan.colluders) for agreed in (endless, gaussian))
    assert one == pytest.approx(other, rel=1e-4)


def test_no_story_that_a_server_may_tell_leaves_less_than_was_charged() -> None:
    """Brute force: every set of clients that the caps let it call dropped, every pair of colluders among the others.

    The sum of each connected group of honest survivors is all it learns of them; the smallest group decides.
    """
    size = 10
    plan = Plan(shares="uniform", neighbours=2, colluders=1, dropped=2, revealed=2, clip=1.0, epsilon=8.0)
    for label in ("first", "second", "third"):
        agreed = drawn(plan, size, label)
        near = [set(agreed.neighbours(seat)) for seat in range(size)]
        least = size
        for count in range(plan.dropped + 1):
            for gone in itertools.combinations(range(size), count):
                here = set(range(size)) - set(gone)
                if max(len(near[seat] & set(gone)) for seat in here) > plan.revealed:
                    continue
                for colluder in here:
                    least = min(least, smallest_group(near, here - {colluder}))
        charged = Assessor()(agreed, plan.colluders)
        left = (1.0 / size / charged) ** 2
        assert left <= least * agreed.terms.residual_variance * (1.0 + 1e-9)
        assert left == pytest.approx(least * agreed.terms.residual_variance)


def smallest_group(near: list[set[int]], clients: set[int]) -> int:
    sizes, rest = [], set(clients)
    while rest:
        group = edge = {rest.pop()}
        while edge:
            edge = set().union(*(near[one] for one in edge)) & rest
            group, rest = group | edge, rest - edge
        sizes.append(len(group))
    return min(sizes)


def test_a_client_refuses_a_graph_on_which_it_may_be_cut_off() -> None:
    plan = Plan(shares="uniform", neighbours=30, colluders=6, clip=1.0)
    agreed = drawn(plan, 120)
    assert Assessor(failure=plan.corruption.failure)(agreed, 6) < math.inf
    with pytest.raises(RemoteProtocolError, match="cut off from the others"):
        Assessor(failure=plan.corruption.failure)(drawn(plan, 120, neighbours=6.0), 6)


def test_residual_noise_too_narrow_for_the_grid_counts_alone() -> None:
    plan = forecast(participants=12, mode="repair", shares="uniform", clip=1.0).plan
    agreed = drawn(plan, 12)
    steps = agreed.grid.deviation_steps(agreed.terms.residual_variance)
    narrow = drawn(plan, 12, grid_bits=agreed.terms.grid_bits - math.ceil(math.log2(steps)) + 1)
    loose = Assessor(promise=Promise(epsilon=1.0, delta=0.5))
    assert loose(narrow, 0) == pytest.approx(math.sqrt(12) * loose(agreed, 0))


def test_the_grid_is_paid_for_by_the_residual_noise_alone() -> None:
    plan = forecast(participants=30, mode="repair", shares="uniform", clip=1.0).plan
    terms = make_terms(plan, participants=30, **{**ROUND, "coordinates": 10_000})
    draws = Draws.of(terms, 30, [1.0], [30 * 29])
    residual = agreed_steps = float(draws.steps[0])
    assert draws.steps.size == 1
    assert draws.counts.sum() == 30 * 10_000
    assert draws.aliasing == 30 * 10_000 * aliasing_distance(residual, agreed_steps)
    assert 0.0 < grid_delta(plan, terms, 30) <= plan.grid_delta


def test_nothing_is_made_for_rounds_that_tolerate_dropouts() -> None:
    plan = Plan(shares="uniform", neighbours=5, clip=1.0)
    with pytest.raises(ConfigError, match="no sum after a dropout"):
        make_terms(plan, participants=8, **{**ROUND, "mode": "tolerate"})


def test_an_upload_alone_shows_nothing_and_a_ledger_takes_that(tmp_path: Any) -> None:
    plan = forecast(participants=12, mode="repair", shares="uniform", clip=1.0).plan
    agreed = drawn(plan, 12)
    assert upload_mu(agreed.terms, 12, "zero-out") == 0.0
    promise = Promise.of(plan)
    mu = Assessor(promise=promise)(agreed, 0)
    path = tmp_path / "ledger.jsonl"
    with LedgerFile.create(path, run="run", delta=1e-5, unit="client", relation="zero-out") as ledger:
        charge_to(ledger, "client", relation="zero-out", promise=promise)(agreed, mu)
    (entry,) = LedgerFile.read(path).entries
    assert entry.basis["shares"] == "uniform"
    assert tuple(entry.mus["client"]) == (mu, 0.0)


def test_the_statement_says_that_rounds_may_be_void() -> None:
    plan = forecast(participants=12, mode="repair", shares="uniform", clip=1.0).plan
    ledger = Ledger.empty(12)
    ledger.charge(np.arange(12), np.full(12, allowed(plan)), np.zeros(12))
    statement = make_statement(plan, ledger)
    assert statement.epsilon_joint == pytest.approx(3.0, abs=0.1)
    assert statement.epsilon_marginal == 0.0
    assert any("uniform masks" in caveat and "is void" in caveat for caveat in statement.caveats)
    assert not any(
        "void" in caveat for caveat in make_statement(replace(plan, shares="gaussian"), ledger).caveats
    )
