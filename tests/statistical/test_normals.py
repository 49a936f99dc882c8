"""The simulator's fast Gaussians are Gaussians. Streams are fixed; each check would fail by chance once in 1e6."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from niss.randomness import SimStream
from niss.randomness.sim import BLOCK, normal_blocks

COUNT = 4_000_000
FALSE_ALARM = 1e-6


def drawn(stream: SimStream, count: int, dtype: type = np.float32) -> NDArray[np.floating]:
    values = np.empty(count, dtype=dtype)
    for place, block in normal_blocks(stream, count, dtype):
        values[place] = block
    return values


@pytest.fixture(scope="module")
def many() -> NDArray[np.float64]:
    return drawn(SimStream(7).child("normals"), COUNT).astype(np.float64)


def test_moments_are_those_of_a_standard_normal(many: NDArray[np.float64]) -> None:
    limit = stats.norm.isf(FALSE_ALARM / 2)
    for power, mean, variance in ((1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)):
        assert abs(np.mean(many**power) - mean) <= limit * np.sqrt(variance / COUNT)


def test_the_distribution_is_the_normal_one_everywhere(many: NDArray[np.float64]) -> None:
    edges = stats.norm.ppf(np.arange(1, 1000) / 1000)
    counts = np.bincount(np.searchsorted(edges, many), minlength=1000)
    assert stats.chisquare(counts).pvalue > FALSE_ALARM
    for sigma in (3.0, 4.0, 4.5):
        expected = COUNT * 2.0 * stats.norm.sf(sigma)
        found = int(np.sum(np.abs(many) > sigma))
        low, high = stats.poisson.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], expected)
        assert low <= found <= high


def test_the_two_of_a_pair_are_independent(many: NDArray[np.float64]) -> None:
    """Box and Muller give two numbers with one radius: neither they nor their squares may be correlated."""
    pairs = many[: COUNT // BLOCK * BLOCK].reshape(-1, 2, BLOCK // 2)
    first, second = pairs[:, 0].reshape(-1), pairs[:, 1].reshape(-1)
    limit = stats.norm.isf(FALSE_ALARM / 2) / np.sqrt(first.size)
    assert abs(np.corrcoef(first, second)[0, 1]) <= limit
    assert abs(np.corrcoef(first**2, second**2)[0, 1]) <= limit
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) <= limit


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("count", [0, 1, 2, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_every_place_is_filled_once_and_again_the_same(count: int, dtype: type) -> None:
    stream = SimStream(3).child("places")
    values = drawn(stream, count, dtype)
    assert values.dtype == dtype
    assert np.all(np.isfinite(values))
    np.testing.assert_array_equal(values, drawn(stream, count, dtype))
    if count > 2:
        assert np.unique(values).size > 0.99 * count
        assert not np.array_equal(values, drawn(SimStream(4).child("places"), count, dtype))


def test_the_extreme_words_give_finite_numbers() -> None:
    class Extreme:
        """Stands in for a bit generator whose every word is the same."""

        def __init__(self, word: int) -> None:
            self.word = word
            self.bit_generator = self

        def random_raw(self, count: int) -> NDArray[np.uint64]:
            return np.full(count, self.word, dtype=np.uint64)

    from niss.randomness.sim import _box_muller

    for word in (0, 2**64 - 1, 2**63, 2**32 - 1):
        out = np.empty(8, dtype=np.float32)
        _box_muller(Extreme(word), out)  # type: ignore[arg-type]
        assert np.all(np.isfinite(out))
        assert np.all(np.abs(out) < 6.77)
