"""The canary audit proves no more than is true, and enough to refute what is false."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from niss.accounting import Plan, RoundPlan
from niss.attacks.canary import (
    CanaryScores,
    Claim,
    canary_scores,
    clopper_pearson,
    epsilon_bound,
    measure_mu,
    record_scores,
)
from niss.mechanism import gdp_epsilon
from niss.protocol import shares
from niss.randomness import SimStream

CLIENTS = 12
SHARE = np.full(CLIENTS, 1.0 / CLIENTS)
PLAN = Plan(neighbours=4.0)


def round_of(plan: Plan) -> RoundPlan:
    return plan.for_round(np.arange(CLIENTS), weights=SHARE, records=np.ones(CLIENTS), beacon=b"audit")


def audit(plan: Plan, rounds: int = 20_000, seed: int = 1) -> CanaryScores:
    return canary_scores(round_of(plan), 0, dimension=4, rounds=rounds, stream=SimStream(seed))


def test_clopper_pearson_are_the_exact_limits() -> None:
    """At each limit the count seen, or a more extreme one, has just that probability."""
    for successes, trials in ((0, 50), (3, 50), (49, 50), (50, 50)):
        low, high = clopper_pearson(successes, trials, 0.01)
        if successes:
            assert stats.binom.sf(successes - 1, trials, low) == pytest.approx(0.01)
        else:
            assert low == 0.0
        if successes < trials:
            assert stats.binom.cdf(successes, trials, high) == pytest.approx(0.01)
        else:
            assert high == 1.0


def test_scores_are_those_of_the_claimed_mu_and_the_bound_lies_below_the_joint_claim() -> None:
    """Shift over spread, 20,000 rounds each way: within 5 %, more than 4 standard deviations (rate below 1e-4).

    The bound fails by chance at rate 1e-6.
    """
    scores, claimed = audit(PLAN), float(round_of(PLAN).joint_mu[0])
    spread = np.sqrt((scores.without.var() + scores.present.var()) / 2)
    assert (scores.present.mean() - scores.without.mean()) / spread == pytest.approx(claimed, rel=0.05)
    bound = epsilon_bound(scores, PLAN.delta, 1 - 1e-6)
    assert 0.3 < bound.proved < gdp_epsilon(claimed, PLAN.delta)
    assert bound.counted == 10_000
    assert bound.true_positive > bound.false_positive


def test_at_tau_0_the_bound_lies_above_the_papers_marginal_claim() -> None:
    """All uploads together separate the canary without a single error."""
    plan = replace(PLAN, tau2=0.0)
    bound = epsilon_bound(audit(plan, rounds=4_000), plan.delta, 1 - 1e-6)
    marginal = gdp_epsilon(float(round_of(plan).marginal_mu[0]), plan.delta)
    assert (bound.true_positive, bound.false_positive) == (1.0, 0.0)
    assert bound.proved > 1.5 * marginal
    assert round_of(plan).joint_mu[0] == np.inf


def test_the_bound_catches_a_claim_that_is_too_good() -> None:
    """Rounds that really spend epsilon = 12 are not passed off as 3. Enough rounds to prove more than 3."""
    lax = replace(PLAN, epsilon=12.0)
    assert epsilon_bound(audit(lax), PLAN.delta, 0.95).proved > 3.0


def test_a_threshold_is_not_counted_on_the_rounds_that_chose_it() -> None:
    """Rounds 0, 2, ... separate perfectly, the others say nothing: nothing is proved."""
    noise = np.random.default_rng(4).normal(size=2_000)
    without, present = noise.copy(), noise.copy()
    present[::2] += 100.0
    assert epsilon_bound(CanaryScores(without, present), 1e-5, 0.95).proved == 0.0
    assert epsilon_bound(CanaryScores(without, noise + 100.0), 1e-5, 0.95).proved > 5.0


@pytest.mark.parametrize(
    ("mu", "delta", "rounds"), [(0.0, 1e-5, 2_000), (1.0, 1e-2, 20_000)], ids=["pure noise", "mu = 1"]
)
def test_the_bound_never_exceeds_the_truth_of_ideal_scores(mu: float, delta: float, rounds: int) -> None:
    """Over 40 audits at 95 % more than 8 failures have rate 5e-5; and most of epsilon is found."""
    generator, proved = np.random.default_rng(3), []
    truth = gdp_epsilon(mu, delta) if mu else 0.0
    for _ in range(40):
        scores = CanaryScores(generator.normal(size=rounds), mu + generator.normal(size=rounds))
        proved.append(epsilon_bound(scores, delta, 0.95).proved)
    assert sum(epsilon > truth for epsilon in proved) <= 8
    assert float(np.median(proved)) >= 0.6 * truth


SILOS, RARE = 5, 1e-6
# Tolerated: in a repair a silo adds noise that only a lie about its neighbours takes out again.
OF_RECORDS = replace(
    PLAN,
    unit="record",
    batch=1.0,
    records=100,
    epsilon=16.0,
    neighbours=SILOS - 1.0,
    graph="complete",
    mode="tolerate",
)


def records_audit(plan: Plan, rounds: int = 2_000) -> tuple[CanaryScores, float]:
    """A hundred canaries of each kind to a run of the protocol, so that it takes 20 of them."""
    return record_scores(plan, SILOS, dimension=2, rounds=rounds, stream=SimStream(5), abreast=100)


def test_of_a_record_the_audit_of_the_real_protocol_reaches_what_its_node_was_charged() -> None:
    """mu near 3. 2,000 canaries each way: 0.9 of the claim is 6 standard deviations away, and the interval and the
    bound on what exceeds the claim fail at rate 1e-6.
    """
    scores, charged = records_audit(OF_RECORDS)
    assert charged == pytest.approx(2.9, rel=0.02)
    found = measure_mu(scores, 1.0 - RARE)
    assert found.measured > 0.9 * charged
    assert found.low <= charged
    assert epsilon_bound(scores, OF_RECORDS.delta, 1.0 - RARE, Claim(charged)).excess <= 0.0


def test_a_protocol_with_half_the_noise_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every share and residual with half its variance: the spread is measured, not taken from the terms."""
    real = shares.add_gaussians

    def halved(vector: Any, noises: Any) -> None:
        real(vector, [(stream, deviation / math.sqrt(2.0), sign) for stream, deviation, sign in noises])

    monkeypatch.setattr(shares, "add_gaussians", halved)
    scores, charged = records_audit(OF_RECORDS)
    assert measure_mu(scores, 1.0 - RARE).low > 1.2 * charged
    assert epsilon_bound(scores, OF_RECORDS.delta, 1.0 - RARE, Claim(charged)).excess > 0.0


@pytest.mark.slow  # dp-accounting composes a slot with hardly any noise
def test_in_secret_batches_a_record_is_found_as_often_as_the_slot_allows_and_no_more_is_proved() -> None:
    """Bounds at rate 1e-6; at the threshold where it is largest, the rate of a claim with half the batch is beaten."""
    scores, charged = records_audit(replace(OF_RECORDS, batch=0.25), rounds=4_000)
    claim, delta = Claim(charged, 0.25), OF_RECORDS.gaussian_delta
    bound = epsilon_bound(scores, delta, 1.0 - RARE, claim)
    assert claim.epsilon(delta) == pytest.approx(16.0, rel=2e-3)
    assert 2.0 < bound.proved < claim.epsilon(delta)
    assert bound.excess <= 0.0
    assert epsilon_bound(scores, delta, 1.0 - RARE, replace(claim, batch=0.125)).excess > 0.0


def test_a_claim_is_that_of_its_slot() -> None:
    """At every epsilon, delta is the most by which found exceed `e^epsilon` times the false alarms."""
    alarms = np.linspace(1e-6, 1.0 - 1e-6, 200_001)
    for claim in (Claim(1.0), Claim(1.0, 0.3)):
        delta = float(np.max(claim.most(alarms) - math.exp(0.2) * alarms))
        assert claim.epsilon(delta) == pytest.approx(0.2, abs=2e-3)
    assert np.all(Claim(math.inf, 0.25).most(alarms) >= 0.25)
