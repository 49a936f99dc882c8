"""What it costs that the protocol's noise is drawn by a real sampler and rounded to a grid, and that it is paid for.

mu is that of ideal Gaussians. The rest is a part of delta (`Plan.grid_delta`), which server and clients reserve alike:
terms under which it would not do are not proposed, and are refused by clients whoever proposes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from niss.accounting.plans import GRID_SHARE, Plan
from niss.errors import ConfigError, RemoteProtocolError
from niss.mechanism import Slots, gdp_delta, gdp_mu
from niss.mechanism.grid import Grid, aliasing_distance, discretisation_delta
from niss.mechanism.slots import OVERSIZE
from niss.protocol.agreement import Agreed
from niss.protocol.messages import Terms
from niss.protocol.schedule import Schedule
from niss.randomness import sampler_factor

FloatArray = NDArray[np.float64]

# Narrower noise, in grid steps, is not counted.
LEAST_STEPS = 4.0
# Of a round's mu: the most that the sampler's distance from the Gaussian may be worth, as a factor on probabilities.
SAMPLER_SHARE = 0.01
# How far below a claim chords of a composed curve begin.
_NEAR = 0.1
# Of the reserve: how much of that distance may be no factor; the best of these is taken.
_REST_SHARES = (0.8, 0.5, 0.1, 1e-2, 1e-3, 1e-4, 1e-6)


def _composed(slots: Slots, claimed: float, epsilon: float) -> float:
    """Delta at `epsilon` of all slots, never too small: a little below the claim on a chord of the composed curve.

    Delta is convex in e^epsilon, so that a chord lies above it; a point of the curve takes a second.
    """
    low = max(claimed - _NEAR, 0.0)
    if not low <= epsilon <= claimed:
        return slots.delta(epsilon)
    below, above = _delta_at(slots, low), _delta_at(slots, claimed)
    part = math.expm1(claimed - epsilon) / math.expm1(claimed - low) * math.exp(epsilon - low)
    return above + part * (below - above)


@lru_cache(maxsize=64)
def _delta_at(slots: Slots, epsilon: float) -> float:
    return slots.delta(epsilon)


@dataclass(frozen=True)
class Promise:
    """(epsilon, delta) of a client, or of a record, over so many rounds, a part of delta reserved for the grid.

    The larger epsilon, the more the grid costs, since a distance D adds `(1 + e^epsilon) D` to delta. `slots` are what
    rounds with secret batches may cost together; None: the Gaussians that just keep the promise.
    """

    epsilon: float = 10.0
    delta: float = 1e-5
    rounds: int = 1
    slots: Slots | None = None

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """What the plan promises everyone."""
        epsilon = plan.epsilon if isinstance(plan.epsilon, float | int) else max(plan.epsilon)
        whole = plan.whole if plan.batch is not None else None
        slots = whole if isinstance(whole, Slots) else None
        return cls(float(epsilon), plan.delta, plan.possible_rounds, slots)

    @property
    def curve(self) -> Callable[[float], float]:
        """delta(epsilon) of all ideal noise that the promise allows for."""
        if self.slots is not None:
            return partial(_composed, self.slots, self.epsilon)
        return partial(gdp_delta, mu=gdp_mu(self.epsilon, (1.0 - GRID_SHARE) * self.delta))

    @property
    def reserve(self) -> float:
        """The part of delta that pays for the grid."""
        return GRID_SHARE * self.delta

    @property
    def distance(self) -> float:
        """The distance between laws that would use up the reserve: a distance D adds `(1 + e^epsilon) D` to delta."""
        return self.reserve / (1.0 + math.exp(min(self.epsilon, 500.0)))


@dataclass(frozen=True)
class Draws:
    """Everything that is drawn in one round, by all participants: an opponent sees the joint view.

    steps     deviations of residual noise, self-mask and shares, in grid steps
    counts    how many of each
    aliasing  what rounding every share on its own costs, for all coordinates
    oversize  with what probability a silo's batch is too large to be sent; 0 where whole clients are hidden
    """

    steps: FloatArray
    counts: FloatArray
    aliasing: float
    oversize: float = 0.0

    @classmethod
    def of(cls, terms: Terms, size: int, weights: ArrayLike, counts: ArrayLike) -> Self:
        """The draws of a round of `size` participants, `counts` shares of each of these `weights`.

        A share that is carried counts where it is added, as one from everyone to everyone of the next round. Shares, or
        a self-mask, too narrow to get credit (`is_wide_enough`) are not held against it.
        """
        grid = Grid(terms.grid_bits)
        residual = grid.deviation_steps(terms.residual_variance)
        each = np.asarray(weights, dtype=np.float64) * terms.unit_variance
        numbers = np.asarray(counts, dtype=np.float64)
        if terms.carrying is not None:
            each, numbers = np.append(each, terms.carrying.unit_variance), np.append(numbers, size * size)
        shares = np.array([grid.deviation_steps(float(variance)) for variance in each])
        mask = grid.deviation_steps(terms.self_variance) if terms.mode == "repair" else 0.0
        aliasing = 0.0
        for steps, count in [*zip(shares, numbers, strict=True), (mask, size)]:
            if min(steps, residual) >= LEAST_STEPS:
                aliasing += float(count) * terms.coordinates * aliasing_distance(residual, steps)
        drawn = terms.coordinates * np.array([size, size, *numbers], dtype=np.float64)
        oversize = 0.0 if terms.records is None else OVERSIZE
        return cls(np.array([residual, mask, *shares]), drawn, aliasing, oversize)

    @classmethod
    def expected(cls, terms: Terms, size: int) -> Self:
        """Those of a round whose graph is yet to be drawn."""
        near = min(math.ceil(terms.neighbours), size - 1)
        return cls.of(terms, size, [terms.neighbours / near], [size * near])

    def delta(self, promise: Promise) -> float:
        """What grid, sampler and batches too large to be sent add to delta over all rounds of the promise, if all are
        like this one.
        """
        curve = promise.curve
        return promise.rounds * self.oversize + min(
            discretisation_delta(
                self.steps,
                promise.rounds * self.counts,
                aliasing=promise.rounds * self.aliasing,
                epsilon=promise.epsilon,
                curve=curve,
                rest=share * promise.distance,
            )
            for share in _REST_SHARES
        )

    def cost(self, promise: Promise, mu: float, *, rounds: int = 1) -> float:
        """How much is used of what a round of this mu may use: of the reserve in delta, or of `SAMPLER_SHARE`.

        `rounds` like this one stand behind that mu; more than one where noise is carried between them. Above 1 is too
        much. The second limit keeps a ledger of tiny charges honest, next to which a factor on probabilities would not
        be tiny; a record that is in the batch with probability q spends about q of the round's mu.
        """
        factor = sampler_factor(self.steps, rounds * self.counts, rest=promise.distance)
        most = SAMPLER_SHARE * mu
        of_mu = factor / most if most > 0.0 else math.inf
        return max(self.delta(promise) / promise.reserve, of_mu)


def grid_delta(plan: Plan, terms: Terms, participants: int) -> float:
    """What grid and sampler add to the delta of a plan over all rounds, if all have these terms.

    Noise of only a few grid steps is refused (`ConfigError`).
    """
    if not terms.residual_variance:
        return 0.0
    require_wide_noise(terms.grid_bits, terms.residual_variance)
    return Draws.expected(terms, participants).delta(Promise.of(plan))


def require_wide_noise(grid_bits: int, variance: float) -> None:
    """Refuse (`ConfigError`) a grid so coarse that noise of that variance is only a few steps wide."""
    steps = Grid(grid_bits).deviation_steps(variance)
    if steps < LEAST_STEPS:
        raise ConfigError(
            f"noise of {steps:.2g} grid steps is too narrow to be told from a Gaussian",
            field="protocol.grid_bits",
            hint=f"use more than {grid_bits} bits",
        )


def round_draws(agreed: Agreed) -> Draws:
    """All that is drawn in this one round, on the graph that was drawn for it."""
    weights, counts = np.unique(agreed.graph.weights, return_counts=True)
    return Draws.of(agreed.terms, len(agreed.participants), weights, counts)


def check_run_discretisation(schedule: Schedule, mu: float, promise: Promise) -> None:
    """Refuse a grid that is no good for a participation in a committed run, all of whose rounds stand behind mu."""
    if Grid(schedule.grid_bits).deviation_steps(narrowest_noise(schedule)) < LEAST_STEPS:
        raise RemoteProtocolError("some noise is only a few grid steps wide", hint="use more grid bits")
    require_affordable(run_cost(schedule, promise, mu))


def require_affordable(cost: float) -> None:
    """Refuse a grid on which noise as it is drawn is too far from the Gaussians that mu stands for."""
    if not cost <= 1.0:
        raise RemoteProtocolError(
            f"on this grid the noise is too far from a Gaussian: {cost:.2g} times what the promise leaves room for",
            hint="use fewer grid bits",
        )


def is_wide_enough(agreed: Agreed, variance: float) -> bool:
    """Whether noise may count as Gaussian next to the residual noise, though both are rounded to the grid.

    At 4 grid steps rounding costs less than 1e-40 a share and coordinate (`niss.mechanism.grid`); narrower
    noise gets no credit at all, since a server could choose a grid on which it rounds to nothing. The residual
    noise alone always counts: the upload is a function of it.
    """
    return agreed.grid.deviation_steps(min(variance, agreed.terms.residual_variance)) >= LEAST_STEPS


def narrowest_noise(schedule: Schedule) -> float:
    """The least variance of any noise in an upload: residual, a share, a carried one, or a self-mask."""
    noises = [schedule.noise.residual, schedule.noise.unit]
    return min(noises + [one for one in (schedule.carried_variance, schedule.noise.self_mask) if one])


def _scheduled_draws(schedule: Schedule) -> list[Draws]:
    """All that is drawn in each kind of round."""
    rounds = (schedule.terms(b"run", number) for number in {0, min(1, schedule.rounds - 1)})
    return [Draws.expected(terms, schedule.participants) for terms in rounds]


@lru_cache(maxsize=64)
def run_cost(schedule: Schedule, promise: Promise, mu: float) -> float:
    """How much of its part of delta the grid uses in a run, all rounds together; above 1 is too much."""
    return max(draws.cost(promise, mu, rounds=schedule.rounds) for draws in _scheduled_draws(schedule))


def run_grid_delta(schedule: Schedule, promise: Promise) -> float:
    """What grid and sampler add to the delta of a client over the whole run, however often it takes part."""
    if not schedule.noise.residual:
        return 0.0
    whole = replace(promise, rounds=schedule.rounds)
    return max(draws.delta(whole) for draws in _scheduled_draws(schedule))
