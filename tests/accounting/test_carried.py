"""Plans for carried shares: the design's figures, what is promised on real graphs, and that nothing flatters."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niss.accounting import Plan
from niss.accounting.carried import COMPLETE, CarriedPlan, Connectivity, drawn_connectivity
from niss.accounting.carried_planner import plan_carried
from niss.accounting.trusted_noise import banded_noise, best_noise, independent_noise
from niss.errors import ConfigError, PrivacyError
from niss.graph import CarriedGraph, ShareGraph
from niss.mechanism import gdp_mu
from niss.views import CarriedRound, CarriedRun, RunKnowledge, run_mu2

STRONG = 1e7


def ratios(rounds, separation, participants=100, **settings_):
    made = plan_carried(
        participants=participants, clients=participants * separation, rounds=rounds, **settings_
    )
    return made.model_variance_ratio_to_central_mean, made.model_variance_ratio_to_central_final


# Mean over rounds and final model, relative to a trusted server with independent noise; two figures each.
@pytest.mark.parametrize(
    ("rounds", "separation", "mean", "final"),
    [(30, 5, 0.383, 0.29), (100, 10, 0.203, 0.148), (100, 34, 0.18, 0.10), (300, 10, 0.153, 0.125)],
)
def test_strong_shares_within_a_round(rounds, separation, mean, final):
    assert ratios(rounds, separation, kappa=STRONG) == pytest.approx((mean, final), rel=0.02)


def test_twice_the_residual_at_the_ends_and_a_separation_of_two():
    assert ratios(30, 5, kappa=STRONG, ends=2.0)[0] == pytest.approx(0.374, rel=0.01)
    assert ratios(30, 2, kappa=STRONG)[0] == pytest.approx(0.63, rel=0.01)


# An upload's shares have ten times the variance that a client would need alone: sent and received, kappa = 5.
@pytest.mark.parametrize(
    ("rounds", "separation", "cyclic", "at_least", "closed"),
    [
        (30, 5, (0.425, 0.322), (0.454, 0.344), (0.427, 0.332)),
        (100, 10, (0.226, 0.165), (0.239, 0.174), (0.226, 0.166)),
        (100, 34, (0.202, 0.109), (0.245, 0.133), (0.202, 0.110)),
        pytest.param(300, 10, (0.170, 0.139), (0.173, 0.141), (0.170, 0.139), marks=pytest.mark.slow),
    ],
)
def test_a_hundred_a_round_by_what_is_promised(rounds, separation, cyclic, at_least, closed):
    assert ratios(rounds, separation, kappa=5.0) == pytest.approx(cyclic, rel=0.02)
    assert ratios(rounds, separation, kappa=5.0, pattern="any") == pytest.approx(at_least, rel=0.02)
    assert ratios(rounds, separation, kappa=5.0, closing=True) == pytest.approx(closed, rel=0.02)


@pytest.mark.parametrize(
    ("dropout", "fixed", "mean", "ratio"),
    [(0.01, 0.28, 0.275, 12.4), (0.05, 0.50, 0.40, 5.8), (0.1, 0.75, 0.48, 3.5), (0.2, 1.16, 0.57, 1.7)],
)
def test_dropouts_stay_in_the_model_and_less_is_carried(dropout, fixed, mean, ratio):
    settings_ = {
        "participants": 100,
        "clients": 1000,
        "rounds": 100,
        "kappa": 5.0,
        "dropout": dropout,
        "mode": "repair",
        "declared_dropped": 0,
    }
    unplanned = plan_carried(**settings_, carried_to_residual=18.9)
    assert unplanned.model_variance_ratio_to_central_mean == pytest.approx(fixed, rel=0.02)
    planned = plan_carried(**settings_)
    assert planned.model_variance_ratio_to_central_mean == pytest.approx(mean, rel=0.02)
    assert planned.carried_to_residual == pytest.approx(ratio, rel=0.05)


@pytest.mark.parametrize(("lags", "mean", "final"), [(1, 0.18, 0.10), (3, 0.15, 0.08), (8, 0.145, 0.075)])
def test_more_lags_pay_for_long_separations(lags, mean, final):
    """To two per cent, or to the two figures that are known of it."""
    found = ratios(100, 34, kappa=STRONG, lags=lags)
    assert found[0] == pytest.approx(mean, rel=0.02)
    assert found[1] == pytest.approx(final, rel=0.02)


@pytest.mark.parametrize(
    ("rounds", "separation", "mean", "final"),
    [
        (30, 5, 0.466, 0.354),
        (100, 10, 0.242, 0.177),
        (100, 34, 0.247, 0.134),
        pytest.param(300, 10, 0.175, 0.143, marks=pytest.mark.slow),
    ],
)
def test_what_it_would_cost_not_to_commit_to_the_end(rounds, separation, mean, final):
    """Any round that leaves room for all participations may turn out to be the last, and carry nothing on.

    The dearest end is the first of them: participations then touch both ends of the run, and are no further apart than
    they must be. Ends before that have fewer participations, and still cost more where clients stay away for long.
    """
    made = plan_carried(participants=100, clients=100 * separation, rounds=rounds, kappa=5.0)
    budget, plan = gdp_mu(3.0, 1e-5) ** 2, made.plan
    soonest = (rounds - 1) // separation * separation + 1
    for _ in range(6):
        costs = [replace(plan, horizon=end).worst.cost for end in range(soonest, rounds + 1)]
        plan = replace(plan, residual=plan.residual * max(costs) / budget)
    assert max(costs) == costs[0]
    assert max(costs) == pytest.approx(budget, rel=1e-3)
    noise, central = plan.noise_in_model(), np.array(made.noise_central)
    assert noise.mean() / central.mean() == pytest.approx(mean, rel=0.02)
    assert noise[-1] / central[-1] == pytest.approx(final, rel=0.02)
    alone = replace(plan, horizon=1).worst.cost
    assert (alone > budget) == (separation == 34)


def test_trusted_servers():
    for rounds, separation, banded, best in ((30, 5, 0.34, 0.30), (100, 10, 0.18, 0.15)):
        factors = np.ones(rounds)
        central = independent_noise(factors, separation).mean()
        assert banded_noise(factors, separation).mean() / central == pytest.approx(banded, rel=0.02)
        assert best_noise(factors, separation).mean() / central == pytest.approx(best, rel=0.02)


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 14), st.integers(1, 6), st.integers(0, 2**32))
def test_nothing_beats_the_best_correlated_noise(rounds, separation, seed):
    """Any covariance that a trusted server might use, scaled to mu = 1 by its true worst client, leaves more."""
    rng = np.random.default_rng(seed)
    factors = rng.uniform(0.5, 1.5, rounds)
    best = best_noise(factors, separation).mean()
    root = np.tril(rng.uniform(0.0, 1.0, (rounds, rounds))) + np.eye(rounds)
    for inverse in (root.T @ root, np.eye(rounds)):
        cohorts = [np.arange(first, rounds, separation) for first in range(min(separation, rounds))]
        cost = max(inverse[np.ix_(places, places)].sum() for places in cohorts)
        sums = np.tril(np.ones((rounds, rounds))) * factors
        noise = np.trace(sums @ np.linalg.inv(inverse) @ sums.T) / rounds * cost
        assert best <= noise * (1 + 1e-9)
    assert best <= banded_noise(factors, separation).mean() * (1 + 1e-9)


def test_a_separation_of_one_gains_nothing_and_says_so():
    made = plan_carried(participants=50, clients=50, rounds=20)
    assert made.carried_to_residual == 0.0
    assert made.model_variance_ratio_to_central_mean > 1.0
    assert any("every round" in note for note in made.notes)
    wasted = plan_carried(
        participants=100, clients=1000, rounds=100, kappa=5.0, dropout=0.2, carried_to_residual=18.9
    )
    assert any("less than 2 %" in note for note in wasted.notes)


def test_the_forecast_is_json_and_keeps_the_promise():
    made = plan_carried(
        participants=40, clients=400, rounds=50, epsilon=2.0, sensitivity=0.3, collusion=0.2, pattern="any"
    )
    values = json.loads(json.dumps(made.to_json()))
    for name in (
        "separation",
        "carried_to_residual",
        "model_variance_ratio_to_central_mean",
        "model_variance_ratio_to_central_final",
        "model_variance_ratio_to_best",
    ):
        assert values[name] == getattr(made, name)
    assert {len(made.noise), len(made.noise_central), len(made.noise_banded), len(made.noise_best)} == {50}
    assert np.mean(made.noise) / np.mean(made.noise_best) == pytest.approx(made.model_variance_ratio_to_best)
    assert (made.clients, made.epsilon, made.participations, made.mode) == (400, 2.0, 5, "tolerate")
    assert made.mu <= gdp_mu(2.0, 1e-5) <= made.mu * (1 + 1e-9)
    assert made.plan.colluders == 8
    assert made.model_variance_ratio_to_best > 1.0
    account = made.plan.charges()
    for number in made.plan.worst.rounds:
        account.charge(number)
    assert math.sqrt(account.spent) == pytest.approx(made.mu, rel=1e-9)


def run_of(plan: CarriedPlan, *, degree=None, outgoing=None) -> CarriedRun:
    """The run that a plan describes, on real graphs: cohorts that take turns."""
    m, rounds = plan.participants, []
    for number in range(plan.rounds):
        first = number % plan.separation * m
        beacon = b"round %d" % number
        shares = (
            ShareGraph.complete(m) if degree is None else ShareGraph.regular(m, degree=degree, beacon=beacon)
        )
        onward = []
        for lag, row in enumerate(plan.carried, start=1):
            if row[number]:
                if outgoing is None:
                    graph = CarriedGraph.complete((m, m), lag=lag)
                else:
                    graph = CarriedGraph.draw(
                        (m, m), degree=outgoing, beacon=beacon, lists=(bytes(32),) * 2, lag=lag
                    )
                onward.append((graph, row[number] / graph.weights.sum()))
        rounds.append(
            CarriedRound(
                tuple(range(first, first + m)),
                shares,
                plan.spatial / (2.0 * shares.out_weight[0]),
                plan.residuals[number] / m,
                tuple(onward),
                plan.scales[number] if plan.rescaled else 1.0,
            )
        )
    return CarriedRun(tuple(rounds))


def in_every_cohort(plan, places):
    return [cohort * plan.participants + place for cohort in range(plan.separation) for place in places]


@pytest.mark.parametrize("rescaled", [False, True])
@pytest.mark.parametrize("colluders", [0, 2])
@pytest.mark.parametrize("lags", [1, 2])
def test_a_plan_promises_what_its_run_on_complete_graphs_gives(rescaled, colluders, lags):
    plan = CarriedPlan(
        participants=6,
        horizon=9,
        separation=3,
        residual=0.4,
        carried_to_residual=(4.0, 1.5)[:lags],
        spatial=3.0,
        ends=2.0,
        factors=tuple(np.linspace(1.5, 0.5, 9).tolist()),
        rescaled=rescaled,
        colluders=colluders,
        sensitivity=0.7,
    )
    known = RunKnowledge(in_every_cohort(plan, range(colluders)))
    exact = run_mu2(run_of(plan), known, sensitivity=0.7)
    assert plan.worst.cost == pytest.approx(max(exact.values()), rel=1e-10)


@pytest.mark.parametrize("colluders", [0, 2, 4])
@pytest.mark.parametrize("spatial", [0.01, 0.3, 8.0])
def test_sparse_plans_never_promise_more_than_their_run(colluders, spatial):
    m = 24
    plan = CarriedPlan(
        participants=m,
        horizon=10,
        separation=2,
        residual=0.4,
        carried_to_residual=(5.0,),
        spatial=spatial,
        colluders=colluders,
        connectivity=drawn_connectivity(m, neighbours=8, carried=5, known_neighbours=colluders),
    )
    rng = np.random.default_rng(11)
    run = run_of(plan, degree=8, outgoing=5)
    # The floor of the plan must be one of these very graphs.
    lists = (bytes(32),) * 2
    worst = [drawn_connectivity(m, neighbours=8, carried=5, known_neighbours=colluders)]
    for number in range(plan.rounds):
        graph = CarriedGraph.draw((m, m), degree=5, beacon=b"round %d" % number, lists=lists).matrix() / 5
        laplacian = ShareGraph.regular(m, degree=8, beacon=b"round %d" % number).laplacian()
        values = np.linalg.eigvalsh(laplacian - 1e3 * np.ones((m, m)))
        within = max(float(values[1]) - colluders * float(-laplacian.min()), 0.0) / 16
        worst.append(Connectivity(within, float(np.linalg.norm(graph - 1 / m, 2))))
    floor = Connectivity(min(w.spatial for w in worst), max(w.carried for w in worst))
    plan = replace(plan, connectivity=floor)
    for _ in range(6):
        places = [rng.permutation(m)[:colluders] for _ in range(2)]
        known = [cohort * m + int(place) for cohort in range(2) for place in places[cohort]]
        exact = run_mu2(run, RunKnowledge(known))
        assert max(exact.values()) <= plan.worst.cost * (1 + 1e-10)


def test_the_sparse_draw_of_the_design():
    """40 a round, 20 rounds, separation 5, 10 and 6 edges, ten times the local noise in the shares; one draw."""
    participants, separation, rounds, ratio, participations = 40, 5, 20, 4.0, 4
    for share, wanted in ((0.0, 0.49), (0.1, 0.57), (0.2, 0.67), (0.3, 0.87)):
        everyone = np.random.default_rng(1).permutation(participants * separation)
        known = RunKnowledge(everyone[: round(share * everyone.size)].tolist())
        plan = CarriedPlan(
            participants=participants,
            horizon=rounds,
            separation=separation,
            residual=1.0,
            carried_to_residual=(ratio,),
            spatial=10.0 * participations,
        )
        low, high = 1.0, 5.0
        for _ in range(10):
            middle = math.sqrt(low * high)
            fitted = replace(plan, residual=middle)
            worst = max(run_mu2(run_of(fitted, degree=10, outgoing=6), known).values())
            low, high = (middle, high) if worst > 1.0 else (low, middle)
        noise = replace(plan, residual=high).noise_in_model()
        central = independent_noise(np.ones(rounds), separation)
        assert noise.mean() / central.mean() == pytest.approx(wanted, rel=0.1)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(3, 12),
    st.integers(2, 14),
    st.integers(1, 5),
    st.floats(0.0, 30.0),
    st.floats(0.0, 10.0),
    st.floats(0.0, 0.4),
    st.sampled_from([None, 0.3]),
)
def test_less_trust_never_gives_a_better_claim(
    participants, horizon, separation, ratio, spatial, revealed, second
):
    plan = CarriedPlan(
        participants=participants,
        horizon=horizon,
        separation=separation,
        residual=0.5,
        carried_to_residual=(ratio,),
        spatial=spatial,
        pattern="any",
        connectivity=Connectivity(None if second is None else 0.2, second),
    )
    here = plan.worst.cost * (1 - 1e-9)
    assert replace(plan, colluders=1).worst.cost >= here
    assert replace(plan, declared_dropped=2).worst.cost >= replace(plan, colluders=1).worst.cost * (1 - 1e-9)
    assert replace(plan, revealed=revealed).worst.cost >= here
    if separation > 1:
        assert replace(plan, separation=separation - 1).worst.cost >= here
    assert replace(plan, pattern="cyclic").worst.cost <= here * (1 + 1e-8)


def test_noise_in_the_model_equals_a_simulation_of_the_sums():
    """Every share drawn, added and taken out: the variance of a linear map, computed column by column."""
    factors = (1.0, 0.8, 0.9, 0.5)
    plan = CarriedPlan(
        participants=3,
        horizon=4,
        separation=2,
        residual=0.5,
        carried_to_residual=(3.0, 1.0),
        spatial=1.0,
        factors=factors,
    )
    for rescaled in (False, True):
        plan = replace(plan, rescaled=rescaled)
        columns = [
            np.sqrt(r) * a * (np.arange(4) >= t)
            for t, (r, a) in enumerate(zip(plan.residuals, factors, strict=True))
        ]
        for lag in (1, 2):
            for start in range(4 - lag):
                taken = factors[start] if rescaled else factors[start + lag]
                column = factors[start] * (np.arange(4) >= start) - taken * (np.arange(4) >= start + lag)
                columns.append(math.sqrt(plan.carried[lag - 1, start]) * column)
        np.testing.assert_allclose(plan.noise_in_model(), np.sum(np.square(columns), axis=0), rtol=1e-12)


@pytest.mark.parametrize(("rescaled", "declared"), [(False, 0), (False, 1), (True, 1), (True, 2)])
def test_what_dropouts_leave_is_the_mean_over_all_of_them(rescaled, declared):
    """Every pattern of dropouts in every round, each share added or not, taken out or not, by the rules of a repair."""
    m, rounds, dropout = 3, 3, 0.3
    plan = CarriedPlan(
        participants=m,
        horizon=rounds,
        separation=2,
        residual=0.5,
        carried_to_residual=(3.0, 1.0),
        spatial=1.0,
        factors=(1.0, 0.8, 0.5),
        rescaled=rescaled,
        declared_dropped=declared,
    )
    a, expected = plan.scales, np.zeros(rounds)
    for pattern in itertools.product((False, True), repeat=m * rounds):
        lost = np.array(pattern).reshape(rounds, m)
        counts = lost.sum(axis=1)
        repaired = counts <= declared
        noise = np.zeros(rounds)
        for t in range(rounds):
            here = np.arange(rounds) >= t
            noise += here * a[t] ** 2 * (m - counts[t]) / m * plan.residuals[t]
            if declared and not repaired[t]:
                noise += here * a[t] ** 2 * counts[t] * (m - counts[t]) * plan.spatial / (m - 1)
            for lag, row in enumerate(plan.carried[:, t], start=1):
                if not row:
                    continue
                for sender, receiver in itertools.product(lost[t], lost[t + lag]):
                    added = a[t] * here * (not sender)
                    # A share of a lost sender is not taken out where that was repaired; one to a lost receiver is.
                    out = not (sender and repaired[t]) and not (receiver and not repaired[t + lag])
                    factor = a[t] if rescaled else a[t + lag]
                    taken = factor * (np.arange(rounds) >= t + lag) * out
                    noise += row / m**2 * (added - taken) ** 2
        expected += dropout ** counts.sum() * (1 - dropout) ** (m * rounds - counts.sum()) * noise
    np.testing.assert_allclose(plan.noise_in_model(dropout), expected, rtol=1e-12)


def test_planner_and_simulator_plan_the_same_noise_for_dropouts():
    """Whoever is called dropped counts like a colluder, with all its shares: what they carried is taken out as well."""
    asked = {"participants": 100, "rounds": 100, "epsilon": 3.0, "delta": 1e-5, "kappa": 20.0}
    planned = plan_carried(clients=1000, dropout=0.1, mode="repair", **asked)
    run = Plan(
        method="niss-carried",
        graph="complete",
        horizon=100,
        separation=10,
        participations=10,
        kappa=20.0,
        participants=100,
        dropout=0.1,
        dropped=planned.plan.declared_dropped,
        revealed=planned.plan.declared_dropped,
    ).committed(100)
    assert run.promise == planned.plan
    np.testing.assert_allclose(run.promise.noise_in_model(0.1), planned.noise, rtol=1e-12)
    assert planned.model_variance_ratio_to_central_mean == pytest.approx(0.28, abs=0.01)
    assert not any("leave it in the model" in note for note in planned.notes)


def test_repairs_are_charged():
    settings_ = {
        "participants": 60,
        "clients": 600,
        "rounds": 40,
        "kappa": 10.0,
        "dropout": 0.05,
        "mode": "repair",
    }
    careful = plan_carried(**settings_)
    assert careful.plan.declared_dropped > 3
    careless = plan_carried(**settings_, declared_dropped=0)
    assert careful.plan.residual > careless.plan.residual


@pytest.mark.parametrize(
    "changes",
    [
        {"separation": 11},
        {"separation": 0},
        {"pattern": "poisson"},
        {"mode": "hope"},
        {"goal": "best"},
        {"lags": 0},
        {"collusion": 1.0},
        {"clients": 50},
        {"clients": 1050},
        {"rounds": 0},
        {"kappa": 0.0},
        {"epsilon": float("nan")},
        {"factors": (1.0, 2.0)},
        {"revealed": 1.0},
    ],
)
def test_bad_settings_are_refused(changes):
    with pytest.raises(ConfigError) as refused:
        plan_carried(**{"participants": 100, "clients": 1000, "rounds": 20, **changes})
    assert refused.value.field in changes


def test_clients_that_make_no_whole_cohorts_may_come_back_in_any_pattern():
    with pytest.raises(ConfigError, match="whole cohorts of 100") as refused:
        plan_carried(participants=100, clients=1050, rounds=20)
    assert "1000 or 1100" in refused.value.hint
    assert plan_carried(participants=100, clients=1050, rounds=20, pattern="any").separation == 10


@settings(max_examples=30, deadline=None)
@given(
    st.integers(3, 40),
    st.integers(1, 25),
    st.integers(1, 6),
    st.integers(1, 3),
    st.floats(0.0, 30.0),
    st.sampled_from(["cyclic", "any"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([COMPLETE, Connectivity(0.3, 0.2)]),
    st.floats(0.0, 0.2),
)
def test_the_residual_found_is_the_least_one_that_keeps_the_promise(
    participants, rounds, separation, lags, ratio, pattern, rescaled, closing, connectivity, collusion
):
    """The quick search works on sums over cohorts; here the plan's own whole matrix judges what it found."""
    target = {"epsilon": 2.0, "sensitivity": 0.3, "kappa": 20.0, "collusion": collusion, "lags": lags}
    made = plan_carried(
        participants=participants,
        clients=participants * separation,
        rounds=rounds,
        pattern=pattern,
        carried_to_residual=ratio,
        factors=tuple(np.linspace(1.5, 0.5, rounds).tolist()),
        rescaled=rescaled,
        closing=closing,
        connectivity=connectivity,
        **target,
    )
    budget = gdp_mu(2.0, 1e-5) ** 2
    assert made.plan.worst.cost <= budget
    assert replace(made.plan, residual=made.plan.residual * (1 - 1e-7)).worst.cost > budget


def test_a_short_run_gains_little_and_says_so():
    made = plan_carried(participants=100, clients=1000, rounds=3)
    assert made.model_variance_ratio_to_central_mean > 0.75
    assert any("the run is short" in note for note in made.notes)
    assert not any("short" in note for note in plan_carried(participants=100, clients=1000, rounds=50).notes)


def test_nobody_left_is_refused():
    with pytest.raises(PrivacyError):
        CarriedPlan(
            participants=4,
            horizon=3,
            separation=2,
            residual=1.0,
            carried_to_residual=(1.0,),
            spatial=1.0,
            colluders=3,
            declared_dropped=1,
        )
