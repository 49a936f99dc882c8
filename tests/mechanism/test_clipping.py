"""The L2 clip keeps its bound after rounding, at every magnitude; the element clip is separate."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from niss.errors import PrivacyError
from niss.mechanism import clip_elements, clip_l2, l2_norm, require_finite
from support.refusals import refuses

Vector = NDArray[np.floating[Any]]
FINITE: dict[str, Any] = {"allow_nan": False, "allow_infinity": False}

vectors = st.one_of(
    hnp.arrays(np.float32, st.integers(1, 40), elements=hnp.from_dtype(np.dtype(np.float32), **FINITE)),
    hnp.arrays(np.float64, st.integers(1, 40), elements=hnp.from_dtype(np.dtype(np.float64), **FINITE)),
)
bounds = st.floats(-12.0, 6.0).map(lambda power: 10.0**power)


def _exact_square(vector: Vector) -> Fraction:
    return sum((Fraction(float(entry)) ** 2 for entry in vector), Fraction(0))


@settings(deadline=None, max_examples=400)
@given(update=vectors, bound=bounds)
def test_a_clipped_update_keeps_its_direction_and_its_bound_after_rounding(
    update: Vector, bound: float
) -> None:
    """By the float64 norm exactly; by exact arithmetic up to the rounding of that norm itself."""
    clipped = clip_l2(update, bound)
    assert clipped.dtype == update.dtype
    assert l2_norm(clipped) <= bound
    assert _exact_square(clipped) <= Fraction(bound) ** 2 * (1 + Fraction(1, 10**14))
    if l2_norm(update) <= bound:
        np.testing.assert_array_equal(clipped, update)
        assert clipped is not update
        return
    assert l2_norm(clipped) >= bound * (1.0 - 1e-5)
    before, after = (row.astype(np.float64) / float(np.max(np.abs(row))) for row in (update, clipped))
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_huge_entries_neither_overflow_nor_vanish(dtype: type[np.floating[Any]]) -> None:
    update = np.full(4, np.finfo(dtype).max, dtype=dtype)
    np.testing.assert_allclose(clip_l2(update, 1e-10), 0.5e-10, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_bound_below_the_smallest_number_leaves_zero_at_once(dtype: type[np.floating[Any]]) -> None:
    tiny = float(np.finfo(dtype).smallest_subnormal)
    clipped = clip_l2(np.ones(3, dtype=dtype), max(0.75 * tiny, 5e-324))
    np.testing.assert_array_equal(clipped, np.zeros(3, dtype=dtype))


def test_subnormal_updates_have_a_norm() -> None:
    update = np.full(4, 5e-324)
    assert l2_norm(update) == 1e-323
    np.testing.assert_array_equal(clip_l2(update, 1.0), update)


def test_norm_does_not_overflow_where_its_squares_do() -> None:
    assert l2_norm(np.array([3e200, 4e200])) == pytest.approx(5e200, rel=1e-15)
    assert l2_norm(np.array([3e30, 4e30], dtype=np.float32)) == pytest.approx(5e30, rel=1e-6)
    assert l2_norm(np.array([])) == 0.0


def test_a_zero_update_stays_zero_and_the_input_is_left_alone() -> None:
    np.testing.assert_array_equal(clip_l2(np.zeros(5), 0.1), np.zeros(5))
    update = np.array([3.0, 4.0])
    clipped = clip_l2(update, 1.0)
    np.testing.assert_allclose(clipped, [0.6, 0.8], rtol=1e-15)
    np.testing.assert_array_equal(update, [3.0, 4.0])


@pytest.mark.parametrize("clip", [clip_l2, clip_elements])
def test_nan_and_infinity_are_refused_with_their_count(clip: Any) -> None:
    update = np.array([1.0, math.nan, math.inf, -math.inf, 2.0])
    with pytest.raises(PrivacyError, match="3 of 5 entries"):
        clip(update, 1.0)
    with pytest.raises(PrivacyError, match="learning rate"):
        require_finite(update)


@pytest.mark.parametrize("clip", [clip_l2, clip_elements])
@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan, math.inf])
def test_a_bound_must_be_a_positive_number(clip: Any, bound: float) -> None:
    with refuses("clip"):
        clip(np.ones(2), bound)


@settings(deadline=None, max_examples=100)
@given(update=vectors, bound=bounds)
def test_elements_are_cut_one_by_one(update: Vector, bound: float) -> None:
    cut = clip_elements(update, bound)
    limit = update.dtype.type(bound)
    assert cut.dtype == update.dtype
    inside = np.abs(update) <= limit
    np.testing.assert_array_equal(cut[inside], update[inside])
    np.testing.assert_array_equal(cut[~inside], np.copysign(limit, update[~inside]))


def test_an_element_bound_beyond_the_type_cuts_nothing() -> None:
    update = np.array([1.0, -3e38], dtype=np.float32)
    np.testing.assert_array_equal(clip_elements(update, 1e39), update)
