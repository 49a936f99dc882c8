"""Plans for carried shares: the design's figures, what is promised on real graphs, and the worst allowed pattern."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niss.accounting import Committed, Plan, forecast
from niss.accounting import committed as costs_of
from niss.accounting.calibration import CarriedSearch
from niss.accounting.committed import (
    banded_noise,
    best_noise,
    heaviest,
    independent_noise,
    spent_in,
    worst_pattern,
)
from niss.errors import ConfigError, PrivacyError
from niss.graph import ShareGraph
from niss.mechanism import gdp_mu
from niss.mechanism.noise import Noise
from niss.views import RoundNoise, RunNoise, run_mu2

STRONG = 1e6
HUNDRED = {"participants": 100, "clients": 1000, "rounds": 100}


def committed(
    participants=6,
    horizon=9,
    separation=3,
    *,
    residual=0.4,
    ratio=4.0,
    spatial=3.0,
    pattern="cyclic",
    **known,
):
    """A run with that much fresh noise in a sum, `ratio` times as much carried on, and shares within its rounds."""
    neighbours = participants - 1.0
    noise = Noise(
        participants=participants,
        neighbours=neighbours,
        unit=spatial / (2.0 * neighbours),
        residual=residual / participants,
        carried=ratio * residual / participants,
        **known,
    )
    return Committed(noise=noise, horizon=horizon, separation=separation, pattern=pattern)


plan_carried = partial(forecast, carry=True)
# What is left of delta, once noise on a grid is paid for.
DELTA = 0.98e-5


def more_noise(run, factor):
    """The same with that many times the fresh noise, and the carried noise in proportion."""
    noise = run.noise
    return replace(
        run, noise=replace(noise, residual=factor * noise.residual, carried=factor * noise.carried)
    )


def ratios(rounds, separation, participants=100, **settings_):
    made = plan_carried(
        participants=participants, clients=participants * separation, rounds=rounds, **settings_
    )
    return made.aggregate_variance_ratio_to_central, made.ratio_to_central_final


# Mean over rounds and final model, relative to a trusted server with independent noise; two figures each.
@pytest.mark.parametrize(
    ("rounds", "separation", "mean", "final"),
    [(30, 5, 0.383, 0.29), (100, 10, 0.203, 0.148), (100, 34, 0.18, 0.10), (300, 10, 0.153, 0.125)],
)
def test_strong_shares_within_a_round(rounds, separation, mean, final):
    assert ratios(rounds, separation, kappa=STRONG) == pytest.approx((mean, final), rel=0.02)
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
    """Where only shares within a round are taken out: what is carried to or from a lost client is not."""
    plan = Plan(
        method="niss-carried",
        graph="complete",
        participations=10,
        horizon=100,
        separation=10,
        dropout=dropout,
    )
    search = replace(CarriedSearch.of(plan, 100), repaired=True)
    central = independent_noise(100, 10).mean() / search.mu**2
    unplanned, planned = search.at(5.0, 18.9), search.at(5.0, None)
    assert search.objective(unplanned) / central == pytest.approx(fixed, rel=0.02)
    assert search.objective(planned) / central == pytest.approx(mean, rel=0.02)
    assert planned.noise.carried / planned.noise.residual == pytest.approx(ratio, rel=0.05)


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
    made = plan_carried(participants=100, clients=100 * separation, rounds=rounds, kappa=5.0, clip=100.0)
    budget, plan = gdp_mu(3.0, DELTA) ** 2, made.run
    soonest = (rounds - 1) // separation * separation + 1
    for _ in range(6):
        costs = [replace(plan, horizon=end).worst.cost for end in range(soonest, rounds + 1)]
        plan = more_noise(plan, max(costs) / budget)
    assert max(costs) == costs[0]
    assert max(costs) == pytest.approx(budget, rel=1e-3)
    noise, central = plan.noise_in_model(), np.array(made.over_rounds["central"])
    assert noise.mean() / central.mean() == pytest.approx(mean, rel=0.02)
    assert noise[-1] / central[-1] == pytest.approx(final, rel=0.02)
    alone = replace(plan, horizon=1).worst.cost
    assert (alone > budget) == (separation == 34)


def test_trusted_servers():
    for rounds, separation, banded, best in ((30, 5, 0.324, 0.30), (100, 10, 0.167, 0.15)):
        central = independent_noise(rounds, separation).mean()
        assert banded_noise(rounds, separation).mean() / central == pytest.approx(banded, rel=0.02)
        assert best_noise(rounds, separation).mean() / central == pytest.approx(best, rel=0.02)


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 14), st.integers(1, 6), st.integers(0, 2**32))
def test_nothing_beats_the_best_correlated_noise(rounds, separation, seed):
    """Any covariance that a trusted server might use, scaled to mu = 1 by its true worst client, leaves more."""
    rng = np.random.default_rng(seed)
    best = best_noise(rounds, separation).mean()
    root = np.tril(rng.uniform(0.0, 1.0, (rounds, rounds))) + np.eye(rounds)
    for inverse in (root.T @ root, np.eye(rounds)):
        cohorts = [np.arange(first, rounds, separation) for first in range(min(separation, rounds))]
        cost = max(inverse[np.ix_(places, places)].sum() for places in cohorts)
        sums = np.tril(np.ones((rounds, rounds)))
        noise = np.trace(sums @ np.linalg.inv(inverse) @ sums.T) / rounds * cost
        assert best <= noise * (1 + 1e-9)
    assert best <= banded_noise(rounds, separation).mean() * (1 + 1e-9)


def test_a_separation_of_one_gains_nothing_and_says_so():
    made = plan_carried(participants=50, clients=50, rounds=20)
    assert made.plan.carried_to_residual == 0.0
    assert made.aggregate_variance_ratio_to_central > 1.0
    assert any("every round" in note for note in made.notes)
    wasted = plan_carried(**HUNDRED, kappa=5.0, dropout=0.2, carried_to_residual=18.9)
    assert any("less than 2 %" in note for note in wasted.notes)


def test_the_forecast_is_json_and_keeps_the_promise():
    made = plan_carried(
        participants=40, clients=400, rounds=50, epsilon=2.0, clip=0.3, collusion=0.2, pattern="any"
    )
    values = json.loads(json.dumps(made.to_json()))
    for name in ("aggregate_variance_ratio_to_central", "ratio_to_central_final", "ratio_to_best"):
        assert values[name] == getattr(made, name)
    curves = made.over_rounds
    assert {name: len(curve) for name, curve in curves.items()} == dict.fromkeys(
        ("niss", "central", "banded", "best"), 50
    )
    assert np.mean(curves["niss"]) / np.mean(curves["best"]) == pytest.approx(made.ratio_to_best)
    assert (made.clients, made.epsilon_joint, made.plan.turns, made.plan.mode) == (400, 2.0, 5, "tolerate")
    assert made.run.mu <= gdp_mu(2.0, DELTA) <= made.run.mu * (1 + 1e-9)
    assert made.run.noise.colluders == 8
    assert made.ratio_to_best > 1.0
    visits = made.run.worst.rounds
    spent = sum(made.run.charge(number, visits[:place]) for place, number in enumerate(visits))
    assert math.sqrt(spent) == pytest.approx(made.run.mu, rel=1e-9)


def run_of(run: Committed) -> RunNoise:
    """The run that is committed to, on real graphs: cohorts that take turns."""
    noise, rounds = run.noise, []
    m = noise.participants
    for number in range(run.rounds):
        first = number % run.separation * m
        onward = (ShareGraph.complete((m, m)), noise.carried / m) if number + 1 < run.rounds else None
        clients = tuple(range(first, first + m))
        rounds.append(RoundNoise(clients, ShareGraph.complete(m), noise.unit, noise.residual, onward))
    return RunNoise(tuple(rounds))


@pytest.mark.parametrize("closing", [False, True])
@pytest.mark.parametrize("ratio", [0.0, 4.0])
@pytest.mark.parametrize(("colluders", "dropped"), [(0, 0), (2, 0), (1, 1)])
def test_a_run_promises_what_its_graphs_give(closing, ratio, colluders, dropped):
    run = replace(committed(ratio=ratio, colluders=colluders, dropped=dropped), closing=closing)
    known = [cohort * 6 + place for cohort in range(3) for place in range(colluders + dropped)]
    exact = run_mu2(run_of(run), colluders=known, sensitivity=[1.0] * 9 + [0.0] * closing)
    assert run.worst.cost == pytest.approx(max(exact.values()), rel=1e-10)


@settings(max_examples=40, deadline=None)
@given(st.integers(3, 12), st.integers(2, 14), st.integers(1, 5), st.floats(0.0, 30.0), st.floats(0.0, 10.0))
def test_less_trust_never_gives_a_better_claim(participants, horizon, separation, ratio, spatial):
    def cost(separation=separation, pattern="any", **known):
        size = participants, horizon, separation
        return committed(
            *size, residual=0.5, ratio=ratio, spatial=spatial, pattern=pattern, **known
        ).worst.cost

    here = cost() * (1 - 1e-9)
    assert cost(colluders=1) >= here
    assert cost(dropped=2) >= cost(colluders=1) * (1 - 1e-9)
    if separation > 1:
        assert cost(separation - 1) >= here
    assert cost(pattern="cyclic") <= here * (1 + 1e-8)


@pytest.mark.parametrize("kept", [1.0, 0.9])
def test_training_takes_out_a_part_of_the_noise_and_averaging_of_what_is_under_way(kept):
    """Every share drawn, added and taken out again, while each round leaves a part of what is in the model."""
    run = committed(3, 5, 2, residual=0.5, ratio=3.0, spatial=1.0)
    age = np.subtract.outer(np.arange(5), np.arange(5))
    fresh = np.where(age >= 0, kept ** np.maximum(age, 0), 0.0)
    carried = fresh - np.where(age >= 1, kept ** np.maximum(age - 1, 0), 0.0)
    columns = np.hstack([math.sqrt(0.5) * fresh, math.sqrt(1.5) * carried[:, :-1]])
    np.testing.assert_allclose(run.noise_in_model(kept=kept), np.sum(columns**2, axis=1), rtol=1e-12)
    if kept == 1.0:
        for models, number in ((1, 2), (3, 3), (4, 4)):
            mean = columns[number + 1 - models : number + 1].mean(axis=0)
            assert run.noise_in_mean(models, number) == pytest.approx(mean @ mean, rel=1e-12)


@pytest.mark.parametrize(("rounds", "clients"), [(100, 1000), (30, 600)])
def test_training_carries_less_and_publishing_leaves_less_in_the_end(rounds, clients):
    asked = {"participants": 100, "clients": clients, "rounds": rounds, "kappa": 20.0}
    publishing, training = (plan_carried(**asked, for_=goal) for goal in ("publishing", "training"))
    assert training.plan.carried_to_residual < 0.75 * publishing.plan.carried_to_residual
    assert training.run.mu == pytest.approx(publishing.run.mu, rel=1e-9)
    assert publishing.ratio_to_central_final < training.ratio_to_central_final
    on_the_way = [made.run.noise_in_model(kept=0.97)[:rounds].mean() for made in (publishing, training)]
    assert on_the_way[1] < 0.99 * on_the_way[0]
    for made in (publishing, training):
        ours, central = made.over_rounds["niss"], made.over_rounds["central"]
        assert made.ratio_to_central_early == pytest.approx(ours[-2] / central[-2])
        assert made.ratio_to_central_averaged < made.ratio_to_central_early
    assert plan_carried(participants=10, clients=20, rounds=1).ratio_to_central_early is None


@pytest.mark.parametrize("declared", [0, 1, 2])
def test_what_dropouts_leave_is_the_mean_over_all_of_them(declared):
    """Every pattern of dropouts in every round, each share added or not, taken out or not, by the rules of a repair."""
    m, rounds, dropout = 3, 3, 0.3
    run = committed(m, rounds, 2, residual=0.5, ratio=3.0, spatial=1.0, dropped=declared)
    expected = np.zeros(rounds)
    for pattern in itertools.product((False, True), repeat=m * rounds):
        lost = np.array(pattern).reshape(rounds, m)
        counts = lost.sum(axis=1)
        repaired = counts <= declared
        noise = np.zeros(rounds)
        for t in range(rounds):
            here = np.arange(rounds) >= t
            noise += here * (m - counts[t]) * run.noise.residual
            if declared and not repaired[t]:
                noise += here * counts[t] * (m - counts[t]) * run.noise.spatial / (m - 1)
            if t + 1 == rounds:
                continue
            for sender, receiver in itertools.product(lost[t], lost[t + 1]):
                # A share of a lost sender is not taken out where that was repaired; one to a lost receiver is.
                out = not (sender and repaired[t]) and not (receiver and not repaired[t + 1])
                left = here * float(not sender) - (np.arange(rounds) > t) * float(out)
                noise += run.noise.carried / m * left**2
        expected += dropout ** counts.sum() * (1 - dropout) ** (m * rounds - counts.sum()) * noise
    np.testing.assert_allclose(run.noise_in_model(dropout), expected, rtol=1e-12)


def test_planner_and_simulator_plan_the_same_noise_for_dropouts():
    """Whoever is called dropped counts like a colluder, with all its shares: what they carried is taken out as well."""
    asked = {"participants": 100, "rounds": 100, "epsilon": 3.0, "delta": 1e-5, "kappa": 20.0}
    planned = plan_carried(clients=1000, dropout=0.1, mode="repair", clip=100.0, **asked)
    run = Plan(
        method="niss-carried",
        graph="complete",
        horizon=100,
        separation=10,
        participations=10,
        kappa=20.0,
        participants=100,
        dropout=0.1,
        mode="repair",
    ).committed(100)
    assert run == planned.run
    np.testing.assert_allclose(run.noise_in_model(0.1), planned.over_rounds["niss"], rtol=1e-12)
    assert planned.aggregate_variance_ratio_to_central == pytest.approx(0.28, abs=0.01)
    assert not any("leave it in the model" in note for note in planned.notes)


def test_repairs_are_charged():
    settings_ = {"participants": 60, "clients": 600, "rounds": 40, "kappa": 10.0, "dropout": 0.05}
    settings_["mode"] = "repair"
    careful = plan_carried(**settings_)
    assert careful.run.noise.dropped > 3
    careless = plan_carried(**settings_ | {"dropout": 1e-6})
    assert careless.run.noise.dropped == 1
    assert careful.residual > careless.residual


PAGE = (Path(__file__).parents[2] / "docs" / "concepts" / "carried-shares.md").read_text()


@pytest.mark.parametrize(
    "row", re.findall(r"^\|((?: [\d.]+ \|){2} \d+ % \|(?: [\d.]+ \|){3})$", PAGE, flags=re.MULTILINE)
)
def test_the_page_says_what_is_planned(row):
    rounds, separation, dropout, ratio, mean, final = map(float, row.replace("%", "").split("|")[:6])
    asked = {"participants": 100, "clients": 100 * int(separation), "rounds": int(rounds), "kappa": 20.0}
    made = plan_carried(**asked, dropout=dropout / 100.0, mode="repair" if dropout else "tolerate")
    assert made.plan.carried_to_residual == pytest.approx(ratio, abs=0.051)
    found = made.aggregate_variance_ratio_to_central, made.ratio_to_central_final
    assert found == pytest.approx((mean, final), abs=0.0051)


def test_clients_that_make_no_whole_cohorts_may_come_back_in_any_pattern():
    with pytest.raises(ConfigError, match="whole cohorts of 100") as refused:
        plan_carried(participants=100, clients=1050, rounds=20)
    assert "1000 or 1100" in refused.value.hint
    assert plan_carried(participants=100, clients=1050, rounds=20, pattern="any").plan.separation == 10


@settings(max_examples=30, deadline=None)
@given(
    st.integers(3, 40),
    st.integers(1, 25),
    st.integers(1, 6),
    st.floats(0.0, 30.0),
    st.sampled_from(["cyclic", "any"]),
    st.booleans(),
    st.floats(0.0, 0.2),
)
def test_the_residual_found_is_the_least_one_that_keeps_the_promise(
    participants, rounds, separation, ratio, pattern, closing, collusion
):
    """The quick search works on sums over cohorts; here the plan's own whole matrix judges what it found."""
    target = {"epsilon": 2.0, "clip": 0.3, "kappa": 20.0, "collusion": collusion}
    made = plan_carried(
        participants=participants,
        clients=participants * separation,
        rounds=rounds,
        pattern=pattern,
        carried_to_residual=ratio,
        closing=closing,
        **target,
    )
    budget = gdp_mu(2.0, DELTA) ** 2
    assert made.run.worst.cost <= budget
    assert more_noise(made.run, 1 - 1e-7).worst.cost > budget


def test_a_short_run_gains_little_and_says_so():
    made = plan_carried(participants=100, clients=1000, rounds=3)
    assert made.aggregate_variance_ratio_to_central > 0.75
    assert any("the run is short" in note for note in made.notes)
    assert not any("short" in note for note in plan_carried(participants=100, clients=1000, rounds=50).notes)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"participants": 4, "colluders": 3, "dropped": 1}, None),
        ({"residual": -1.0}, "residual"),
        ({"ratio": math.inf}, "carried"),
        ({"spatial": math.nan}, "unit"),
        ({"colluders": -1}, "colluders"),
    ],
)
def test_numbers_that_are_no_run_are_refused(changes, field):
    with pytest.raises((ConfigError, PrivacyError)) as refused:
        committed(**changes)
    assert getattr(refused.value, "field", None) == field


def test_without_fresh_noise_nothing_is_promised():
    run = committed(residual=0.0)
    assert not run.private
    with pytest.raises(PrivacyError, match="nothing is promised"):
        run.cost(0, ())


@pytest.mark.parametrize("pattern", ["cyclic", "any"])
def test_charges_add_up_and_no_allowed_pattern_is_stopped(pattern):
    run = committed(pattern=pattern, colluders=1)
    allowed = [tuple(range(first, 9, 3)) for first in range(3)]
    if pattern == "any":
        allowed += [(0, 4, 8), (1, 5), (2, 6), (0, 3, 8)]
    for visits in allowed:
        costs = [run.charge(number, visits[:place]) for place, number in enumerate(visits)]
        assert sum(costs) == pytest.approx(run.matrix[np.ix_(visits, visits)].sum(), rel=1e-9)
        assert min(costs) > 0.0
        # After the dearest allowed past it costs no less.
        for place, number in enumerate(visits):
            assert run.cost(number, None) >= costs[place] * (1 - 1e-12)


@pytest.mark.parametrize(
    ("pattern", "number", "earlier", "budget", "words"),
    [
        *(("cyclic", number, (1,), None, "promises a multiple of 3") for number in (2, 5, 1, 0)),
        ("any", 7, (1, 5), None, "at least 3"),
        ("cyclic", 9, (), None, "past the committed end"),
        ("cyclic", 4, (1,), 1e-3, "would cost"),
    ],
)
def test_what_breaks_the_promise_is_refused(pattern, number, earlier, budget, words):
    with pytest.raises(PrivacyError, match=words):
        committed(pattern=pattern).charge(number, earlier, budget)


def inverse_of_chain(residual, links, spread):
    """K from scratch: the inverse of the covariance of round sums, and what deviations add."""
    gamma = np.diag(np.asarray(residual, dtype=float))
    for start, link in enumerate(links):
        edge = np.zeros(len(gamma))
        edge[start], edge[start + 1] = 1.0, -1.0
        gamma += link * np.outer(edge, edge)
    return np.linalg.inv(gamma) + np.diag(spread)


def patterns(rounds, separation):
    """Every set of rounds at least `separation` apart."""
    for count in range(1, rounds + 1):
        for chosen in itertools.combinations(range(rounds), count):
            if all(b - a >= separation for a, b in itertools.pairwise(chosen)):
                yield chosen


@st.composite
def chains(draw):
    rounds = draw(st.integers(1, 11))
    numbers = st.lists(st.floats(0.05, 5.0), min_size=rounds, max_size=rounds)
    links = [0.0 if draw(st.booleans()) and draw(st.booleans()) else w for w in draw(numbers)[: rounds - 1]]
    matrix, shift = inverse_of_chain(draw(numbers), links, draw(numbers)), np.array(draw(numbers))
    return np.maximum(shift[:, None] * matrix * shift, 0.0), draw(st.integers(1, 5))


@settings(max_examples=150, deadline=None)
@given(chains())
def test_the_worst_pattern_is_the_worst_of_all(case):
    """Labels that are merged still bound it; a longer rest costs no more, nor does a visit less."""
    matrix, separation = case
    every = {p: float(matrix[np.ix_(p, p)].sum()) for p in patterns(len(matrix), separation)}
    found = worst_pattern(matrix, separation, "any")
    assert found.exact
    assert found.cost == pytest.approx(max(every.values()), rel=1e-10)
    assert every[found.rounds] == pytest.approx(found.cost, rel=1e-10)
    cyclic = worst_pattern(matrix, separation, "cyclic")
    offsets = [tuple(range(first, len(matrix), separation)) for first in range(min(separation, len(matrix)))]
    assert cyclic.cost == pytest.approx(max(every[p] for p in offsets), rel=1e-12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs_of, "_MOST_LABELS", 1)
        assert worst_pattern(matrix, separation, "any").cost >= found.cost * (1 - 1e-12)
    assert worst_pattern(matrix, separation + 1, "any").cost <= found.cost * (1 + 1e-12)
    for fewer in itertools.combinations(found.rounds, len(found.rounds) - 1):
        assert spent_in(matrix, fewer) <= spent_in(matrix, found.rounds) * (1 + 1e-12)


def test_a_cheaper_past_may_cost_more_later():
    """Keeping only the costliest way to every round would miss this one by 1 %."""
    residual = [8.02, 0.17, 0.47, 0.09, 0.56, 0.09, 0.18, 0.05, 0.36, 0.62, 0.14]
    matrix = inverse_of_chain(residual, [1.1, 3.6, 0.1, 1.3, 6.6, 1.4, 5.5, 9.5, 0.1, 0.2], np.zeros(11))
    true = max(matrix[np.ix_(p, p)].sum() for p in patterns(11, 2))
    assert worst_pattern(matrix, 2, "any").cost == pytest.approx(true, rel=1e-10)


def test_heaviest():
    assert heaviest(np.array([3.0, 4.0, 3.0]), 2) == 6.0
    assert heaviest(np.array([3.0, 7.0, 3.0]), 2) == 7.0
    assert heaviest(np.empty(0), 2) == 0.0
