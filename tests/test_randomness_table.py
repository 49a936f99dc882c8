"""The table of the normal quantile is what the tool builds, and as exact as the docstrings claim."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import mpmath
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from niss.errors import ConfigError, DataError
from niss.randomness import SecretStream, SimStream, normal_table, sampler_distance, sampler_factor
from niss.randomness.secret import DEVIATE_ERROR, _Work


def load_tool() -> ModuleType:
    path = Path(__file__).parents[1] / "tools" / "build_normal_table.py"
    spec = importlib.util.spec_from_file_location("build_normal_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load_tool()
ROWS = normal_table.ROWS
TAIL = 2**44


class Words:
    """A keystream of chosen words."""

    def __init__(self, words: list[int]) -> None:
        self._words = words

    def words(self, count: int, dtype: str) -> NDArray[Any]:
        assert count == len(self._words)
        return np.array(self._words, dtype=dtype)


def deviates(words: list[int], extra: list[int]) -> NDArray[np.float64]:
    """What the stream makes of these keystream words; `extra` for each, used in the tail alone."""
    stream: Any = SecretStream(bytes(32))
    stream._tail_keystream = Words([e for w, e in zip(words, extra, strict=True) if abs(w | 1) < TAIL])
    result: NDArray[np.float64] = stream._deviates(np.array(words, dtype=np.int64), _Work(len(words)))
    return result


def tail_probability(word: int, extra: int) -> mpmath.mpf:
    odd = abs(word | 1)
    scaled = mpmath.mpf(odd) if odd >= TAIL else odd - 1 + mpmath.mpf(2 * extra + 1) / 2**16
    return scaled / mpmath.mpf(2) ** 64


def test_a_sample_of_rows_is_what_the_tool_builds() -> None:
    table = normal_table.normal_table()
    assert table.shape == (6, ROWS)
    assert not table.flags.writeable
    rows = [0, 1, 63, 64, ROWS - 2, ROWS - 1, *SimStream(1).generator().integers(0, ROWS, 60).tolist()]
    for row in rows:
        assert table[:, row].tolist() == tool.coefficients(row)


@pytest.mark.slow
def test_the_whole_table_is_what_the_tool_builds() -> None:
    assert tool.build() == tool.DEFAULT.read_bytes()


def test_a_damaged_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normal_table, "SHA256", "0" * 64)
    normal_table.normal_table.cache_clear()
    try:
        with pytest.raises(DataError, match="damaged"):
            normal_table.normal_table()
    finally:
        normal_table.normal_table.cache_clear()


def sample() -> tuple[list[int], list[int]]:
    """Words of every octave, at random; both ends of octaves, and of every seventh segment of the bulk, where an
    interpolation is worst; in the tail with all lengths of the extra bits.
    """
    rng = SimStream(2).generator()
    starts = [(64 + part) << (octave - 6) for octave in range(44, 63) for part in range(64)]
    words = [
        end for first, after in zip(starts[:-1:7], starts[1::7], strict=True) for end in (first, after - 1)
    ]
    extra = [0] * len(words)
    for octave in range(1, 63):
        here = [2**octave, 2 ** (octave + 1) - 1, *rng.integers(2**octave, 2 ** (octave + 1), 60).tolist()]
        words += here
        extra += rng.integers(0, 2**16, len(here)).tolist()
    for word in (0, 2):
        for length in range(17):
            here = [2**length - 1, *rng.integers(0, 2**length, 10).tolist()]
            words += [word] * len(here)
            extra += here
    return words, extra


def test_deviates_are_exact_to_the_last_places() -> None:
    """`|z - quantile| <= 3/4 of 2^-51 (1 + z)` and 2e-15, which leaves room for the product with the deviation."""
    words, extra = sample()
    found = deviates(words, extra)
    assert found.min() >= 0.0
    with mpmath.workdps(40):
        exact = [tool.quantile(tail_probability(w, e)) for w, e in zip(words, extra, strict=True)]
        errors = np.array([float(abs(mpmath.mpf(z) - q)) for z, q in zip(found.tolist(), exact, strict=True)])
    assert errors.max() < 2e-15
    assert np.max(errors / (DEVIATE_ERROR * (1.0 + found))) < 0.75


def test_the_law_is_symmetric_and_ends_beyond_ten_sigma() -> None:
    words, extra = sample()
    # w | 1 of -w is -(w | 1) for odd w
    odd = [word | 1 for word in words]
    np.testing.assert_array_equal(deviates([-word for word in odd], extra), -deviates(odd, extra))
    (end,) = deviates([0], [0])
    assert 10.21 < end < 10.23
    assert math.erfc(end / math.sqrt(2.0)) == pytest.approx(2.0**-79, rel=1e-12)
    (lowest,) = deviates([-(2**63)], [0])
    assert lowest == 0.0


@pytest.mark.parametrize(
    ("sigma", "claim"), [(1, 1e-13), (4, 1e-13), (5, 1e-13), (6, 1e-13), (7, 1e-12), (8, 2e-9)]
)
def test_tail_probabilities(sigma: float, claim: float) -> None:
    """The probability that the sampler exceeds sigma, by bisection over all its words, against mpmath."""

    def exceeds(position: int) -> bool:
        """Positions are ordered: 2^16 of them to a word in the tail, one to a word elsewhere."""
        word, extra = (2 * (position >> 16), position & 0xFFFF) if tail else (2 * position, 0)
        return bool(deviates([word], [extra])[0] > sigma)

    with mpmath.workdps(40):
        ideal = mpmath.erfc(sigma / mpmath.sqrt(2)) / 2
        tail = ideal < mpmath.mpf(2) ** -20
        low, high = 0, (TAIL // 2 << 16 if tail else 2**62)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if exceeds(middle) else (low, middle)
        actual = mpmath.mpf(high) / mpmath.mpf(2) ** (79 if tail else 63)
        assert abs(actual / ideal - 1) < claim


def test_the_distance_of_one_draw_and_of_many() -> None:
    for steps in (0.01, 0.5, 1.0, 4.0, 256.0, 2.0**20, 2.0**40):
        assert sampler_distance(steps) <= 8.2e-16 * steps + 7e-16
    assert sampler_distance(256.0, 3e7) < 2e-9
    assert sampler_distance(256.0, 3e7) < 1e-3 * 3e7 * sampler_distance(256.0)
    assert sampler_distance(0.0, 1e9) == 0.0
    assert sampler_distance(2.0**50, 1e12) == 1.0
    both = sampler_distance([256.0, 500.0], [1e6, 1e7])
    assert sampler_distance(500.0, 1e7) <= both <= sampler_distance(256.0, 1e6) + sampler_distance(500.0, 1e7)
    assert sampler_distance([256.0, 256.0], 1e6) == sampler_distance(256.0, 2e6)
    for bad in ((-1.0, 1), (math.nan, 1), (1.0, -1), ([1.0, 2.0], [1, 2, 3])):
        with pytest.raises(ConfigError):
            sampler_distance(*bad)


@pytest.mark.parametrize("steps", [4.0, 256.0, 5000.0])
@pytest.mark.parametrize("draws", [1e4, 1e9])
def test_errors_as_large_as_allowed_stay_within_the_factor(steps: float, draws: float) -> None:
    """Every border off by as much as the sampler may be, in turns up and down: the worst for each cell."""
    cells = np.arange(-int(7 * steps), int(7 * steps) + 1)
    probability = stats.norm.pdf(cells / steps) / steps
    borders = (np.arange(cells.size + 1) + cells[0] - 0.5) / steps
    moved = 2.0**-64 + 2.0**-51 * (1.0 + np.abs(borders)) * stats.norm.pdf(borders)
    moved[::2] *= -1.0
    moved[np.abs(borders) > 4.77] *= 0.0  # the refined tail is a case of its own
    moved[[0, -1]] = 0.0
    x = np.diff(moved) / probability
    # Too little for the plain distance of all draws to be within it.
    factor = sampler_factor(steps, draws, rest=1e-19 * draws)
    assert 0.0 < factor < 1e-2
    log_probability = [
        draws * np.log1p(np.sum(probability * np.expm1((1.0 + order) * np.log1p(x)))) - order * factor
        for order in 2.0 ** np.arange(4.0, 50.0)
        if order * np.abs(x).max() < 1.0
    ]
    # Chernoff's bound on a larger factor, from the exact moments.
    assert min(log_probability) < -70.0 * math.log(2.0)


def test_the_factor_grows_with_deviation_and_draws_and_ends() -> None:
    found = [sampler_factor(steps, 1e6, rest=1e-8) for steps in (4.0, 256.0, 1e4, 1e5)]
    assert found == sorted(found)
    assert found[0] < 1e-9
    assert found[-1] < 1e-4
    assert sampler_factor(256.0, 1e4, rest=1e-8) < sampler_factor(256.0, 1e10, rest=1e-8) < 1e-5
    assert sampler_factor(256.0, 1e12, rest=1e-20) == math.inf
    assert sampler_factor(2.0**40, 1e4, rest=1e-8) == math.inf
    assert sampler_factor(5e-324, 1e4, rest=1e-8) < 1e-12


@pytest.mark.parametrize("steps", [0.5, 1.0, 3.0])
def test_the_cells_of_the_sampler_are_within_the_claimed_distance(steps: float) -> None:
    """All borders up to 4.5 sigma, their exact probabilities by bisection over the 2^62 words."""
    total = mpmath.mpf(0)
    with mpmath.workdps(40):
        for border in range(int(4.5 * steps)):
            low, high = 0, 2**62
            while high - low > 1:
                middle = (low + high) // 2
                beyond = np.rint(steps * deviates([2 * middle], [0])[0]) > border
                low, high = (middle, high) if beyond else (low, middle)
            ideal = mpmath.erfc((border + mpmath.mpf("0.5")) / steps / mpmath.sqrt(2)) / 2
            total += 2 * abs(mpmath.mpf(high) / mpmath.mpf(2) ** 63 - ideal)
    assert 0 < total < sampler_distance(steps)
