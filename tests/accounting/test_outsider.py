"""The outsider's claim is never below what such an outsider can really tell, and says what it rests on."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from niss.accounting import outsider
from niss.accounting.outsider import OutsiderClaim, outsider_epsilon
from niss.errors import ConfigError
from niss.mechanism import gdp_epsilon

DELTA = 1e-5
REPLACE_ONE = dp_accounting.NeighboringRelation.REPLACE_ONE


def claim(multipliers: list[float], sampling: str, participants: int = 20, **more: object) -> OutsiderClaim:
    given = {"clients": 100, "participants": participants, "delta": DELTA, **more}
    return outsider_epsilon(noise_multipliers=multipliers, sampling=sampling, **given)


def true_epsilon(z: float, probability: float, shift: float, delta: float) -> float:
    """Of one round by integration: the client is in it with that probability, and then moves the sum by `shift`."""
    x = np.linspace(-12.0 * z, shift + 12.0 * z, 200_001)
    step = x[1] - x[0]

    def normal(centre: float) -> np.ndarray:
        return np.exp(-0.5 * ((x - centre) / z) ** 2) / (z * math.sqrt(2.0 * math.pi))

    without = normal(0.0)
    mixed = (1.0 - probability) * without + probability * normal(shift)

    def holds(epsilon: float) -> bool:
        pairs = ((mixed, without), (without, mixed))
        return all(
            np.maximum(one - math.exp(epsilon) * other, 0.0).sum() * step <= delta for one, other in pairs
        )

    low, high = 0.0, 60.0
    for _ in range(50):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


@pytest.mark.parametrize(("z", "participants"), [(1.0, 20), (0.7, 5), (2.0, 90)])
def test_poisson_sampling_is_told_exactly(z: float, participants: int) -> None:
    found = claim([z], "poisson", participants)
    assert found.epsilon == pytest.approx(true_epsilon(z, participants / 100, 1.0, DELTA), rel=2e-3)
    assert found.relation == "add-or-remove-one"
    assert found.accountant.startswith("PLD")


@pytest.mark.parametrize(("z", "participants"), [(1.0, 90), (2.0, 50), (4.0, 20), (8.0, 5)])
def test_sampling_without_replacement_counts_the_sensitivity_twice(z: float, participants: int) -> None:
    """Others at -clip, the client at -clip or +clip: drawn, it moves the sum by twice the clip."""
    found = claim([z], "uniform", participants)
    truth = true_epsilon(z, participants / 100, 2.0, DELTA)
    assert found.epsilon is not None
    assert truth <= found.epsilon
    assert found.relation == "replace-one"


def test_an_undoubled_sensitivity_would_promise_too_much() -> None:
    accountant = RdpAccountant(neighboring_relation=REPLACE_ONE)
    accountant.compose(
        dp_accounting.SampledWithoutReplacementDpEvent(100, 90, dp_accounting.GaussianDpEvent(1.0))
    )
    assert accountant.get_epsilon(DELTA) < true_epsilon(1.0, 0.9, 2.0, DELTA)


def test_what_dp_accounting_makes_of_replace_one() -> None:
    """Its RDP accountant takes the multiplier as it is, its PLD accountant doubles the sensitivity itself."""
    exact = gdp_epsilon(1.0 / 2.0, DELTA), gdp_epsilon(2.0 / 2.0, DELTA)
    rdp = RdpAccountant(neighboring_relation=REPLACE_ONE)
    rdp.compose(dp_accounting.SampledWithoutReplacementDpEvent(100, 100, dp_accounting.GaussianDpEvent(2.0)))
    assert exact[0] < rdp.get_epsilon(DELTA) < 1.15 * exact[0]
    pld = PLDAccountant(REPLACE_ONE)
    pld.compose(dp_accounting.GaussianDpEvent(2.0))
    assert pld.get_epsilon(DELTA) == pytest.approx(exact[1], rel=1e-3)


@pytest.mark.parametrize("multipliers", [[2.0], [3.0, 2.5, 4.0]])
def test_everyone_drawn_is_a_gaussian_of_twice_the_sensitivity(multipliers: list[float]) -> None:
    exact = gdp_epsilon(2.0 * math.sqrt(math.fsum(z**-2 for z in multipliers)), DELTA)
    assert claim(multipliers, "uniform", 100).epsilon == pytest.approx(exact, rel=1e-9)
    alone = outsider._without_replacement(multipliers, 100, 100, DELTA).epsilon
    assert alone is not None
    assert exact < alone < 1.15 * exact


def test_secret_sampling_is_worth_something() -> None:
    rounds = [8.0] * 30
    plain = claim(rounds, "shuffled").epsilon
    poisson, uniform = claim(rounds, "poisson", 5), claim(rounds, "uniform", 5)
    assert plain is not None
    assert poisson.epsilon is not None
    assert uniform.epsilon is not None
    assert poisson.epsilon < uniform.epsilon < plain
    assert uniform.accountant.startswith("RDP")


def test_shuffled_cohorts_compose_the_worst_rounds_a_client_may_be_in() -> None:
    found = claim([4.0, 1.0, 3.0, 2.0], "shuffled", participations=2)
    assert found.epsilon == pytest.approx(gdp_epsilon(math.sqrt(1.0 + 1.0 / 4.0), DELTA))
    assert found.accountant == "GDP (exact)"
    assert claim([4.0, 1.0], "shuffled", participations=9) == claim([4.0, 1.0], "shuffled")


@pytest.mark.parametrize("sampling", ["poisson", "uniform"])
def test_a_cap_that_may_bind_ends_amplification(sampling: str) -> None:
    rounds = [2.0] * 10
    capped = claim(rounds, sampling, participations=3)
    assert capped.epsilon == claim(rounds, "shuffled", participations=3).epsilon
    assert "depend on the past" in capped.words
    assert claim(rounds, sampling, participations=10) == claim(rounds, sampling)


@pytest.mark.parametrize("sampling", outsider.SAMPLINGS)
def test_no_noise_means_no_guarantee_and_next_to_none_is_no_hazard(sampling: str) -> None:
    found = claim([1.0, 0.0], sampling)
    assert found.epsilon is None
    assert found.words.startswith("No guarantee")
    weak = claim([1e-3] * 5, sampling).epsilon
    assert weak is not None
    assert weak > 1e6
    assert claim([1e-200], sampling).epsilon is None


def test_the_words_name_the_adversary_and_round_up() -> None:
    found = claim([2.0], "shuffled")
    assert found.epsilon == pytest.approx(1.99309, abs=1e-4)
    assert found.words.startswith("(2.00, 1e-05)-DP (zero-out) against an outsider who sees only")


def test_many_different_rounds_are_rounded_to_the_safe_side() -> None:
    multipliers = [2.0 * 1.0007**number for number in range(60)]
    groups = outsider._grouped(multipliers)
    assert len(groups) < 15
    rounded = sorted(z for z, count in groups for _ in range(count))
    assert all(z / 1.0051 <= less <= z for less, z in zip(rounded, multipliers, strict=True))
    assert outsider._grouped([2.0, 3.0, 2.0]) == [(2.0, 2), (3.0, 1)]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"sampling": "sorted"}, "sampling"),
        ({"noise_multipliers": [math.inf]}, "noise_multipliers"),
        ({"noise_multipliers": [-1.0]}, "noise_multipliers"),
        ({"participants": 0}, "participants"),
        ({"participants": 101}, "participants"),
        ({"participations": -1}, "participations"),
        ({"delta": 1.0}, "delta"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, object], field: str) -> None:
    good = {
        "noise_multipliers": [1.0],
        "sampling": "uniform",
        "clients": 100,
        "participants": 10,
        "delta": DELTA,
    }
    with pytest.raises(ConfigError) as caught:
        outsider_epsilon(**{**good, **changes})
    assert caught.value.field == field
