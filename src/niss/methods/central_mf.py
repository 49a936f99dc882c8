"""A trusted server that correlates its noise over rounds: the strongest rival of noise that clients carry over."""

# ruff: noqa: ARG002  (a method ignores what it does not need to know)

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from niss.errors import ConfigError
from niss.mechanism import add_gaussian
from niss.mechanism.correlated import BandedRoot, banded_root
from niss.methods.base import FloatArray, IntArray, NoiseHistory
from niss.methods.central_dp import CentralDp
from niss.methods.look import SHORT, VERMILION, Look
from niss.randomness import SimStream

if TYPE_CHECKING:
    from niss.accounting.plans import Plan
    from niss.accounting.round_plans import RoundPlan


class CentralMf(CentralDp):
    """Round t is released with `s n_t`, `C n = z` with the banded square root C of the matrix of prefix sums.

    `n_t = z_t - sum_{j=1}^{b-1} c_j n_{t-j}`, `c_j` the coefficients of `(1 - x)^(-1/2)`: the last b - 1 noises are all
    that is remembered. With participations at least b rounds apart, columns of C do not overlap, and each costs the
    squared norm of its column, exactly; the last of a run cost less, since the run cuts their columns short. `s^2` is
    `max_k sigma_k^2` times what a participation costs at scale 1, so that all participations of a client keep the
    target. The model, the sum over rounds, carries less noise than independent noise of the same mu would leave in it;
    a single round carries more.

    bands  b; at most the separation of the run, which is the default

    The view is that of anyone who sees all released models, and who took part. Nothing holds against the server.

    Sources (DP-FTRL, BandMF): Denisov et al. 2022 (2202.08312), Choquette-Choo et al. 2023 (2306.08153), McKenna 2024
    (2405.15913).
    """

    name = "central-mf"
    look = Look(VERMILION, "P", SHORT)
    whole_run = True
    correlates = True
    settings = frozenset(("bands",))
    samplings = ("cyclic", "uniform")

    def check(self, plan: Plan) -> None:
        if plan.bands is not None and plan.bands > plan.separation:
            raise ConfigError(
                f"{plan.bands} bands, but a client may return after {plan.separation} "
                f"round{'s' if plan.separation != 1 else ''}",
                field="bands",
                hint="use at most as many bands as rounds between two participations, or let clients rest longer",
            )

    def noise(self, plan: Plan) -> BandedRoot:
        """The law of the noise over the rounds of a run."""
        return banded_root(plan.planned_rounds, plan.separation, plan.bands, plan.participations)

    def add_server_noise(
        self,
        total: FloatArray,
        round: RoundPlan,
        stream: SimStream,
        history: NoiseHistory | None = None,
    ) -> None:
        if history is None:
            history = NoiseHistory(lambda number: stream.child("round", number))
        total += math.sqrt(self._scale2(round)) * self._unit_noise(total.size, round, history)

    def _unit_noise(self, size: int, round: RoundPlan, history: NoiseHistory) -> FloatArray:
        """`n_t` of this round: the same numbers whether earlier rounds are remembered or drawn again."""
        number, kept, c = round.number, history.kept, self.noise(round.plan).coefficients
        if number in kept:
            return kept[number]
        start = number
        if not all(earlier in kept for earlier in range(max(number - c.size + 1, 0), number)):
            start = 0
            kept.clear()
        for current in range(start, number + 1):
            noise = np.zeros(size)
            add_gaussian(noise, 1.0, history.stream_of(current).child("server"))
            for lag in range(1, min(c.size, current + 1)):
                noise -= c[lag] * kept[current - lag]
            kept[current] = noise
            kept.pop(current - c.size + 1, None)
        return noise

    def _scale2(self, round: RoundPlan) -> float:
        return float(round.own_variance.max()) * self.noise(round.plan).per_participation

    def planned_mu(
        self, plan: Plan, participants: IntArray, number: int, history: Sequence[IntArray] = ()
    ) -> FloatArray:
        noise = self.noise(plan)
        return plan.round_mu(participants) * math.sqrt(noise.charge(number) / noise.per_participation)

    def joint_variance(self, round: RoundPlan) -> FloatArray:
        """What independent noise of the same cost would have had; the participations before are paid for."""
        charge = self.noise(round.plan).charge(round.number)
        return np.full(round.participants.size, self._scale2(round) / charge)

    def left_over_variance(self, round: RoundPlan) -> float:
        return self._scale2(round) * self.noise(round.plan).round_variance(round.number)

    def earlier_covariances(self, round: RoundPlan) -> FloatArray:
        return self._scale2(round) * self.noise(round.plan).earlier_covariances(round.number)

    def adversary(self, plan: Plan) -> str:
        return (
            "anyone who sees all released models and knows who took part, for clients that take part at least "
            f"{plan.separation} rounds apart in a run of {plan.planned_rounds}; the server sees every bare update and "
            "is trusted"
        )

    def caveats(self, plan: Plan) -> tuple[str, ...]:
        mean, final = self.noise(plan).ratio_to_independent
        gain = (
            f"Noise is correlated over rounds: at the same epsilon the sum of all rounds so far carries {mean:.2f} of "
            f"the variance of independent noise on average over the rounds, and {final:.2f} after the last. The "
            "variance of a single round says little."
        )
        return (
            (gain,)
            if mean < 1.0
            else ("Clients may return at once, so that correlating the noise gains nothing.",)
        )
