"""A vector that is made a block at a time is the one that numpy makes of whole arrays, to the last bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from niss.errors import LocalProtocolError
from niss.mechanism import Grid, clip_l2
from niss.mechanism.blocks import BLOCK, Blocks
from niss.mechanism.clipping import clipped
from niss.mechanism.rounding import round_randomly
from niss.randomness import SecretStream

SIZES = (1, 7, BLOCK, BLOCK + 1, 3 * BLOCK + 1000, 199_210)


def drawn(size: int, seed: int = 1, dtype: Any = np.float64) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=size).astype(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_norm_is_that_of_the_whole_array(size: int, dtype: Any) -> None:
    values = drawn(size, dtype=dtype)
    largest = float(np.abs(values).max())
    whole = largest * math.sqrt(float(np.sum(np.square(values.astype(np.float64) / largest))))
    assert Blocks.of(values).norm == whole
    assert Blocks.of(values).largest == largest


def test_parts_one_after_another_are_read_across_their_borders() -> None:
    parts = [drawn(size, seed) for seed, size in enumerate((5, BLOCK, 0, 2 * BLOCK + 3, 1))]
    joined, whole = Blocks.joined([Blocks.of(part) for part in parts]), np.concatenate(parts)
    np.testing.assert_array_equal(joined.array(), whole)
    for start, stop in ((0, 0), (3, 7), (5, BLOCK + 5), (4, whole.size), (whole.size - 1, whole.size)):
        np.testing.assert_array_equal(joined.read(start, stop), whole[start:stop])
    np.testing.assert_array_equal(joined.part(3, 2 * BLOCK).array(), whole[3 : 2 * BLOCK])
    assert Blocks.joined([Blocks.of(np.empty(0))]).array().size == 0


@pytest.mark.parametrize("clip", [0.5, 1e9])
@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_a_difference_is_clipped_and_rounded_as_if_it_were_an_array(clip: float, kind: Any) -> None:
    """The same coins, the same steps, whatever they are read from and however wide they are."""
    before, after = drawn(70_001, 2, np.float32), drawn(70_001, 3, np.float32)
    update = np.subtract(after, before, dtype=np.float64)
    lazy = Blocks(
        update.size, lambda start, stop: np.subtract(after[start:stop], before[start:stop], dtype=np.float64)
    )
    np.testing.assert_array_equal(clipped(lazy, clip).array(), clip_l2(update, clip))
    seed, grid, bound = bytes(range(32)), Grid(12), min(clip, 1e3) / 4
    wanted = round_randomly(grid, clip_l2(update, clip) / 4, bound, SecretStream(seed))
    found = round_randomly(
        grid, clipped(lazy, clip).map(lambda block: block / 4), bound, SecretStream(seed), kind
    )
    assert found.dtype == kind
    np.testing.assert_array_equal(found, wanted)


def test_what_was_released_is_read_no_more() -> None:
    source = Blocks.of(drawn(10))
    made = Blocks.joined([source.map(np.negative).part(0, 5), Blocks.of(drawn(3))])
    assert made.array().size == 8
    made.release()
    for one in (made, source):
        with pytest.raises(LocalProtocolError, match="released"):
            one.array()
