"""The claim for one record, by brute force: uploads are drawn, and the best test between neighbours is told by them.

A round of six silos on a small graph, with every share and every residual drawn. The adversary knows the base S, what
colluders know and what a repair revealed; what is left is `N(S, Sigma)` against the mixture in which silo k's upload
moves with probability q. Its likelihood ratio is exact, so that the mean of `(1 - e^epsilon / ratio)+` over the draws
is the true delta, up to five standard errors (false alarms below 1e-6, with fixed seeds).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from niss.accounting import Plan, Promise, make_terms
from niss.accounting.discretisation import Draws
from niss.graph import ShareGraph
from niss.mechanism import Slots, gdp_delta, gdp_mu, poisson_multiplier
from niss.mechanism.grid import discretisation_delta
from niss.mechanism.slots import OVERSIZE
from niss.views import effective_variance

FloatArray = NDArray[np.float64]
SILOS, UNIT, RESIDUAL, CLIP = 6, 1.0, 0.6, 1.3
GRAPHS = {
    "complete": ShareGraph.complete(SILOS),
    "regular": ShareGraph.regular(SILOS, degree=2, beacon=b"records"),
}
# What the adversary knows of a round, as `effective_variance` names it.
KNOWN: dict[str, dict[str, Collection]] = {
    "nobody colludes": {},
    "two collude": {"colluders": (1, 4)},
    "one is lost": {"dropped": (3,)},
    "one is lost and repaired": {"dropped": (3,), "revealed": tuple((3, other) for other in range(SILOS))},
    "all of it": {
        "colluders": (1,),
        "dropped": (3,),
        "revealed": tuple((3, other) for other in range(SILOS)),
    },
}


@dataclass(frozen=True)
class View:
    """What is left to the adversary: the uploads of the silos in `seen`, whose noise has the covariance `sigma`."""

    seen: tuple[int, ...]
    mixing: FloatArray
    sigma: FloatArray

    @classmethod
    def of(cls, graph: ShareGraph, colluders=(), dropped=(), revealed=()) -> View:
        seen = tuple(one for one in range(SILOS) if one not in (*colluders, *dropped))
        gone = {frozenset(pair) for pair in revealed}
        columns = [math.sqrt(RESIDUAL) * np.eye(SILOS)]
        for a, b, weight in zip(graph.senders, graph.receivers, graph.weights, strict=True):
            if {int(a), int(b)} & set(colluders) or frozenset((int(a), int(b))) in gone:
                continue
            share = np.zeros((SILOS, 1))
            share[a], share[b] = math.sqrt(weight * UNIT), -math.sqrt(weight * UNIT)
            columns.append(share)
        mixing = np.hstack(columns)[list(seen)]
        return cls(seen, mixing, mixing @ mixing.T)

    def losses(
        self, draws: int, q: float, seat: int, rng: np.random.Generator
    ) -> tuple[FloatArray, FloatArray]:
        """log(P / Q) of the mixture P against Q without the record, on draws of P and on draws of Q."""
        inverse = np.linalg.inv(self.sigma)
        found = []
        for inside in (True, False):
            uploads = self.mixing @ rng.standard_normal((self.mixing.shape[1], draws))
            if inside:
                uploads[seat] += CLIP * (rng.random(draws) < q)
            shift = CLIP * (inverse[seat] @ uploads) - CLIP**2 * inverse[seat, seat] / 2.0
            found.append(np.logaddexp(math.log1p(-q), math.log(q) + shift))
        return found[0], found[1]


def true_deltas(losses: tuple[FloatArray, FloatArray], epsilon: float) -> list[tuple[float, float]]:
    """Of removing and of adding the record: the mean and five standard errors."""
    found = []
    for loss in (losses[0], -losses[1]):
        spent = np.maximum(-np.expm1(np.minimum(epsilon - loss, 0.0)), 0.0)
        found.append((float(spent.mean()), 5.0 * float(spent.std()) / math.sqrt(spent.size)))
    return found


def check(
    graph: ShareGraph, known: dict, q: float, draws: int, rounds: int, seed: int, seat: int | None = None
) -> None:
    """For a record of the worst-off silo, or of that in a seat."""
    rng, view = np.random.default_rng(seed), View.of(graph, **known)
    variances = effective_variance(graph, unit_variance=UNIT, residual_variance=RESIDUAL, **known)
    worst = int(np.argmin(variances)) if seat is None else seat
    z = math.sqrt(variances[worst]) / CLIP
    claim = Slots.of((q, z, rounds))
    each = [view.losses(draws, q, worst, rng) for _ in range(rounds)]
    losses = (sum(one for one, _ in each), sum(other for _, other in each))
    for epsilon in (0.1, 0.5, 1.0):
        found = true_deltas(losses, epsilon)
        for delta, error in found:
            assert delta <= claim.delta(epsilon) + error
        delta, error = max(found)
        assert delta == pytest.approx(claim.delta(epsilon), abs=error + 2e-4)


@pytest.mark.parametrize("known", KNOWN)
@pytest.mark.parametrize(("graph", "q", "rounds"), [("complete", 0.5, 1), ("regular", 0.1, 2)])
def test_the_true_delta_is_that_of_the_slot(graph: str, known: str, q: float, rounds: int) -> None:
    check(GRAPHS[graph], KNOWN[known], q, 100_000, rounds, seed=11)


@pytest.mark.parametrize("seat", range(4))
def test_each_silo_has_a_slot_of_its_own(seat: int) -> None:
    check(GRAPHS["regular"], KNOWN["all of it"], 0.5, 100_000, 1, seed=14, seat=seat)


@pytest.mark.slow
@pytest.mark.parametrize("known", KNOWN)
@pytest.mark.parametrize("q", [0.1, 0.5])
@pytest.mark.parametrize("graph", GRAPHS)
def test_the_true_delta_is_that_of_the_slot_in_millions_of_draws(graph: str, q: float, known: str) -> None:
    check(GRAPHS[graph], KNOWN[known], q, 4_000_000, 1, seed=12)


def test_hidden_coins_of_other_records_only_help() -> None:
    """A second record, in the neighbouring silo, whose coin the server is not told."""
    graph, q, draws, rng = GRAPHS["regular"], 0.3, 200_000, np.random.default_rng(13)
    view, variances = (
        View.of(graph),
        effective_variance(graph, unit_variance=UNIT, residual_variance=RESIDUAL),
    )
    inverse, shift = np.linalg.inv(view.sigma), CLIP * np.eye(SILOS)[:2]
    found = []
    for inside in (True, False):
        uploads = view.mixing @ rng.standard_normal((view.mixing.shape[1], draws))
        coins = rng.random((2, draws)) < q
        coins[0] &= inside
        uploads += shift.T @ coins

        def log_density(moved: FloatArray, uploads: FloatArray = uploads) -> FloatArray:
            return moved @ inverse @ uploads - moved @ inverse @ moved / 2.0

        weights = {(a, b): (q if a else 1 - q) * (q if b else 1 - q) for a in (0, 1) for b in (0, 1)}
        both = [math.log(w) + log_density(a * shift[0] + b * shift[1]) for (a, b), w in weights.items()]
        without = [math.log(q if b else 1 - q) + log_density(b * shift[1]) for b in (0, 1)]
        found.append(np.logaddexp.reduce(both) - np.logaddexp.reduce(without))
    claim = Slots.of((q, math.sqrt(variances[0]) / CLIP, 1))
    for epsilon in (0.1, 0.5):
        for delta, error in true_deltas((found[0], found[1]), epsilon):
            assert delta <= claim.delta(epsilon) + error


def test_a_known_batch_is_no_slot() -> None:
    """The claim fails without its rule: who learns the coin tells more than the slot allows."""
    view, variances = (
        View.of(GRAPHS["complete"]),
        effective_variance(GRAPHS["complete"], unit_variance=UNIT, residual_variance=RESIDUAL),
    )
    z, q = math.sqrt(variances[0]) / CLIP, 0.1
    told = q * gdp_delta(0.5, 1.0 / z)
    assert told > 1.5 * Slots.of((q, z, 1)).delta(0.5)
    assert view.sigma[0, 0] > variances[0]


@pytest.mark.parametrize(("length", "becomes"), [(3.0, 3.9), (10.0, 52.6)])
def test_a_blank_because_of_a_record_voids_the_claim(length: float, becomes: float) -> None:
    """A silo that uploads nothing because one record overflowed moves by its whole sum, of that many clips."""
    z = poisson_multiplier(1.0, 1e-5, 0.05, 600)
    assert Slots.of((0.05, z / length, 600)).epsilon(1e-5) == pytest.approx(becomes, rel=0.01)


def test_what_the_grid_costs_is_added_and_uses_the_composed_curve() -> None:
    """Not amplified, and not taken from a Gaussian curve through the same (epsilon, delta)."""
    plan = Plan(unit="record", batch=0.05, records=6000, epsilon=1.0, participations=30, neighbours=3.0)
    promise = Promise.of(plan)
    assert promise.slots == plan.budget(1)
    assert promise.curve(1.0) == pytest.approx(plan.gaussian_delta, rel=2e-3)
    draws = Draws(np.array([64.0]), np.array([1e7]), 1e-16)
    of_record, of_client = draws.delta(promise), draws.delta(replace(promise, slots=None))
    exact, gaussian = (
        min(
            discretisation_delta(
                draws.steps,
                promise.rounds * draws.counts,
                aliasing=promise.rounds * draws.aliasing,
                epsilon=1.0,
                curve=curve,
                rest=share * promise.distance,
            )
            for share in (0.8, 0.5, 0.1, 1e-2, 1e-3, 1e-4, 1e-6)
        )
        for curve in (plan.whole.delta, partial(gdp_delta, mu=gdp_mu(1.0, 0.98e-5)))
    )
    # A chord of the composed curve lies above it.
    assert exact <= of_record <= 1.5 * exact
    assert of_client == pytest.approx(gaussian, rel=1e-9)
    assert exact != pytest.approx(gaussian, rel=1e-2)
    # Twice the chance of a failure costs twice as much, at any q.
    worse = replace(draws, aliasing=1e-13)
    added = worse.delta(promise) - of_record
    assert added == pytest.approx((1.0 + math.e) * promise.rounds * 1e-13, rel=1e-2)


def oversize_losses(
    most: int, largest: int, q: float, z: float, base: float, rounds: int, inside: bool, draws: int
) -> FloatArray:
    """log(P / Q) of runs with a record against runs without it, on draws of either, where batches beyond `largest` go
    out empty and whose coins of all other records the adversary is told. The sum is `base` a record of the others.
    """
    rng = np.random.default_rng(17 + inside)
    loss = np.zeros(draws)
    for _ in range(rounds):
        others = rng.binomial(most - 1, q, draws)
        drawn = inside & (rng.random(draws) < q)
        sums = np.where(others + drawn <= largest, base * others + drawn, 0.0)
        upload = sums + z * rng.standard_normal(draws)

        def density(mean: FloatArray, upload: FloatArray = upload) -> FloatArray:
            return -((upload - mean) ** 2) / (2.0 * z**2)

        without = density(np.where(others <= largest, base * others, 0.0))
        with_it = density(np.where(others + 1 <= largest, base * others + 1.0, 0.0))
        loss += np.logaddexp(math.log1p(-q) + without, math.log(q) + with_it) - without
    return loss


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_batch_too_large_to_be_sent_costs_what_is_charged_for_it(rounds: int) -> None:
    """A cap that is often reached, so that it shows: the claim alone breaks, and with `T P(others >= cap)` it holds."""
    most, largest, q, z, base = 12, 7, 0.4, 2.0, 50.0
    claim = Slots.of((q, z, rounds))
    tail = sum(math.comb(most - 1, k) * q**k * (1 - q) ** (most - 1 - k) for k in range(largest, most))
    losses = tuple(
        oversize_losses(most, largest, q, z, base, rounds, inside, 400_000) for inside in (True, False)
    )
    for epsilon in (0.1, 0.5, 1.0):
        (removed, error), (added, other) = true_deltas((losses[0], losses[1]), epsilon)
        assert removed <= claim.delta(epsilon) + rounds * tail + error
        assert added <= claim.delta(epsilon) + rounds * tail + other
        assert removed > claim.delta(epsilon) + error, "else nothing had to be charged"


def test_each_round_of_records_is_charged_for_batches_too_large_to_be_sent() -> None:
    """Whatever epsilon is: the coins of the others are the same on both sides."""
    steps = np.full(2, 300.0)
    for epsilon in (0.5, 3.0):
        slots = Slots.of((0.05, 4.0, 600))
        promise = Promise(epsilon, 1e-5, 600, slots)
        plain, records = Draws(steps, np.ones(2), 0.0), Draws(steps, np.ones(2), 0.0, 1e-12)
        assert records.delta(promise) - plain.delta(promise) == pytest.approx(600e-12, rel=1e-6)
        assert Draws(steps, np.ones(2), 0.0, 1.0).cost(promise, 0.1) > 1.0, "more than the plan reserves"
    for plan, oversize in ((Plan(), 0.0), (Plan(unit="record", batch=0.1, records=100), OVERSIZE)):
        terms = make_terms(plan, participants=6, coordinates=3, run=bytes(16), number=0)
        assert Draws.of(terms, 6, [1.0], [30]).oversize == oversize
