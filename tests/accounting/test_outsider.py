"""The outsider's claim is never below what such an outsider can really tell, in the relation it names.

The truth is recomputed here with numpy and scipy alone.
"""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy import optimize, signal, stats

from niss.accounting import outsider
from niss.accounting.outsider import OutsiderClaim, outsider_epsilon
from niss.errors import ConfigError
from niss.mechanism import Slots, gdp_epsilon
from niss.mechanism.slots import few_kinds
from support.refusals import refuses

DELTA = 1e-5
REPLACE_ONE = dp_accounting.NeighboringRelation.REPLACE_ONE
RELATIONS = [("client", "zero-out"), ("client", "replace-one"), ("record", "zero-out")]

Means = list[tuple[float, float]]
"""A mixture of unit normals on a line: the weight and the mean of each."""


def claim(mus: list[float], sampling: str, participants: int = 20, **more: object) -> OutsiderClaim:
    given = {"unit": "client", "relation": "zero-out", "clients": 100, "delta": DELTA, **more}
    if given["unit"] == "record":
        given["batch"] = participants / 100
    return outsider_epsilon(mus=mus, sampling=sampling, participants=participants, **given)


def neighbours(unit: str, relation: str, sampling: str, q: float, mu: float) -> list[tuple[Means, Means]]:
    """Neighbouring inputs as one outsider sees them in a round, noise of deviation 1 in the sum.

    `mu` is how far the relation moves the sum, so an update has norm mu (zero-out) or mu / 2 (replace-one). The client,
    or one record of it in a round that everybody knows it to be in, is drawn with probability q; the others are alike.
    """
    out = (1.0 - q, 0.0)
    if unit == "record":
        return [([out, (q, mu)], [(1.0, 0.0)])]
    if sampling == "shuffled":  # His round is known in the worst case.
        return [([(1.0, 0.0)], [(1.0, mu)])]
    r = mu if relation == "zero-out" else mu / 2.0
    if sampling == "poisson":
        other = 0.0 if relation == "zero-out" else -r
        return [([out, (q, r)], [out, (q, other)])]
    # Of a fixed number: where he is not, another is, with an update of -r; 0 is the sum without him.
    if relation == "replace-one":
        return [([out, (q, 2.0 * r)], [(1.0, 0.0)])]
    return [([out, (q, 2.0 * r)], [out, (q, r)]), ([out, (q, r)], [(1.0, 0.0)])]


def true_epsilon(one: Means, other: Means, rounds: int = 1, delta: float = DELTA) -> float:
    """Of so many such rounds, never above the truth: losses on a grid, rounded down, convolved."""
    return max(_one_way(one, other, rounds, delta), _one_way(other, one, rounds, delta))


def _one_way(one: Means, other: Means, rounds: int, delta: float) -> float:
    ends = [mean for _, mean in one + other]
    width = 1e-3
    x = np.arange(min(ends) - 10.0, max(ends) + 10.0, width)
    p, q = (sum(w * stats.norm.pdf(x, mean) for w, mean in mixture) * width for mixture in (one, other))
    seen = (p > 1e-18) & (q > 0.0)
    step = 2e-3
    # A quarter of a step more than rounding: far above what the sum over x is off from the integral.
    places = np.floor(np.log(p[seen] / q[seen]) / step - 0.25).astype(int)
    lowest, size = int(places.min()), int(places.max() - places.min()) + 1
    mass = np.bincount(places - lowest, weights=p[seen], minlength=size)
    composed = mass
    for _ in range(rounds - 1):
        composed = np.maximum(signal.fftconvolve(composed, mass), 0.0)
    composed[composed < 1e-15] = 0.0  # What the transform makes of zeros.
    losses = (np.arange(composed.size) + rounds * lowest) * step

    def spent(epsilon: float) -> float:
        return float(np.sum(composed * -np.expm1(np.minimum(epsilon - losses, 0.0))))

    return 0.0 if spent(0.0) <= delta else float(optimize.brentq(lambda e: spent(e) - delta, 0.0, 200.0))


@pytest.mark.parametrize("rounds", [1, 6])
@pytest.mark.parametrize(("mu", "participants"), [(0.25, 5), (0.5, 50), (1.0, 20), (2.0, 90)])
@pytest.mark.parametrize("sampling", outsider.SAMPLINGS)
@pytest.mark.parametrize(("unit", "relation"), RELATIONS)
def test_no_outsider_tells_neighbours_of_this_relation_apart_better_than_claimed(
    unit: str, relation: str, sampling: str, mu: float, participants: int, rounds: int
) -> None:
    found = claim([mu] * rounds, sampling, participants, unit=unit, relation=relation)
    assert (found.unit, found.relation) == (unit, relation)
    assert found.epsilon is not None
    assert found.epsilon <= gdp_epsilon(mu * math.sqrt(rounds), DELTA) * (1 + 1e-9)
    for one, other in neighbours(unit, relation, sampling, participants / 100, mu):
        assert true_epsilon(one, other, rounds) <= found.epsilon


def test_the_recomputation_knows_the_gaussian() -> None:
    exact = gdp_epsilon(0.8 * math.sqrt(6.0), DELTA)
    assert exact - 0.02 < true_epsilon([(1.0, 0.0)], [(1.0, 0.8)], 6) <= exact


@pytest.mark.parametrize(
    ("mu", "participants", "rounds"), [(1.0, 20, 1), (1.4, 5, 1), (0.5, 90, 1), (1.0, 20, 6)]
)
def test_poisson_sampling_of_updates_that_become_zero_is_told_exactly(
    mu: float, participants: int, rounds: int
) -> None:
    found = claim([mu] * rounds, "poisson", participants)
    [(one, other)] = neighbours("client", "zero-out", "poisson", participants / 100, mu)
    assert found.epsilon == pytest.approx(true_epsilon(one, other, rounds), rel=2e-3, abs=0.02)
    assert found.accountant.startswith("PLD")


@pytest.mark.parametrize("sampling", outsider.SAMPLINGS)
@pytest.mark.parametrize(("unit", "relation"), RELATIONS)
def test_more_sensitivity_is_never_cheaper(unit: str, relation: str, sampling: str) -> None:
    spent = [
        claim([mu, mu], sampling, 10, unit=unit, relation=relation).epsilon
        for mu in (0.0, 0.1, 0.3, 1.0, 400.0)
    ]
    assert None not in spent
    assert spent == sorted(spent)


@pytest.mark.parametrize("sampling", outsider.SAMPLINGS)
def test_the_same_updates_cost_more_where_they_may_be_replaced(sampling: str) -> None:
    """The same noise: a replacement moves the sum twice as far as a zero does."""
    zero_out = claim([0.3] * 5, sampling, relation="zero-out").epsilon
    replaced = claim([0.6] * 5, sampling, relation="replace-one").epsilon
    assert zero_out is not None
    assert replaced is not None
    assert zero_out <= replaced


def test_sampling_clients_hides_no_record() -> None:
    """What hides a record is the secret batch, however clients are drawn; without one nothing is amplified."""
    told = [claim([1.0] * 4, sampling, 5, unit="record") for sampling in outsider.SAMPLINGS]
    assert len({one.epsilon for one in told}) == 1
    assert all("Whoever knows a batch is no outsider" in one.words for one in told)
    for sampling in outsider.SAMPLINGS:
        found = claim([1.0] * 4, sampling, 100, unit="record")
        assert found.epsilon == pytest.approx(gdp_epsilon(2.0, DELTA), rel=1e-12)
    with pytest.raises(ConfigError, match="batch"):
        claim([1.0], "poisson", 5, batch=0.05)


@pytest.mark.parametrize("sampling", ["poisson", "uniform"])
def test_clients_that_differ_in_weight_or_noise_are_not_hidden_among_each_other(sampling: str) -> None:
    found = claim([0.2] * 4, sampling, 5, alike=False)
    assert found.epsilon == pytest.approx(gdp_epsilon(0.4, DELTA), rel=1e-12)
    assert "differ" in found.words


def test_an_undoubled_sensitivity_would_promise_too_much() -> None:
    accountant = RdpAccountant(neighboring_relation=REPLACE_ONE)
    accountant.compose(
        dp_accounting.SampledWithoutReplacementDpEvent(100, 90, dp_accounting.GaussianDpEvent(1.0))
    )
    assert accountant.get_epsilon(DELTA) < true_epsilon([(0.1, 0.0), (0.9, 2.0)], [(1.0, 0.0)])


def test_what_dp_accounting_makes_of_replace_one() -> None:
    """Its RDP accountant takes the multiplier as it is, its PLD accountant doubles the sensitivity itself."""
    exact = gdp_epsilon(1.0 / 2.0, DELTA), gdp_epsilon(2.0 / 2.0, DELTA)
    rdp = RdpAccountant(neighboring_relation=REPLACE_ONE)
    rdp.compose(dp_accounting.SampledWithoutReplacementDpEvent(100, 100, dp_accounting.GaussianDpEvent(2.0)))
    assert exact[0] < rdp.get_epsilon(DELTA) < 1.15 * exact[0]
    pld = PLDAccountant(REPLACE_ONE)
    pld.compose(dp_accounting.GaussianDpEvent(2.0))
    assert pld.get_epsilon(DELTA) == pytest.approx(exact[1], rel=1e-3)


@pytest.mark.parametrize("relation", ["zero-out", "replace-one"])
@pytest.mark.parametrize("mus", [[0.5], [0.3, 0.4, 0.25]])
def test_everyone_drawn_is_a_gaussian(mus: list[float], relation: str) -> None:
    exact = gdp_epsilon(math.sqrt(math.fsum(mu**2 for mu in mus)), DELTA)
    assert claim(mus, "uniform", 100, relation=relation).epsilon == pytest.approx(exact, rel=1e-9)


def test_secret_sampling_is_worth_something() -> None:
    rounds = [0.125] * 30
    plain = claim(rounds, "shuffled").epsilon
    poisson, uniform = claim(rounds, "poisson", 5), claim(rounds, "uniform", 5)
    assert plain is not None
    assert poisson.epsilon is not None
    assert uniform.epsilon is not None
    assert poisson.epsilon < uniform.epsilon < plain
    assert uniform.accountant.startswith("RDP")


def test_shuffled_cohorts_compose_the_worst_rounds_a_client_may_be_in() -> None:
    found = claim([0.25, 1.0, 0.3, 0.5], "shuffled", participations=2)
    assert found.epsilon == pytest.approx(gdp_epsilon(math.sqrt(1.0 + 1.0 / 4.0), DELTA))
    assert found.accountant == "GDP (exact)"
    assert claim([0.25, 1.0], "shuffled", participations=9) == claim([0.25, 1.0], "shuffled")


@pytest.mark.parametrize("sampling", ["poisson", "uniform"])
def test_a_cap_that_may_bind_ends_amplification(sampling: str) -> None:
    rounds = [0.5] * 10
    capped = claim(rounds, sampling, participations=3)
    assert capped.epsilon == claim(rounds, "shuffled", participations=3).epsilon
    assert "depend on the past" in capped.words
    assert claim(rounds, sampling, participations=10) == claim(rounds, sampling)


@pytest.mark.parametrize("sampling", outsider.SAMPLINGS)
def test_no_noise_means_no_guarantee_and_next_to_none_is_no_hazard(sampling: str) -> None:
    found = claim([1.0, math.inf], sampling)
    assert found.epsilon is None
    assert found.words.startswith("No guarantee")
    weak = claim([1e3] * 5, sampling).epsilon
    assert weak is not None
    assert weak > 1e6
    assert claim([1e200], sampling).epsilon is None


def test_the_words_name_the_adversary_and_round_up() -> None:
    found = claim([0.5], "shuffled")
    assert found.epsilon == pytest.approx(1.99309, abs=1e-4)
    assert found.words.startswith("(2.00, 1e-5)-DP (zero-out) against an outsider who sees only")


def test_many_different_rounds_are_rounded_to_the_safe_side() -> None:
    mus = [0.5 / 1.0007**number for number in range(60)]
    groups = few_kinds(tuple((1.0, 1.0 / mu, 1) for mu in mus))
    assert len(groups) < 15
    rounded = [1.0 / z for _, z, count in groups for _ in range(count)]
    assert all(mu <= more <= mu * 1.0051 for more, mu in zip(rounded, mus, strict=True))
    assert few_kinds(Slots.of((1.0, 2.0, 1), (1.0, 4.0, 2)).rounds) == ((1.0, 2.0, 1), (1.0, 4.0, 2))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"sampling": "sorted"}, "sampling"),
        ({"mus": [math.nan]}, "mus"),
        ({"mus": [-1.0]}, "mus"),
        ({"unit": "nbafl"}, "unit"),
        ({"relation": "add-or-remove-one"}, "relation"),
        ({"unit": "record", "relation": "replace-one"}, "relation"),
        ({"participants": 0}, "participants"),
        ({"participants": 101}, "participants"),
        ({"participations": -1}, "participations"),
        ({"delta": 1.0}, "delta"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, object], field: str) -> None:
    with refuses(field):
        claim(**{"mus": [1.0], "sampling": "uniform", **changes})
