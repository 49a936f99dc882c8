"""Trusted servers that correlate their noise over rounds: the strongest rivals of noise that clients carry over."""

# ruff: noqa: ARG002  (a method ignores what it does not need to know)

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from niss.errors import ConfigError
from niss.mechanism import add_gaussian
from niss.mechanism.correlated import BandedRoot, CarriedChain, RoundNoise, banded_root, carried_chain
from niss.methods.base import FloatArray, IntArray, NoiseHistory
from niss.methods.central_dp import CentralDp
from niss.methods.look import CRIMSON, DASH_DOT, SHORT, VERMILION, Look
from niss.randomness import SimStream

if TYPE_CHECKING:
    from niss.accounting.plans import Plan
    from niss.accounting.round_plans import RoundPlan


class CorrelatedServer(CentralDp):
    """The sum of round t is released with `s n_t`, where the `n_t` of all rounds have a joint law (`RoundNoise`).

    `s^2` is `max_k sigma_k^2` times what a participation costs at scale 1, so that all participations of a client
    together, cross terms and ends of the run included, keep the target: `mu^2 = 1' Cov(n)^-1[P, P] 1 Delta^2 / s^2`.
    A participation is charged what it adds to that. The model, the sum over rounds, carries less noise than
    independent noise of the same mu would leave in it; a single round carries more.

    The view is that of anyone who sees all released models, and who took part. Nothing holds against the server.
    """

    trusts = "the server, which sees every bare update"
    whole_run = True
    correlates = True

    @abstractmethod
    def noise(self, plan: Plan) -> RoundNoise:
        """The law of the noise over the rounds of a run."""

    @abstractmethod
    def unit_noise(self, size: int, round_plan: RoundPlan, history: NoiseHistory) -> FloatArray:
        """`n_t` of this round: the same numbers whether earlier rounds are remembered or drawn again."""

    def add_server_noise(
        self,
        total: FloatArray,
        round_plan: RoundPlan,
        stream: SimStream,
        history: NoiseHistory | None = None,
    ) -> None:
        if history is None:
            history = NoiseHistory(lambda number: stream.child("round", number))
        total += math.sqrt(self._scale2(round_plan)) * self.unit_noise(total.size, round_plan, history)

    def _scale2(self, round_plan: RoundPlan) -> float:
        return float(round_plan.own_variance.max()) * self.noise(round_plan.plan).per_participation

    def planned_mu(
        self, plan: Plan, participants: IntArray, number: int, history: Sequence[IntArray] = ()
    ) -> FloatArray:
        noise = self.noise(plan)
        return plan.round_mu(participants) * math.sqrt(noise.charge(number) / noise.per_participation)

    def joint_variance(self, round_plan: RoundPlan) -> FloatArray:
        """What independent noise of the same cost would have had; the participations before are paid for."""
        charge = self.noise(round_plan.plan).charge(round_plan.number)
        return np.full(round_plan.participants.size, self._scale2(round_plan) / charge)

    def left_over_variance(
        self, round_plan: RoundPlan, absent: Collection[int] = (), *, repaired: bool = False
    ) -> float:
        return self._scale2(round_plan) * self.noise(round_plan.plan).round_variance(round_plan.number)

    def earlier_covariances(
        self, round_plan: RoundPlan, absent: Collection[int] = (), *, repaired: bool = False
    ) -> FloatArray:
        return self._scale2(round_plan) * self.noise(round_plan.plan).earlier_covariances(round_plan.number)

    def epsilon_holds_for(self, plan: Plan) -> str:
        """Which participations are promised, in words."""
        return f"clients that take part at least {plan.separation} rounds apart"

    def adversary(self, plan: Plan) -> str:
        return (
            "anyone who sees all released models and knows who took part, for "
            f"{self.epsilon_holds_for(plan)} in a run of {plan.planned_rounds}; the server sees every bare update and "
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


class CentralMf(CorrelatedServer):
    """`C n = z` with the banded square root C of the matrix of prefix sums (DP-FTRL, BandMF).

    `n_t = z_t - sum_{j=1}^{b-1} c_j n_{t-j}`, `c_j` the coefficients of `(1 - x)^(-1/2)`: the last b - 1 noises are all
    that is remembered. With participations at least b rounds apart, columns of C do not overlap, and each costs the
    squared norm of its column, exactly; the last of a run cost less, since the run cuts their columns short.

    bands  b; at most the separation of the run, which is the default

    Sources: Denisov et al. 2022 (2202.08312), Choquette-Choo et al. 2023 (2306.08153), McKenna 2024 (2405.15913).
    """

    name = "central-mf"
    look = Look(VERMILION, "P", SHORT)
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
        return banded_root(
            plan.planned_rounds, plan.separation, plan.bands, plan.participations, plan.factors
        )

    def unit_noise(self, size: int, round_plan: RoundPlan, history: NoiseHistory) -> FloatArray:
        number, kept, c = round_plan.number, history.kept, self.noise(round_plan.plan).coefficients
        if number in kept:
            return kept[number]
        start = number
        if not all(earlier in kept for earlier in range(max(number - c.size + 1, 0), number)):
            start = 0
            kept.clear()
        for current in range(start, number + 1):
            noise = _standard_normal(size, history.stream_of(current).child("server"))
            for lag in range(1, min(c.size, current + 1)):
                noise -= c[lag] * kept[current - lag]
            kept[current] = noise
            kept.pop(current - c.size + 1, None)
        return noise


class CentralCarried(CorrelatedServer):
    """`n_t = e_t + c_t - c_{t-1}` with `Var c = w Var e`: the noise that carried shares leave in the sums, by a trusted
    server. The twin of carried shares, to compare like with like; `central-mf` is what one would use.

    `Cov(n) = I + w L` with the Laplacian of a path, whose inverse has no negative entry. Cohorts are fixed and come in
    turn, so a client's rounds are exactly the separation apart; each is charged what it adds, cross terms included.

    carried_to_residual  w; by default the one that leaves least noise in the model on average over the rounds
    """

    name = "central-carried"
    look = Look(CRIMSON, "X", DASH_DOT)
    settings = frozenset(("carried_to_residual",))
    samplings = ("cyclic",)

    def noise(self, plan: Plan) -> CarriedChain:
        return carried_chain(
            plan.planned_rounds, plan.separation, plan.carried_to_residual, plan.participations, plan.factors
        )

    def joint_variance(self, round_plan: RoundPlan) -> FloatArray:
        """As planned, also for a client that another makes noise for: with cross terms, a charge for what it weighs now
        would be too small where it weighed more in a round before."""
        noise = self.noise(round_plan.plan)
        return round_plan.own_variance * (noise.per_participation / noise.charge(round_plan.number))

    def unit_noise(self, size: int, round_plan: RoundPlan, history: NoiseHistory) -> FloatArray:
        plan, number = round_plan.plan, round_plan.number
        carried = math.sqrt(self.noise(plan).ratio)
        noise = _standard_normal(size, history.stream_of(number).child("server"))
        if number + 1 < plan.planned_rounds:
            noise += carried * _standard_normal(size, history.stream_of(number).child("carried"))
        if number:
            carried *= plan.factor(number - 1) / plan.factor(number)
            noise -= carried * _standard_normal(size, history.stream_of(number - 1).child("carried"))
        return noise

    def epsilon_holds_for(self, plan: Plan) -> str:
        return f"clients of fixed cohorts that take part exactly {plan.separation} rounds apart"


def _standard_normal(size: int, stream: SimStream) -> FloatArray:
    noise = np.zeros(size)
    add_gaussian(noise, 1.0, stream)
    return noise
