"""Randomised rounding: right on average, never longer than the bound, zero for zero."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from niss.mechanism import clip_l2, rounding
from niss.mechanism.blocks import Blocks
from niss.mechanism.grid import Grid
from niss.mechanism.rounding import MARGINS, beside, round_randomly, round_records, squared_norm
from niss.randomness import SecretStream, SimStream
from support.refusals import refuses


def coins(number: int) -> SecretStream:
    return SecretStream(number.to_bytes(32, "little"))


def exact_square(steps: Any) -> int:
    return sum(int(step) ** 2 for step in steps.ravel().tolist())


def assert_rounded(grid: Grid, values: Any, bound: float | Fraction, steps: Any) -> None:
    """Within the bound in exact arithmetic; no entry turned round, moved away by a step, or made of nothing."""
    assert steps.dtype == np.int64
    assert steps.shape == values.shape
    assert Fraction(exact_square(steps), 4**grid.bits) <= Fraction(bound) ** 2
    for value, step in zip(values.ravel().tolist(), steps.ravel().tolist(), strict=True):
        size = abs(Fraction(value)) * 2**grid.bits
        assert abs(step) <= math.ceil(size)
        assert step * value >= 0.0


small = st.one_of(st.floats(-4.0, 4.0, width=32), st.sampled_from([0.5, -0.5, 0.25, 1e-30, -1e-30, 0.0]))
vectors = hnp.arrays(
    st.sampled_from([np.float16, np.float32, np.float64]), st.integers(0, 40), elements=small
)
seeds = st.integers(0, 2**32)


@settings(deadline=None, max_examples=300)
@given(values=vectors, bits=st.integers(0, 40), ratio=st.floats(1e-3, 1e3), seed=seeds)
def test_the_norm_never_exceeds_the_bound(values: Any, bits: int, ratio: float, seed: int) -> None:
    """Whether the values are shorter than the bound, on it, or longer: the guarantee rests on no caller."""
    norm = float(np.linalg.norm(values.astype(np.float64)))
    grid, bound = Grid(bits), max(norm, 1e-6) * ratio
    assert_rounded(grid, values, bound, round_randomly(grid, values, bound, coins(seed)))


@settings(deadline=None, max_examples=200)
@given(
    pair=st.tuples(*[hnp.arrays(np.float64, 12, elements=st.floats(-3, 3))] * 2),
    clip=st.floats(0.1, 8.0),
    seed=seeds,
)
def test_both_sensitivities_hold_for_all_coins(pair: tuple[Any, Any], clip: float, seed: int) -> None:
    """The premise of the proof: with whatever coins on either side, one clip to zero, two to another update."""
    grid, limit = Grid(3), Fraction(clip) ** 2
    parts = [
        round_randomly(grid, clip_l2(values, clip), clip, coins(seed + side))
        for side, values in enumerate(pair)
    ]
    nothing = round_randomly(grid, np.zeros(12), clip, coins(seed))
    assert not nothing.any()
    for part in parts:
        assert Fraction(exact_square(part - nothing), 4**3) <= limit
    assert Fraction(exact_square(parts[0] - parts[1]), 4**3) <= 4 * limit


def test_values_that_lengthen_most() -> None:
    """Norms on the bound, where nearly every draw would be too long if nothing was done."""
    rest = np.full(2_000, 0.3)
    rest[0] = 5000.5
    cases = {
        "half a step": np.full(2_000, 0.5),
        "a quarter": np.full(2_000, -0.25),
        "tiny": np.full(2_000, 1e-3),
        "hardly anything": np.full(2_000, 2.0**-60),
        "one large": rest,
        "just above a step": np.full(2_000, 1.0 + 2.0**-20),
        "large": np.full(2_000, 2.0**40 + 0.5),
        "huge": np.full(2_000, 2.0**62),
        "one": np.array([1.5]),
        "none": np.zeros(0),
    }
    for seed, values in enumerate(cases.values()):
        norm = math.sqrt(sum(Fraction(value) ** 2 for value in values.tolist())) if values.size else 1.0
        for kind in (np.float32, np.float64):
            for ratio in (1.0, 0.999, 1e-6, 1e12):
                given, bound = values.astype(kind), max(norm * ratio, 1e-300)
                assert_rounded(Grid(0), given, bound, round_randomly(Grid(0), given, bound, coins(seed)))


def test_what_is_on_the_grid_is_left_alone_up_to_the_very_bound() -> None:
    grid = Grid(10)
    values = np.array([3.0, -4.0, 0.0, 2.0**-10])
    bound = math.nextafter(math.sqrt(25.0 + 2.0**-20), math.inf)
    assert round_randomly(grid, values, bound, coins(1)).tolist() == [3072, -4096, 0, 1]
    assert round_randomly(grid, values[:3], 5.0, coins(1)).tolist() == [3072, -4096, 0]
    third = Fraction(1, 3)
    assert exact_square(round_randomly(Grid(0), np.array([third * 9.0]), third * 9, coins(1))) == 9


@pytest.mark.parametrize(
    "value", [0.001, 0.05, 0.25, 0.5, 0.9, 0.999, -0.05, -0.5, 1.3, -7.75, 1000.5, 2.0**45 + 0.5]
)
def test_every_entry_is_right_on_average(value: float) -> None:
    """Each of 50,000 goes up with the probability of its fraction: a binomial test, false-alarm rate 1e-8 each."""
    count = 50_000
    bound = 2.0 * math.sqrt(count) * math.ceil(abs(value))
    steps = round_randomly(Grid(0), np.full(count, value), bound, coins(7))
    sizes = np.abs(steps)
    below = math.floor(abs(value))
    assert set(np.unique(sizes).tolist()) <= {below, below + 1}
    up = int(np.sum(sizes > below))
    assert stats.binomtest(up, count, abs(value) - below).pvalue > 1e-8


def test_entries_are_rounded_independently() -> None:
    """Neighbours, and the same entry in two draws: correlation below 6 deviations, false-alarm rate 2e-9 each."""
    values = np.full(200_000, 0.5)
    first, second = (round_randomly(Grid(0), values, 1e3, coins(seed)) - 0.5 for seed in (1, 2))
    for left, right in ((first, second), (first[1:], first[:-1])):
        assert abs(float(np.mean(left * right)) / 0.25) < 6.0 / math.sqrt(left.size)


@pytest.mark.parametrize(("steps", "cut_keeps", "kept"), [(3.0, 0.87, 0.985), (0.25, 0.01, 0.30)])
def test_an_update_on_the_clip_keeps_what_its_bound_allows(
    steps: float, cut_keeps: float, kept: float
) -> None:
    """The share left along the update: of normal entries, nearly all of it or what any rounding could keep.

    The share scatters by less than 0.004 (deviation of a sum of 100,000 entries), the margins are six times that.
    """
    values = np.random.default_rng(3).standard_normal(100_000) * steps
    norm = float(np.linalg.norm(values))
    rounded = round_randomly(Grid(0), values, norm, coins(3))
    assert kept - 0.024 < float(rounded @ values) / norm**2 < 1.0
    assert squared_norm(rounded) > 0.9 * norm**2  # Three deviations of it, 4 %, are left free.
    assert float(np.trunc(values) @ values) / norm**2 < cut_keeps
    if steps < 1.0:
        assert float(rounded @ values) / norm**2 > 0.9 * norm**2 / float(np.sum(np.abs(values)))


@given(
    values=hnp.arrays(np.float64, st.integers(1, 60), elements=st.floats(-1.0, 1.0)),
    others=hnp.arrays(np.float64, st.integers(1, 6), elements=st.floats(-1.0, 1.0)),
    bits=st.integers(3, 20),
    part=st.floats(0.01, 0.9),
)
def test_whoever_is_shortened_in_advance_leaves_room_for_the_others(
    values: Any, others: Any, bits: int, part: float
) -> None:
    grid = Grid(bits)
    values = clip_l2(values, math.sqrt(1.0 - part**2))
    others = others * (part / math.sqrt(others.size))
    whole = beside(grid, Blocks.of(np.concatenate([values, others])), 1.0, 1, others.size).array()
    short = whole[: -others.size]
    assert np.all(np.abs(short) <= np.abs(values))
    np.testing.assert_array_equal(whole[-others.size :], others)
    fits = rounding._fitting_scale(Blocks.of(grid.in_steps(whole)), 4**bits, MARGINS[0], 1.0)
    assert fits == 1.0 or not np.any(short)


def test_draws_that_never_fit_end_in_cutting_toward_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without scaling, 1,000 entries of one and a half steps on their own norm: 1e-60 that a draw fits."""
    drawn: list[int] = []
    draw = rounding._draw

    def noted(*arguments: Any) -> Any:
        drawn.append(1)
        return draw(*arguments)

    monkeypatch.setattr(rounding, "_draw", noted)
    monkeypatch.setattr(rounding, "_fitting_scale", lambda *_: 1.0)
    values = np.tile([1.5, -1.5], 500)
    bound = 1.5 * math.sqrt(1000)
    np.testing.assert_array_equal(round_randomly(Grid(0), values, bound, coins(1)), np.trunc(values))
    assert len(drawn) == len(MARGINS)
    # Values longer than the bound: scaled to it, then cut.
    steps = round_randomly(Grid(0), 10.0 * values, bound, coins(1))
    assert_rounded(Grid(0), values, bound, steps)
    assert set(np.abs(steps).tolist()) == {1}


def test_a_draw_that_does_not_fit_is_thrown_away_and_another_one_taken() -> None:
    """Few entries and a tight bound: over many coins, no outcome beyond the bound and more than zero comes out."""
    values, bound = np.full(6, 0.9), math.sqrt(5.0)
    squares = [squared_norm(round_randomly(Grid(0), values, bound, coins(seed))) for seed in range(500)]
    assert max(squares) <= 5
    assert len(set(squares)) > 2


@settings(deadline=None)
@given(hnp.arrays(np.int64, st.integers(0, 30), elements=st.integers(-(2**63) + 1, 2**63 - 1)))
def test_the_squared_norm_is_exact(steps: Any) -> None:
    assert squared_norm(steps) == exact_square(steps)


def test_the_squared_norm_of_many_large_steps_is_exact() -> None:
    steps = np.full(40_000, 2**63 - 1, dtype=np.int64)
    assert squared_norm(steps) == 40_000 * (2**63 - 1) ** 2


def whole(*matrices: Any) -> list[tuple[Any, int]]:
    """All of their rows count."""
    return [(matrix, len(matrix)) for matrix in matrices]


def summed(rows: Any, bits: int, *, span: float = 1e6, clip: float = 1.0, divisor: float = 3.0) -> Any:
    size = rows[0].shape[1] if rows else 4
    return round_records(
        Grid(bits),
        whole(*rows),
        size,
        clip=clip,
        divisor=divisor,
        span=span,
        coins=coins(len(rows[0]) if rows else 0),
    )


def aligned(count: int, size: int) -> Any:
    """Records that all point the same way, each as long as the clip, their entries just off a whole step."""
    row = np.where(np.arange(size) % 2, 1.0, -1.0) + 1e-3 * np.arange(size) / size
    return np.tile(row / np.linalg.norm(row), (count, 1))


CROWDS = {
    "a batch of 3,048 that point one way": (aligned(3048, 40), 6),
    "one that a million coordinates share": (aligned(3, 1_000_000), 11),
    "entries far below a step": (aligned(50, 4000), 5),
    "float32, and longer than the clip": (7.0 * aligned(300, 30).astype(np.float32), 9),
    "records that cancel": (aligned(200, 30) * np.where(np.arange(200) % 2, 1.0, -1.0)[:, None], 8),
}


@pytest.mark.parametrize("crowd", CROWDS)
def test_one_record_more_moves_a_sum_of_any_others_by_its_clip_at_most(crowd: str) -> None:
    """In whole numbers, with the coins of the others: `||with - without|| g <= clip / divisor`."""
    rows, bits = CROWDS[crowd]
    stream = coins(1)
    settings: dict[str, Any] = {"clip": 1.0, "divisor": 3.0, "span": 1e6}
    without = round_records(Grid(bits), whole(rows[:-1]), rows.shape[1], **settings, coins=coins(1))
    both = round_records(Grid(bits), whole(rows[:-1], rows[-1:]), rows.shape[1], **settings, coins=stream)
    moved = exact_square(both - without) if both.size < 10**4 else squared_norm(both - without)
    assert 0 < moved * 9 <= 4**bits
    # Cut to a span that binds, no further.
    tight = {**settings, "span": 0.5}
    cut = [
        round_records(Grid(bits), whole(part), rows.shape[1], **tight, coins=coins(1))
        for part in (rows[:-1], rows)
    ]
    assert squared_norm(cut[1] - cut[0]) <= moved
    assert np.abs(cut).max() <= 0.5 / 3.0 * 2**bits


def test_a_sum_that_is_rounded_as_one_is_moved_further_than_the_clip() -> None:
    """Why records are rounded one by one: entries that cross a whole number, all at once."""
    size, grid = 100_000, Grid(0)
    # The base lies half a step off the grid, the record is as long as 31.6 steps, a tenth of one in each entry.
    base, record = np.full(size, 10.45), np.full(size, 0.1)
    moved = [round_randomly(grid, one, 1e9, coins(1)) for one in (base + record, base)]
    assert math.sqrt(squared_norm(moved[0] - moved[1])) > 3.0 * np.linalg.norm(record)


def test_a_record_that_is_not_finite_counts_as_zero_and_the_others_as_ever() -> None:
    rows = aligned(6, 20)
    spoilt = np.insert(rows, 3, np.inf, axis=0)
    spoilt = np.insert(spoilt, 5, np.where(np.arange(20) == 7, np.nan, 0.1), axis=0)
    stream, same = coins(6), coins(6)
    kept = round_records(Grid(8), whole(rows), 20, clip=1.0, divisor=3.0, span=1e6, coins=stream)
    found = round_records(Grid(8), whole(spoilt), 20, clip=1.0, divisor=3.0, span=1e6, coins=same)
    np.testing.assert_array_equal(found, kept)


def test_rows_that_fill_a_matrix_up_are_rounded_and_left_out() -> None:
    rows, stream, same = aligned(6, 20), coins(6), coins(6)
    kept = round_records(Grid(8), whole(rows[:4]), 20, clip=1.0, divisor=3.0, span=1e6, coins=stream)
    found = round_records(Grid(8), [(rows, 4)], 20, clip=1.0, divisor=3.0, span=1e6, coins=same)
    np.testing.assert_array_equal(found, kept)
    # Six rows' coins are gone, not four.
    assert next(iter(stream.uniforms(1))) != next(iter(same.uniforms(1)))


def test_the_sum_over_records_is_theirs_on_average_and_zero_for_none() -> None:
    """6 deviations of 2,000 coins an entry, on 30 entries: false-alarm rate 6e-8."""
    rows = 0.5 * SimStream(3).generator().normal(size=(2000, 30)) / math.sqrt(30.0)
    found = summed([rows[:700], rows[700:]], 4)
    error = found - rows.sum(axis=0) / 3.0 * 2**4
    assert np.abs(error).max() < 6.0 * math.sqrt(2000) / 2.0
    np.testing.assert_array_equal(summed([], 4), np.zeros(4, dtype=np.int64))


def test_bad_arguments_are_refused_by_name() -> None:
    values = np.ones(3)
    calls: list[tuple[str, Any]] = [
        ("coins", lambda: round_randomly(Grid(4), values, 1.0, SimStream(1))),  # type: ignore[arg-type]
        ("coins", lambda: round_randomly(Grid(4), values, 1.0, np.random.default_rng(1))),  # type: ignore[arg-type]
        ("bound", lambda: round_randomly(Grid(4), values, 0.0, coins(1))),
        ("bound", lambda: round_randomly(Grid(4), values, math.nan, coins(1))),
        ("bound", lambda: round_randomly(Grid(4), values, math.inf, coins(1))),
        ("values", lambda: round_randomly(Grid(4), values * math.nan, 1.0, coins(1))),
        ("values", lambda: round_randomly(Grid(62), values * 4.0, 1.0, coins(1))),
        ("values", lambda: round_randomly(Grid(4), values.astype(np.int64), 1.0, coins(1))),
    ]
    for field, call in calls:
        with refuses(field):
            call()
