"""Noise correlated over rounds, against matrices built by hand and the figures of others."""

from __future__ import annotations

import json
import os
import subprocess
from itertools import combinations, pairwise
from math import comb

import numpy as np
import pytest

from niss.errors import ConfigError
from niss.mechanism.noise import CorrelatedNoise, correlated_noise


def root(bands: int, rounds: int) -> np.ndarray:
    """The square root of the matrix of prefix sums, cut off after so many diagonals."""
    entry = lambda lag: comb(2 * lag, lag) / 4.0**lag if 0 <= lag < bands else 0.0  # noqa: E731
    return np.array([[entry(row - column) for column in range(rounds)] for row in range(rounds)])


def matrix_of(noise: CorrelatedNoise) -> np.ndarray:
    """C, from its rows."""
    matrix = np.zeros((noise.rounds, noise.rounds))
    for number in range(noise.rounds):
        for lag, entry in enumerate(noise.row(number)):
            matrix[number, number - lag] = entry
    return matrix


CASES = [(120, 110, 105), (9, 3, 3), (10, 4, 3), (8, 3, 2), (3, 5, 5), (4, 1, 1), (7, 20, 20)]


def test_the_whole_root_is_the_root_of_prefix_sums() -> None:
    assert root(9, 9) @ root(9, 9) == pytest.approx(np.tril(np.ones((9, 9))), abs=1e-12)


@pytest.mark.parametrize("strategy", ["optimised", "square-root"])
@pytest.mark.parametrize(("rounds", "separation", "bands"), CASES)
def test_all_that_is_said_of_the_noise_is_said_by_its_matrix(
    rounds: int, separation: int, bands: int, strategy: str
) -> None:
    noise = correlated_noise(rounds, separation, bands, strategy=strategy)
    matrix = matrix_of(noise)
    if strategy == "square-root":
        np.testing.assert_allclose(matrix, root(bands, rounds), rtol=1e-14)
    covariance = np.linalg.inv(matrix.T @ matrix)
    sums = np.tril(np.ones((rounds, rounds)))
    assert [noise.round_variance(t) for t in range(rounds)] == pytest.approx(np.diag(covariance), rel=1e-12)
    assert noise.model_variance == pytest.approx(np.diag(sums @ covariance @ sums.T), rel=1e-12)
    assert [noise.charge(t) for t in range(rounds)] == pytest.approx(np.sum(matrix**2, axis=0), rel=1e-12)
    for number in range(rounds):
        earlier = noise.earlier_covariances(number)
        np.testing.assert_allclose(earlier, covariance[number, :number][::-1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("strategy", ["optimised", "square-root"])
@pytest.mark.parametrize(("rounds", "separation", "bands"), CASES[1:5])
def test_charges_cover_every_pattern_at_its_separation(
    rounds: int, separation: int, bands: int, strategy: str
) -> None:
    """Every set of rounds that are so far apart, and every choice of signs: brute force over all of them."""
    noise = correlated_noise(rounds, separation, bands, strategy=strategy)
    matrix, most, worst = matrix_of(noise), -(-rounds // separation), 0.0
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
    if strategy == "optimised":
        assert worst == pytest.approx(most, rel=1e-12)


@pytest.mark.parametrize("strategy", ["optimised", "square-root"])
def test_a_cap_on_participations_is_what_is_paid_for(strategy: str) -> None:
    """Whichever two rounds at that separation a client takes part in."""
    noise = correlated_noise(10, 3, 3, 2, strategy)
    pairs = [pair for pair in combinations(range(10), 2) if pair[1] - pair[0] >= 3]
    costs = [sum(map(noise.charge, pair)) for pair in pairs]
    assert 2 * noise.per_participation == pytest.approx(max(costs), rel=1e-12)


# Mean noise in the model over that of independent noise, with as many bands as the separation allows; those of the
# optimised bands were found by another optimiser (BandMF in jax_privacy).
@pytest.mark.parametrize(
    ("rounds", "separation", "square_root", "optimised"),
    [
        *((30, 6, 0.317, 0.301), (60, 6, 0.270, 0.250), (100, 10, 0.183, 0.167), (20, 1, 1.0, 1.0)),
        # Only who is in the first round can be in the last one: what others pay leaves room for longer columns.
        *((31, 30, 0.183, 0.133), (7, 3, 0.560, 0.517)),
    ],
)
def test_correlated_noise_gains_what_it_should(
    rounds: int, separation: int, square_root: float, optimised: float
) -> None:
    for strategy, mean in (("square-root", square_root), ("optimised", optimised)):
        found = correlated_noise(rounds, separation, strategy=strategy).ratio_to_independent[0]
        assert found == pytest.approx(mean, abs=0.001)


JAX_PRIVACY = """
import json, sys, numpy
from jax_privacy.matrix_factorization import banded
found = {}
for rounds, bands in ((30, 6), (60, 6), (100, 10)):
    matrix = numpy.array(banded.optimize(rounds, bands=bands).materialize(), dtype=float)
    matrix /= numpy.linalg.norm(matrix, axis=0)
    sums = numpy.tril(numpy.ones((rounds, rounds))) @ numpy.linalg.inv(matrix)
    found[f"{rounds} {bands}"] = (sums**2).sum()
print(json.dumps(found))
"""


@pytest.mark.slow
def test_the_optimised_bands_are_those_of_jax_privacy() -> None:
    """In an environment of its own, whose Python `NISS_JAX_PRIVACY` names."""
    if (python := os.environ.get("NISS_JAX_PRIVACY")) is None:
        pytest.skip("NISS_JAX_PRIVACY names no Python that has jax_privacy")
    printed = subprocess.run([python, "-c", JAX_PRIVACY], capture_output=True, text=True, check=True).stdout
    for shape, theirs in json.loads(printed).items():
        rounds, bands = map(int, shape.split())
        assert correlated_noise(rounds, bands).model_variance.sum() == pytest.approx(theirs, rel=1e-4)


def test_no_small_change_of_the_optimised_bands_leaves_less() -> None:
    """Nor does another start: the problem is convex in C'C with its bands and a diagonal of ones."""
    rng, noise = np.random.default_rng(3), correlated_noise(30, 6)
    least = noise.model_variance.sum()
    for size in (1e-3, 1e-2, 0.1, 1.0):
        columns = noise.columns + size * rng.standard_normal(noise.columns.shape) * (noise.columns != 0.0)
        columns /= np.linalg.norm(columns, axis=0)
        assert CorrelatedNoise(columns, 6).model_variance.sum() >= least * (1.0 - 1e-9)


@pytest.mark.parametrize(
    ("rounds", "separation", "mean"), [(1_000, 10, 0.1151), (1_000, 100, 0.02654), (400, 400, 0.03654)]
)
def test_in_longer_runs_all_columns_are_alike(rounds: int, separation: int, mean: float) -> None:
    """They cost the same, and leave little more than the optimised ones (0.1141 with ten bands), and less than the
    square root."""
    noise = correlated_noise(rounds, separation)
    assert noise.worst_client == pytest.approx(rounds / separation, rel=1e-12)
    assert noise.ratio_to_independent[0] == pytest.approx(mean, rel=0.001)
    assert correlated_noise(rounds, separation, strategy="square-root").ratio_to_independent[0] > mean * 1.01


@pytest.mark.parametrize("strategy", ["optimised", "square-root"])
def test_a_run_does_not_go_on_past_its_planned_end(strategy: str) -> None:
    noise = correlated_noise(4, 2, strategy=strategy)
    for ask in (noise.charge, noise.round_variance, noise.row, noise.earlier_covariances):
        with pytest.raises(ConfigError, match="planned for 4"):
            ask(4)
