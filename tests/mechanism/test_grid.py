"""The grid: cutting shrinks, sums are exact in any order, noise cancels to the last bit, sums must fit."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import special

from niss.errors import ConfigError
from niss.mechanism.grid import Grid, centred, residues
from niss.randomness import SecretStream, SimStream


def modular_sum(uploads: list[Any]) -> Any:
    """As the server adds: in the uploads' own width, where numpy wraps around."""
    return np.sum(uploads, axis=0, dtype=uploads[0].dtype)


whole = st.integers(-(2**63), 2**63 - 1)
moderate = hnp.arrays(
    st.sampled_from([np.float32, np.float64]),
    st.integers(0, 20),
    elements=st.floats(-(2.0**20), 2.0**20, width=32),
)


@settings(deadline=None)
@given(values=moderate, bits=st.integers(0, 40))
def test_cutting_toward_zero_shrinks_by_less_than_a_step(values: Any, bits: int) -> None:
    grid = Grid(bits)
    steps = grid.quantise(values)
    assert steps.dtype == np.int64
    for value, step in zip(values.tolist(), steps.tolist(), strict=True):
        cut = Fraction(step) / 2**bits
        assert abs(cut) <= abs(Fraction(value)) < abs(cut) + Fraction(1, 2**bits)
        assert cut * Fraction(value) >= 0


@settings(deadline=None)
@given(
    pair=st.integers(1, 20).flatmap(
        lambda n: st.tuples(*[hnp.arrays(np.float64, n, elements=st.floats(-9, 9))] * 2)
    )
)
def test_both_sensitivities_hold_exactly(pair: tuple[Any, Any]) -> None:
    """In exact arithmetic: leaving out costs at most the larger norm, replacing at most both together."""
    cut = [[Fraction(step, 2**4) for step in Grid(4).quantise(values).tolist()] for values in pair]
    squares = [sum((Fraction(value) ** 2 for value in values.tolist()), Fraction(0)) for values in pair]
    for steps, square in zip(cut, squares, strict=True):
        assert sum((step**2 for step in steps), Fraction(0)) <= square
    difference = sum(((a - b) ** 2 for a, b in zip(*cut, strict=True)), Fraction(0))
    assert difference <= 4 * max(squares)


def test_a_difference_may_grow_which_is_why_replacing_costs_twice_the_clip() -> None:
    first, second = Grid(0).quantise(np.array([0.9, 1.1]))
    assert second - first == 1


@settings(deadline=None)
@given(
    rows=st.integers(1, 8).flatmap(
        lambda n: st.lists(st.lists(whole, min_size=n, max_size=n), min_size=1, max_size=6)
    ),
    order=st.randoms(use_true_random=False),
    modulus=st.sampled_from([32, 64]),
)
def test_sums_are_exact_modulo_the_modulus_in_any_order(rows: Any, order: Any, modulus: int) -> None:
    uploads = [residues(np.array(row, dtype=np.int64), modulus) for row in rows]
    total = modular_sum(uploads)
    assert total.dtype.itemsize * 8 == modulus
    assert total.tolist() == [sum(column) % 2**modulus for column in zip(*rows, strict=True)]
    order.shuffle(uploads)
    np.testing.assert_array_equal(modular_sum(uploads), total)
    for signed, residue in zip(centred(total).tolist(), total.tolist(), strict=True):
        assert (signed - residue) % 2**modulus == 0
        assert -(2 ** (modulus - 1)) <= signed < 2 ** (modulus - 1)


@pytest.mark.parametrize("modulus", [32, 64])
def test_shares_cancel_to_the_last_bit_though_they_wrap(modulus: int) -> None:
    """Three clients on a ring of shares far wider than the modulus: the sum is the sum of the updates."""
    grid = Grid(12)
    updates = [np.linspace(-k, 2 * k, 5000).astype(np.float32) for k in (1, 2, 3)]
    exact = np.sum([grid.quantise(update) for update in updates], axis=0)
    uploads = []
    for client, update in enumerate(updates):
        steps = grid.quantise(update)
        steps += SimStream(client).generator().integers(-(2**62), 2**62, steps.size)
        steps -= SimStream((client + 1) % 3).generator().integers(-(2**62), 2**62, steps.size)
        assert np.abs(steps).max() > 2**40
        uploads.append(residues(steps, modulus))
    np.testing.assert_array_equal(centred(modular_sum(uploads)), exact)
    np.testing.assert_allclose(grid.to_float(exact), np.sum(updates, axis=0), atol=3 * grid.step)


def test_the_input_is_left_alone() -> None:
    steps = np.array([1, -1], dtype=np.int64)
    upload = residues(steps)
    total = modular_sum([upload, upload])
    assert total.tolist() == [2, 2**64 - 2]
    assert upload.tolist() == [1, 2**64 - 1]
    back = centred(upload)
    back += 1
    assert upload.tolist() == [1, 2**64 - 1]
    upload += np.uint64(1)
    assert steps.tolist() == [1, -1]


def test_to_float_and_deviation() -> None:
    grid = Grid(20)
    assert grid.step == 2.0**-20
    assert grid.to_float(np.array([2**20, -1], dtype=np.int64)).tolist() == [1.0, -(2.0**-20)]
    assert grid.deviation_steps(4.0) == 2.0**21
    assert Grid(62).quantise(np.array([1.9, -1.9])).tolist() == [int(1.9 * 2**62), -int(1.9 * 2**62)]
    assert Grid(3).quantise(np.zeros(0)).size == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2.0**43, -(2.0**43), 1e300, 1.7e308])
def test_what_is_not_finite_or_too_large_is_refused(bad: float) -> None:
    with pytest.raises(ConfigError) as caught:
        Grid(20).quantise(np.array([0.0, bad]))
    assert caught.value.field == "values"
    assert Grid(20).quantise(np.array([2.0**43 * (1 - 2.0**-53)])).tolist() == [2**63 - 2**10]


@pytest.mark.parametrize("bits", [-1, 63, 1.5, "20", None, True])
def test_bad_grid_bits_are_refused(bits: Any) -> None:
    with pytest.raises(ConfigError, match="grid bits"):
        Grid(bits)


def test_other_bad_arguments_are_refused_by_name() -> None:
    grid, steps = Grid(20), np.zeros(2, dtype=np.int64)
    amounts: dict[str, Any] = {"clip_sum": 1.0, "deviation_sum": 1.0, "coordinates": 10}
    calls: list[tuple[str, Any]] = [
        ("values", lambda: grid.quantise(np.zeros(2, dtype=np.longdouble))),
        ("values", lambda: grid.quantise(steps)),  # type: ignore[arg-type]
        ("values", lambda: grid.quantise([1.0])),  # type: ignore[arg-type]
        ("steps", lambda: grid.to_float(np.zeros(2))),  # type: ignore[arg-type]
        ("steps", lambda: residues(np.zeros(2))),  # type: ignore[arg-type]
        ("values", lambda: centred(steps)),  # type: ignore[arg-type]
        ("modulus_bits", lambda: residues(steps, 48)),
        ("modulus_bits", lambda: grid.check_fits(**amounts, modulus_bits=16)),
        ("variance", lambda: grid.deviation_steps(-1.0)),
        ("failure", lambda: grid.check_fits(**amounts, failure=0.0)),
        ("clients", lambda: grid.check_fits(**amounts, clients=0)),
        *(
            (name, lambda name=name, bad=bad: grid.check_fits(**{**amounts, name: bad}))
            for name, bad in (("clip_sum", math.inf), ("deviation_sum", math.nan), ("coordinates", 0))
        ),
    ]
    for field, call in calls:
        with pytest.raises(ConfigError) as caught:
            call()
        assert caught.value.field == field


@settings(deadline=None)
@given(
    clip=st.floats(0, 1e6),
    deviation=st.floats(0, 1e6),
    bits=st.integers(0, 62),
    modulus=st.sampled_from([32, 64]),
    clients=st.integers(1, 10**6),
)
def test_the_hint_of_a_grid_too_fine_is_the_finest_that_fits(
    clip: float, deviation: float, bits: int, modulus: int, clients: int
) -> None:
    given: dict[str, Any] = {
        "clip_sum": clip,
        "deviation_sum": deviation,
        "coordinates": 10**6,
        "modulus_bits": modulus,
        "clients": clients,
    }
    fine, hint = fits(bits, given)
    if fine:
        return
    if "at most" in hint:
        best = int(hint.split("at most ")[1].split()[0])
        assert best < bits
        assert fits(best, given)[0]
        assert best + 2 > 62 or not fits(best + 2, given)[0]
    else:
        assert not fits(0, given)[0]


def fits(bits: int, given: dict[str, Any]) -> tuple[bool, str]:
    try:
        return Grid(bits).check_fits(**given) < 2.0 ** (given["modulus_bits"] - 1), ""
    except ConfigError as error:
        return False, str(error)


def test_the_tail_bound_covers_the_exact_one() -> None:
    """The bound of the largest sum is that of the normal law or more, with the chance of failing asked for."""
    steps = Grid(20).check_fits(clip_sum=3.0, deviation_sum=2.0, coordinates=10**6, clients=30)
    exact = 3.0 - 2.0 * special.ndtri(2.0**-40 / (2 * 10**6))
    assert exact < steps * 2.0**-20 < 1.03 * exact
    with pytest.raises(ConfigError, match=r"grid bits.*modulo 2\^32"):
        Grid(30).check_fits(clip_sum=3.0, deviation_sum=2.0, coordinates=10**6, modulus_bits=32)


def test_a_round_on_32_bits_ends_with_the_right_sum() -> None:
    """End to end at the limit of the modulus: shares, residual noise, and the sum within the bound."""
    grid, clients, coordinates = Grid(20), 4, 20_000
    deviation = grid.deviation_steps(0.25)
    bound = grid.check_fits(
        clip_sum=clients * 1.0, deviation_sum=math.sqrt(clients * 0.25), coordinates=coordinates, clients=clients,
        modulus_bits=32,
    )  # fmt: skip
    uploads, expected = [], np.zeros(coordinates, dtype=np.int64)
    for client in range(clients):
        steps = grid.quantise(np.full(coordinates, 1.0))
        SecretStream(bytes([50 + client] * 32)).add_gaussian(steps, deviation)
        expected += steps
        SecretStream(bytes([client] * 32)).add_gaussian(steps, 2.0**30)
        SecretStream(bytes([(client + 1) % clients] * 32)).add_gaussian(steps, 2.0**30, sign=-1)
        uploads.append(residues(steps, 32))
    total = centred(modular_sum(uploads))
    np.testing.assert_array_equal(total, expected)
    assert np.abs(total).max() <= bound
