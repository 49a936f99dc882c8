"""An audit by attack: what the joint view claims is what the best adversary gets, no less and no more.

How the attack works, and why a coordinate is a trial: `statistical.audit`. Seeds are fixed, and every test
states the rate at which it would fail by chance. That a bound gets as far as a test asks depends on luck
too: at least 6 standard deviations, measured on ideal scores, lie between (rate below 1e-8).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from niss.accounting import Plan
from niss.graph import ShareGraph
from niss.mechanism import gdp_delta, gdp_epsilon, gdp_mu
from niss.randomness import SimStream
from statistical.audit import Audit, Scores, composed, delta_bounds, epsilon_bound, mu_interval
from support.known_colluders import calibrate_tau2

FALSE_ALARM = 1e-6
TRIALS = 200_000
EPSILON, DELTA = 3.0, 1e-5
PLAN = Plan(epsilon=EPSILON, delta=DELTA, neighbours=4.0)
# A part of delta is reserved for the grid of the protocol.
TARGET_MU = gdp_mu(EPSILON, 0.98 * DELTA)
GRID = np.linspace(0.0, 3.0, 13)
CASES = ("complete", "regular", "colluders", "dropped", "heterogeneous")
CALIBRATED = ("complete", "regular", "colluders")


@cache
def make_audit(name: str) -> Audit:
    if name == "complete":
        return Audit.of_plan(replace(PLAN, graph="complete"), 12)
    if name == "regular":
        return Audit.of_plan(PLAN, 20)
    if name == "colluders":
        return with_colluders(range(4))
    if name == "dropped":
        audit = Audit.of_plan(PLAN, 16, victim=0)
        missing = [int(client) for client in audit.graph.neighbours(0)[:2]]
        return replace(audit, dropped=(*missing, 13))
    # Unequal targets, unequal distortion, and a third of the clients add no residual noise at all.
    plan = replace(PLAN, epsilon=tuple(np.linspace(2.0, 5.0, 12)), tau2=(0.0, 0.6, 0.2) * 4)
    return Audit.of_plan(plan, 12)


def with_colluders(colluders: range) -> Audit:
    """Calibrated against rho = 0.2; the victim is the honest client with the least noise."""
    graph = ShareGraph.regular(20, degree=5, beacon=b"audit with colluders")
    target = 1.0 / TARGET_MU**2
    unit = target / 5
    tau2 = calibrate_tau2(graph, unit_variance=unit, target_variance=target, colluders=colluders)
    audit = Audit(
        graph=graph, unit_variance=unit, tau2=tau2, victim=19, sensitivity=1.0, colluders=tuple(colluders)
    )
    honest = (replace(audit, victim=int(client)) for client in audit.watched)
    return max(honest, key=lambda each: each.claimed_mu)


@cache
def attacked(name: str, trials: int = TRIALS) -> Scores:
    return make_audit(name).scores(trials, SimStream(70).child(name, trials))


def excess(scores: Scores, mu: float, rate: float = FALSE_ALARM) -> float:
    """By how much the attack surely beats a claim of mu-GDP, in either direction; above 0 by chance at `rate`."""
    claimed = np.array([gdp_delta(float(epsilon), mu) for epsilon in GRID])
    bounds = [delta_bounds(each, GRID, rate / 2) for each in (scores, scores.turned())]
    return float(np.max(np.stack(bounds) - claimed))


@pytest.mark.parametrize("name", CALIBRATED)
def test_calibrated_rounds_claim_their_target(name: str) -> None:
    assert make_audit(name).claimed_mu == pytest.approx(TARGET_MU, rel=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_the_attack_never_exceeds_the_claim(name: str) -> None:
    """Clopper-Pearson, Bonferroni over 13 epsilons and 2 directions: false-alarm rate at most 1e-6."""
    assert excess(attacked(name), make_audit(name).claimed_mu) <= 0.0


@pytest.mark.parametrize("name", CASES)
def test_a_claim_one_fifth_too_good_is_caught(name: str) -> None:
    """The audit has teeth: it passes at mu and fails at 0.8 mu, 10 standard deviations and more away."""
    assert excess(attacked(name), 0.8 * make_audit(name).claimed_mu) > 0.0


@pytest.mark.parametrize("name", CASES)
def test_the_attack_reaches_the_claimed_mu(name: str) -> None:
    """mu to within 4 %, in an interval that misses the truth at rate 1e-6; 70 % of epsilon, proven."""
    mu = make_audit(name).claimed_mu
    low, _, high = mu_interval(attacked(name), FALSE_ALARM)
    assert low <= mu <= high
    assert high - low < 0.08 * mu
    assert epsilon_bound(attacked(name), 0.05, FALSE_ALARM) > 0.7 * gdp_epsilon(mu, 0.05)


def test_an_attack_learned_from_uploads_alone_reaches_the_same_mu() -> None:
    """Interval at rate 1e-6; learning the 20 x 20 covariance from 100,000 trials costs 1e-4 of mu."""
    audit = make_audit("regular")
    learned = audit.learned_attack(100_000, SimStream(71))
    low, _, high = mu_interval(audit.scores(TRIALS, SimStream(72), learned), FALSE_ALARM)
    assert low <= audit.claimed_mu <= high


def test_a_canary_in_many_coordinates_counts_by_its_norm() -> None:
    """Interval at rate 1e-6."""
    audit = replace(make_audit("complete"), dimension=8)
    low, _, high = mu_interval(audit.scores(50_000, SimStream(73)), FALSE_ALARM)
    assert low <= audit.claimed_mu <= high < 1.1 * audit.claimed_mu


def test_without_distortion_the_papers_marginal_claim_breaks() -> None:
    """tau = 0: one upload alone looks private, all together give the canary away. Cannot fail by chance."""
    audit = Audit.of_plan(replace(PLAN, graph="complete", tau2=0.0), 12)
    # A plan that sets tau^2 itself promises nothing, and reserves nothing.
    own_variance = (audit.sensitivity / gdp_mu(EPSILON, DELTA)) ** 2
    assert audit.marginal_mu == pytest.approx(audit.sensitivity / np.sqrt(2.0 * own_variance))
    assert audit.claimed_mu == np.inf
    scores = audit.scores(200_000, SimStream(74))
    np.testing.assert_allclose(scores.without, 0.0, atol=1e-9)
    np.testing.assert_allclose(scores.present, 1.0, atol=1e-9)
    # No error in 100,000 held-out trials each: all that the trials can prove.
    assert epsilon_bound(scores, DELTA, FALSE_ALARM) > 4.0 * gdp_epsilon(audit.marginal_mu, DELTA)


def test_calibrated_rounds_break_the_marginal_claim_too() -> None:
    audit = make_audit("complete")
    assert audit.marginal_mu < 0.75 * audit.claimed_mu
    assert excess(attacked("complete"), audit.marginal_mu) > 0.0


def test_colluders_break_a_claim_that_does_not_name_them() -> None:
    audit = make_audit("colluders")
    unnamed = replace(audit, colluders=()).claimed_mu
    assert unnamed < 0.9 * audit.claimed_mu
    assert excess(attacked("colluders"), unnamed) > 0.0


def test_dropped_clients_do_not_help_the_adversary() -> None:
    audit = make_audit("dropped")
    assert audit.claimed_mu < 0.9 * replace(audit, dropped=()).claimed_mu


@pytest.mark.parametrize("graph", ["complete", "regular"])
def test_rounds_compose_as_the_ledger_adds_them_up(graph: str) -> None:
    """Four rounds, fresh graphs: mu^2 adds up, to the target on the complete graph. Two tests, 5e-7 each."""
    plan = replace(PLAN, graph=graph, participations=4)
    rounds = [Audit.of_plan(plan, 12, beacon=b"round %d" % number, victim=5) for number in range(4)]
    mus = [each.claimed_mu for each in rounds]
    total = float(np.linalg.norm(mus))
    if graph == "complete":
        assert total == pytest.approx(np.sqrt(4) * mus[0], rel=1e-12)
        assert total == pytest.approx(TARGET_MU, rel=1e-6)
    else:
        assert len(set(mus)) == 4
        assert total <= TARGET_MU
    parts = [each.scores(100_000, SimStream(75).child(graph, t)) for t, each in enumerate(rounds)]
    whole = composed(parts, mus)
    low, _, high = mu_interval(whole, FALSE_ALARM / 2)
    assert low <= total <= high < 1.1 * total
    assert excess(whole, total, FALSE_ALARM / 2) <= 0.0
    # The rounds together say more than any one of them allows.
    assert low > 1.5 * max(mus)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_many_trials_leave_little_room(name: str) -> None:
    """Three million trials each way: mu to within 1.1 %, 90 % of epsilon at delta = 0.01, proven.

    The interval, the grid and four bounds of epsilon from above: six tests, together at rate 1e-6.
    """
    rate = FALSE_ALARM / 6
    mu = make_audit(name).claimed_mu
    scores = attacked.__wrapped__(name, 3_000_000)  # Not kept.
    low, _, high = mu_interval(scores, rate)
    assert low <= mu <= high
    assert high - low < 0.022 * mu
    assert excess(scores, mu, rate) <= 0.0
    for delta, part in ((0.05, 0.92), (0.01, 0.9), (1e-3, 0.78), (DELTA, 0.5)):
        reached, claimed = epsilon_bound(scores, delta, rate), gdp_epsilon(mu, delta)
        assert part * claimed < reached <= claimed
