"""The grid: cutting shrinks, sums are exact in any order, noise cancels, sums must fit; and what all that costs."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import special

from niss.errors import ConfigError
from niss.mechanism import gdp_delta, gdp_mu
from niss.mechanism.grid import Grid, aliasing_distance, centred, discretisation_delta, residues
from niss.randomness import SecretStream, SimStream, sampler_distance, sampler_factor
from support.protocol_round import quantised
from support.refusals import refuses


def modular_sum(uploads: list[Any]) -> Any:
    """As the server adds: in the uploads' own width, where numpy wraps around."""
    return np.sum(uploads, axis=0, dtype=uploads[0].dtype)


whole = st.integers(-(2**63), 2**63 - 1)


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
    exact = np.sum([quantised(grid, update) for update in updates], axis=0)
    uploads = []
    for client, update in enumerate(updates):
        steps = quantised(grid, update)
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
    assert Grid(62).in_steps(np.array([1.9, -1.9])).tolist() == [1.9 * 2**62, -1.9 * 2**62]
    assert Grid(3).in_steps(np.zeros(0)).size == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2.0**43, -(2.0**43), 1e300, 1.7e308])
def test_what_is_not_finite_or_too_large_is_refused(bad: float) -> None:
    with refuses("values"):
        Grid(20).in_steps(np.array([0.0, bad]))
    assert Grid(20).in_steps(np.array([2.0**43 * (1 - 2.0**-53)])).tolist() == [2**63 - 2**10]


@pytest.mark.parametrize("bits", [-1, 63, 1.5, "20", None, True])
def test_bad_grid_bits_are_refused(bits: Any) -> None:
    with pytest.raises(ConfigError, match="grid bits"):
        Grid(bits)


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
        steps = quantised(grid, np.full(coordinates, 1.0))
        SecretStream(bytes([50 + client] * 32)).add_gaussian(steps, deviation)
        expected += steps
        SecretStream(bytes([client] * 32)).add_gaussian(steps, 2.0**30)
        SecretStream(bytes([(client + 1) % clients] * 32)).add_gaussian(steps, 2.0**30, sign=-1)
        uploads.append(residues(steps, 32))
    total = centred(modular_sum(uploads))
    np.testing.assert_array_equal(total, expected)
    assert np.abs(total).max() <= bound


Law = NDArray[np.float64]


def cell(center: Any, deviation: float) -> Law:
    """The probability of a normal variable within 1/2 of `center`."""
    near, far = (np.abs(center) + half for half in (-0.5, 0.5))
    return np.asarray(special.ndtr(-near / deviation) - special.ndtr(-far / deviation))


def law(shift: int, share: float, residual: float, *, fineness: int) -> Law:
    """Two clients and one share: the law of the uploads with the first update at `shift`.

    `fineness = 1`: the share is rounded. Large: it is continuous, plus a uniform (the integral over it by the
    trapezoidal rule, which for these functions is exact to exp(-2 pi^2 fineness^2 / kappa)).
    """
    reach = math.ceil(12 * max(share, residual)) + 2
    places = np.arange(-reach * fineness, reach * fineness + 1) / fineness
    outcomes = np.arange(-2 * reach, 2 * reach + 1)
    first = cell(outcomes[None, :] - shift - places[:, None], residual)
    second = cell(outcomes[None, :] + places[:, None], residual)
    return np.einsum("v,va,vb->ab", cell(places, share) / fineness, first, second, optimize=True)


def hockey_stick(one: Law, other: Law, epsilon: float) -> float:
    return float(np.maximum(one - math.exp(epsilon) * other, 0.0).sum())


CASES = [(0.3, 0.3), (0.5, 0.5), (0.4, 1.0), (1.0, 0.4), (0.7, 0.7), (1.0, 1.0), (2.0, 1.0)]


@pytest.mark.parametrize(("share", "residual"), CASES)
def test_rounding_one_by_one_is_as_near_as_proven(share: float, residual: float) -> None:
    rounded, ideal = (law(0, share, residual, fineness=fineness) for fineness in (1, 24))
    assert rounded.sum() == pytest.approx(1.0, abs=1e-12)
    assert ideal.sum() == pytest.approx(1.0, abs=1e-12)
    distance = 0.5 * float(np.abs(rounded - ideal).sum())
    assert distance <= aliasing_distance(residual, share) + 1e-14


@pytest.mark.parametrize(("share", "residual"), CASES)
@pytest.mark.parametrize("shift", [1, 3])
def test_the_claim_holds_on_the_grid(share: float, residual: float, shift: int) -> None:
    """delta of the exact law <= delta of the Gaussian mechanism + (1 + e^epsilon) * aliasing."""
    covariance = residual**2 * np.eye(2) + share**2 * np.array([[1.0, -1.0], [-1.0, 1.0]])
    mu = shift * math.sqrt(np.linalg.inv(covariance)[0, 0])
    aliasing = aliasing_distance(residual, share)
    for epsilon in (0.0, 0.5, 1.0, 3.0):
        gaussian = gdp_delta(epsilon, mu)
        for fineness, extra in ((1, (1 + math.exp(epsilon)) * aliasing), (24, 0.0)):
            laws = [law(here, share, residual, fineness=fineness) for here in (0, shift)]
            assert hockey_stick(laws[0], laws[1], epsilon) <= gaussian + extra + 1e-12
            assert hockey_stick(laws[1], laws[0], epsilon) <= gaussian + extra + 1e-12


def test_the_cost_is_real_where_noise_is_narrower_than_a_step() -> None:
    """At 0.3 steps the exact law breaks the Gaussian curve: the bound is not mere caution."""
    mu = math.sqrt(np.linalg.inv(0.09 * np.array([[2.0, -1.0], [-1.0, 2.0]]))[0, 0])
    laws = [law(here, 0.3, 0.3, fineness=1) for here in (0, 1)]
    assert max(hockey_stick(laws[0], laws[1], e) - gdp_delta(e, mu) for e in (0.0, 1.0, 2.0, 3.0)) > 1e-3


def test_the_numbers_of_the_docstring() -> None:
    assert aliasing_distance(2.0, 2.0) == pytest.approx(4e-12, rel=0.1)
    assert aliasing_distance(4.0, 4.0) == pytest.approx(2e-46, rel=0.2)
    assert aliasing_distance(5.0, 7.0) == pytest.approx(math.exp(-2 * math.pi**2 / (1 / 49 + 2 / 25)))
    assert aliasing_distance(1e200, 1e300) == 0.0


def cost(
    steps: float, draws: float, *, epsilon: float = 1.0, aliasing: float = 0.0, rest: float = 1e-9
) -> float:
    curve = partial(gdp_delta, mu=gdp_mu(epsilon, 1e-5))
    return discretisation_delta([steps], [draws], aliasing=aliasing, epsilon=epsilon, curve=curve, rest=rest)


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 8.0])
def test_the_cost_is_that_of_the_proof(epsilon: float) -> None:
    mu, rest, aliasing = gdp_mu(epsilon, 1e-5), 1e-12, 1e-13
    factor = 2.0 * sampler_factor([256.0], [1e9], rest=rest)
    expected = math.exp(factor) * gdp_delta(epsilon - 2.0 * factor, mu) - gdp_delta(epsilon, mu)
    expected += (1.0 + math.exp(epsilon + factor)) * (rest + aliasing)
    found = cost(256.0, 1e9, epsilon=epsilon, rest=rest, aliasing=aliasing)
    assert found == pytest.approx(expected, rel=1e-9)


def test_a_realistic_run_costs_next_to_nothing_and_a_fine_grid_everything() -> None:
    """A million coordinates, 31,000 noises each, 30 rounds; a total variation distance would cost more than delta."""
    draws = 1e6 * 31_000 * 30
    assert cost(16.0, draws, epsilon=8.0, rest=3e-11) < 1e-6
    assert (1.0 + math.exp(8.0)) * sampler_distance(16.0, draws) > 1e-5
    assert cost(2.0**40, draws) == 1.0
    assert cost(256.0, 1.0, epsilon=1000.0) == 1.0
    assert cost(256.0, 1e6, aliasing=1.0) == 1.0


def test_many_unlike_rounds_cost_no_more_than_was_allowed_for_each() -> None:
    """The doubled factor covers rounds of which each alone, repeated, has that factor."""
    rounds, draws, rest = 50, 1e8, 1e-9
    steps = np.geomspace(16.0, 4096.0, rounds)
    each = max(sampler_factor([one], [rounds * draws], rest=rest) for one in steps)
    together = sampler_factor(steps, np.full(rounds, draws), rest=rest)
    assert together <= 2.0 * each


def test_bad_arguments_are_refused_by_name() -> None:
    grid, steps = Grid(20), np.zeros(2, dtype=np.int64)
    amounts: dict[str, Any] = {"clip_sum": 1.0, "deviation_sum": 1.0, "coordinates": 10}
    calls: list[tuple[str, Any]] = [
        ("values", lambda: grid.in_steps(np.zeros(2, dtype=np.longdouble))),
        ("values", lambda: grid.in_steps(steps)),  # type: ignore[arg-type]
        ("values", lambda: grid.in_steps([1.0])),  # type: ignore[arg-type]
        ("variance", lambda: grid.deviation_steps(-1.0)),
        ("deviation_steps", lambda: cost(math.nan, 1.0)),
        ("draws", lambda: cost(4.0, -1.0)),
        *(
            (name, lambda name=name, bad=bad: grid.check_fits(**{**amounts, name: bad}))
            for name, bad in (("clip_sum", math.inf), ("deviation_sum", math.nan))
        ),
    ]
    for field, call in calls:
        with refuses(field):
            call()
