"""Rounds with secret batches: what such rounds are worth together, and the multiset of them that a budget fixes.

A round takes every record (or client) with probability q, on its own and unseen, and releases the sum with noise of z
times what a single one can put into it. Against someone who does not learn who was drawn that is a *slot* (q, z): the
pair `N(0, z^2)` and `(1 - q) N(0, z^2) + q N(1, z^2)`, in both directions (add or remove one). Slots compose to the
number of dp-accounting's PLD accountant (Koskela et al. 2020, Doroshenko et al. 2022).

**Filter.** Stopping when the epsilon so far reaches a target proves nothing. What does: `Slots`, a multiset fixed in
advance, in which every round takes a free slot that dominates it (q no larger, z no smaller), or is refused. Let
`H_S(g) = sup of P - g Q` over all events for the slots S together. Whatever was seen before, a round that takes s from
S leads to at most `E_P[H_{S - s}(g Q / P)]`, in which a dominated round may be replaced by s itself, since H is convex
in g (Blackwell), and that is `H_S(g)` for every s. By induction no adaptive choice of rounds and slots beats the
product, in any order; slots that are left free only take something off it. Moving an earlier round to another slot
would not be covered, so the slot that is taken depends on the rounds so far alone (`Slots.free`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from niss.checks import BOOKS
from niss.errors import ConfigError, PrivacyError
from niss.mechanism.gaussian import gdp_delta, gdp_epsilon, gdp_mu

OVERSIZE = math.exp(-40.0)
"""With this probability, at most, the other records of a silo fill the largest batch that its time is planned for: one
beyond it goes out empty (`niss.records.batches.largest_batch`). Each round adds that to delta."""
Slot = tuple[float, float]
"""(q, z): probability and noise multiplier of a round."""
# Above this privacy loss (mu^2 / 2) sampling is worth next to nothing, and its distribution is too wide to compute.
WIDEST_LOSS = 2e4
# How far below the target the epsilon of the noise found may lie, as a part of it.
_PRECISION = 1e-4
# The search goes most of its way on a distribution this many times coarser.
_COARSE = 100.0
# More kinds of rounds than this have their z rounded down onto a grid, so that the accountants work on few of them.
_FEW, _GRID = 8, math.log(1.005)
# Steps of mu^2 into which the largest round of several kinds is divided where all batches are known.
_STEPS = 256
_MOST_ROUNDS = 10**6
# A round may be so much above its slot: what a policy allows on top of the plan's mu, and that rounded.
_SLACK = 2.0 * BOOKS


@dataclass(frozen=True)
class Slots:
    """A multiset of slots: `rounds` has each (q, z) once, in order, and how many of it there are.

    >>> Slots.of((0.05, 4.69, 600)).epsilon(1e-5) < 1.0
    True
    """

    rounds: tuple[tuple[float, float, int], ...] = ()

    @classmethod
    def of(cls, *rounds: tuple[float, float, int]) -> Self:
        """From (q, z, how many) in any order; refuses what is no round."""
        counts: Counter[Slot] = Counter()
        for q, z, count in rounds:
            if not (0.0 < q <= 1.0 and 0.0 <= z < math.inf and count >= 0):
                raise ConfigError(
                    f"({q!r}, {z!r}) is no slot: q lies in (0, 1], z is finite and not negative",
                    field="slots",
                )
            counts[float(q), float(z)] += int(count)
        return cls(tuple((*slot, count) for slot, count in sorted(counts.items()) if count))

    @property
    def size(self) -> int:
        """How many there are."""
        return sum(count for *_, count in self.rounds)

    def plus(self, slot: Slot | None) -> Slots:
        """These and one more, if it is one."""
        return self if slot is None else Slots.of(*self.rounds, (*slot, 1))

    def free(self, taken: Slots, slot: Slot) -> Slot | None:
        """The weakest slot that dominates `slot`, of those that are not taken; None: there is none.

        The weakest, so that rounds which are these slots in any order each find their own.
        """
        counts = {(q, z): count for q, z, count in taken.rounds}
        wanted_q, wanted_z = slot
        fitting = [
            (q, z)
            for q, z, count in self.rounds
            if wanted_q <= q * (1.0 + _SLACK)
            and wanted_z >= z * (1.0 - _SLACK)
            and counts.get((q, z), 0) < count
        ]
        return min(fitting, key=lambda one: (one[0] / one[1], one), default=None)

    def like(self, epsilon: float, delta: float) -> Slots:
        """As many of its one kind as keep that target together; refuses (`PrivacyError`) a kind of which none does."""
        ((q, z, _),) = self.rounds
        return most_slots((q, z), epsilon, delta)

    def epsilon(self, delta: float, coarser: float = 1.0) -> float:
        """Epsilon at `delta` of all of them, never too small; infinite where a round had no noise.

        coarser  how many times coarser to compute than usual, which is quicker and rounds up more
        """
        if (gaussian := self._gaussian_mu()) is not None:
            return gdp_epsilon(gaussian, delta) if gaussian > 0.0 else 0.0
        return _epsilon(few_kinds(self.rounds), delta, coarser)

    def delta(self, epsilon: float) -> float:
        """Delta at `epsilon` of all of them: the composed curve, never too small."""
        if (gaussian := self._gaussian_mu()) is not None:
            return gdp_delta(epsilon, gaussian) if gaussian < math.inf else 1.0
        return float(_accountant(few_kinds(self.rounds), 1.0).get_delta(epsilon))

    def epsilon_if_known(self, delta: float) -> float:
        """Epsilon at `delta` against someone who learns every batch, afterwards too.

        With k of a slot's rounds having drawn the record, mu^2 is `sum of k / z^2`; the curve is the mixture of
        Gaussian curves over the binomial counts, which does not depend on any data. Not that of q = 1, which is larger.
        """
        from scipy.special import log_ndtr

        if not self.rounds or min(z for _, z, _ in self.rounds) == 0.0:
            return math.inf if self.rounds else 0.0
        costs = [1.0 / z**2 for _, z, _ in self.rounds]
        step = max(costs) / (1 if len(costs) == 1 else _STEPS)
        weights = np.ones(1)
        for (q, _, count), cost in zip(self.rounds, costs, strict=True):
            # Rounded up, but for what rounding errors put above a whole number.
            spaced = np.zeros(count * max(math.ceil(cost / step * (1.0 - BOOKS)), 1) + 1)
            spaced[:: (spaced.size - 1) // count] = _binomial(count, q)
            weights = np.convolve(weights, spaced)
        seen = np.flatnonzero(weights > 1e-18)
        mus, weights = np.sqrt(seen * step), weights[seen]
        unseen = max(1.0 - float(weights.sum()), 0.0)

        def spent(epsilon: float) -> float:
            with np.errstate(divide="ignore", invalid="ignore"):
                apart = np.where(mus > 0.0, epsilon / mus, np.inf)
            curve = np.exp(log_ndtr(mus / 2.0 - apart)) - np.exp(epsilon + log_ndtr(-mus / 2.0 - apart))
            return unseen + float(weights @ np.maximum(curve, 0.0))

        low, high = 0.0, 1.0
        while spent(high) > delta:
            low, high = high, 2.0 * high
            if high > 2.0 * WIDEST_LOSS:
                return math.inf
        while high - low > 1e-9 * high:
            middle = 0.5 * (low + high)
            low, high = (low, middle) if spent(middle) <= delta else (middle, high)
        return high

    def epsilon_of_person(self, records: int, delta: float) -> float:
        """Epsilon at `delta` of a person with that many records, each drawn on its own: shifts of Binomial(r, q).

        Not r times epsilon, which would not hold at the same delta. Records in several silos count together.
        """
        if (gaussian := self._gaussian_mu(records)) is not None:
            return gdp_epsilon(gaussian, delta) if gaussian > 0.0 else 0.0
        return _epsilon_of_person(few_kinds(self.rounds), records, delta)

    def _gaussian_mu(self, records: int = 1) -> float | None:
        """mu where nothing is worth amplifying: every record in every batch, too little noise, or no rounds."""
        loss = 0.5 * math.fsum(count * (records / z) ** 2 if z else math.inf for _, z, count in self.rounds)
        everyone = all(q == 1.0 for q, *_ in self.rounds)
        return math.sqrt(2.0 * loss) if everyone or loss > WIDEST_LOSS else None


def _binomial(count: int, q: float) -> NDArray[np.float64]:
    """With what probability each number from 0 to `count` is drawn."""
    from scipy.special import gammaln, xlog1py, xlogy

    k = np.arange(count + 1)
    ways = gammaln(count + 1) - gammaln(k + 1) - gammaln(count - k + 1)
    return np.asarray(np.exp(ways + xlogy(k, q) + xlog1py(count - k, -q)))


def few_kinds(rounds: Iterable[tuple[float, float, int]]) -> tuple[tuple[float, float, int], ...]:
    """The same rounds, or worse ones of few kinds: z down by at most 0.5 %, the safe side."""
    given = tuple(rounds)
    if len(given) <= _FEW:
        return given
    down = [(q, math.exp(_GRID * math.floor(math.log(z) / _GRID)), count) for q, z, count in given]
    return Slots.of(
        *((q, min(z, old), count) for (q, z, count), (_, old, _) in zip(down, given, strict=True))
    ).rounds


@lru_cache(maxsize=256)
def _epsilon(rounds: tuple[tuple[float, float, int], ...], delta: float, coarser: float) -> float:
    """A node asks for the same slots again and again: with every limit, in every round."""
    return float(_accountant(rounds, coarser).get_epsilon(delta))


@lru_cache(maxsize=64)
def _epsilon_of_person(rounds: tuple[tuple[float, float, int], ...], records: int, delta: float) -> float:
    """Asked for in every statement: the methods of a comparison have the same slots."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    # A pair of distributions, of which dp-accounting takes the worse; finer than this only takes longer.
    interval = min(max(1e-3, 5e-3 * records / min(z for _, z, _ in rounds)), 5e-2)
    composed: Any = None
    for q, z, count in rounds:
        drawn = _binomial(records, q)
        each = pld.from_mixture_gaussian_mechanism(
            z,
            sensitivities=list(range(records + 1)),
            sampling_probs=drawn / drawn.sum(),
            value_discretization_interval=interval,
        ).self_compose(count)
        composed = each if composed is None else composed.compose(each)
    return float(composed.get_epsilon_for_delta(delta))


@lru_cache(maxsize=64)
def _accountant(rounds: tuple[tuple[float, float, int], ...], coarser: float) -> Any:
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    # dp-accounting's own interval, made coarser as the losses grow wide: about 1e5 steps at all times.
    loss = 0.5 * math.fsum(count / z**2 for _, z, count in rounds)
    interval = min(max(1e-4, 1e-5 * loss), 1e-2) * coarser
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, interval)
    for q, z, count in rounds:
        event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z))
        accountant.compose(event, count)
    return accountant


@lru_cache(maxsize=64)
def most_slots(slot: Slot, epsilon: float, delta: float) -> Slots:
    """As many of one slot as keep the target together; refuses (`PrivacyError`) a slot that alone does not."""

    def kept(count: int) -> bool:
        return Slots.of((*slot, count)).epsilon(delta) <= epsilon

    low, high = 0, 1
    while high <= _MOST_ROUNDS and kept(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if kept(middle) else (low, middle)
    if not low:
        raise PrivacyError(
            f"one round with q = {slot[0]:g} and z = {slot[1]:.4g} costs more than epsilon {epsilon:g} at delta "
            f"{delta:g}",
            hint="ask for smaller batches or more noise",
        )
    return Slots.of((*slot, low))


@lru_cache(maxsize=256)
def poisson_multiplier(epsilon: float, delta: float, probability: float, rounds: int) -> float:
    """The noise multiplier z that keeps the target over all rounds together, with hardly anything left over.

    Raises PrivacyError where dp-accounting sees no noise that does.
    """
    unsampled = math.sqrt(rounds) / gdp_mu(epsilon, delta)
    if probability == 1.0:
        return unsampled

    def reached(log_z: float, coarser: float = 1.0) -> float:
        return Slots.of((probability, math.exp(log_z), rounds)).epsilon(delta, coarser)

    # Roughly: bisection from above, where sampling is worth nothing.
    coarser = min(max(epsilon * _COARSE, 1.0), _COARSE)
    high = math.log(unsampled) + 0.1
    low = high - 1.0
    while reached(low, coarser) <= epsilon:
        low -= 1.0
    while high - low > 1e-3:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if reached(middle, coarser) <= epsilon else (middle, high)
    # Exactly: by the secant of log epsilon, aiming at the middle of what is accepted.
    log_z, slope, found = high, -1.0, reached(high)
    for _ in range(40):
        if epsilon * (1.0 - _PRECISION) <= found <= epsilon:
            return math.exp(log_z)
        step = math.log(epsilon * (1.0 - 0.5 * _PRECISION) / max(found, 0.5 * epsilon)) / slope
        log_z += step
        before, found = found, reached(log_z)
        if found > 0.0 and before > 0.0 and found != before:
            slope = math.log(found / before) / step
    raise PrivacyError(
        f"no noise is seen to keep epsilon = {epsilon:g} over {rounds} sampled rounds",
        hint="ask for a larger epsilon, or use a method without sampling",
    )
