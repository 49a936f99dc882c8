"""Noise correlated over rounds, against matrices built by hand."""

from __future__ import annotations

from itertools import combinations, pairwise
from math import comb

import numpy as np
import pytest

from niss.errors import ConfigError
from niss.mechanism.noise import BandedRoot, banded_root


def root(bands: int, rounds: int) -> np.ndarray:
    """The square root of the matrix of prefix sums, cut off after so many diagonals."""
    entry = lambda lag: comb(2 * lag, lag) / 4.0**lag if 0 <= lag < bands else 0.0  # noqa: E731
    return np.array([[entry(row - column) for column in range(rounds)] for row in range(rounds)])


def test_the_whole_root_is_the_root_of_prefix_sums() -> None:
    assert root(9, 9) @ root(9, 9) == pytest.approx(np.tril(np.ones((9, 9))), abs=1e-12)


@pytest.mark.parametrize(("bands", "rounds"), [(1, 4), (3, 9), (4, 10), (20, 7)])
def test_the_banded_root_is_that_matrix(bands: int, rounds: int) -> None:
    noise, matrix = BandedRoot(rounds, bands, bands), root(bands, rounds)
    covariance = np.linalg.inv(matrix.T @ matrix)
    sums = np.tril(np.ones((rounds, rounds)))
    assert [noise.round_variance(t) for t in range(rounds)] == pytest.approx(np.diag(covariance), rel=1e-12)
    assert noise.model_variance == pytest.approx(np.diag(sums @ covariance @ sums.T), rel=1e-12)
    assert [noise.charge(t) for t in range(rounds)] == pytest.approx(np.sum(matrix**2, axis=0), rel=1e-12)


@pytest.mark.parametrize(("rounds", "separation", "bands"), [(9, 3, 3), (10, 4, 3), (8, 3, 2), (3, 5, 5)])
def test_charges_of_the_banded_root_cover_every_pattern_at_its_separation(
    rounds: int, separation: int, bands: int
) -> None:
    """Every set of rounds that are so far apart, and every choice of signs: brute force over all of them."""
    noise, matrix = BandedRoot(rounds, separation, bands), root(bands, rounds)
    most = -(-rounds // separation)
    worst = 0.0
    for count in range(1, most + 1):
        for pattern in combinations(range(rounds), count):
            if any(later - earlier < separation for earlier, later in pairwise(pattern)):
                continue
            for signs in np.ndindex(*(2,) * count):
                moved = np.zeros(rounds)
                moved[list(pattern)] = 1.0 - 2.0 * np.array(signs)
                exact = float(np.sum((matrix @ moved) ** 2))
                assert sum(map(noise.charge, pattern)) == pytest.approx(exact, rel=1e-12)
                worst = max(worst, exact)
    assert worst == pytest.approx(most * noise.per_participation, rel=1e-12)


def test_a_cap_on_participations_is_what_is_paid_for() -> None:
    noise = BandedRoot(9, 3, 3, 2)
    cohorts = [noise.charge(first) + noise.charge(first + 3) for first in range(3)]
    assert 2 * noise.per_participation == pytest.approx(max(cohorts), rel=1e-12)


def test_the_banded_root_gains_what_it_should() -> None:
    assert banded_root(30, 5).ratio_to_independent[0] == pytest.approx(0.343, rel=0.01)
    assert banded_root(100, 10).ratio_to_independent[0] == pytest.approx(0.183, rel=0.01)


def test_nothing_is_gained_where_everyone_always_takes_part() -> None:
    assert banded_root(20, 1).ratio_to_independent == pytest.approx((1.0, 1.0))


def test_a_run_does_not_go_on_past_its_planned_end() -> None:
    noise = BandedRoot(4, 2, 2)
    for ask in (noise.charge, noise.round_variance):
        with pytest.raises(ConfigError, match="planned for 4"):
            ask(4)
