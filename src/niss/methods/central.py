"""Central DP: a trusted server sees every bare update and adds noise once, to the sum.

It may draw the participants in secret (`CentralDpSampled`), or correlate its noise over rounds (`CentralMf`), which
makes it the strongest rival of noise that clients carry over.
"""

# ruff: noqa: ARG002  (a method ignores what it does not need to know)

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import numpy as np
from annotated_types import Gt, Le

from niss.errors import ConfigError
from niss.mechanism import Slots, add_gaussian, poisson_multiplier
from niss.mechanism.noise import MOST_ROUNDS, STRATEGIES, CorrelatedNoise, correlated_noise
from niss.methods.base import FloatArray, IntArray, Method, NoiseHistory
from niss.methods.look import BROWN, CRIMSON, DASH_DOT, DASHED, ORANGE, SHORT, VERMILION, Look
from niss.settings import Count, OneOf, settings

if TYPE_CHECKING:
    from niss.accounting.plans import Plan, RoundPlan


# Of a noise multiplier that are accounted for.
_BITS = 40


class CentralDp(Method):
    """The released sum carries `max_k sigma_k^2`, which protects every client as its own noise would have done.

    The view is that of anyone who sees the released models. Against the server itself there is nothing: the uploads
    carry no noise, so the marginal variance is zero.
    """

    name = "central-dp"
    look = Look(ORANGE, "s", DASHED)
    trusts = "the server"
    trusts_server = True

    def add_server_noise(self, total: FloatArray, round: RoundPlan, history: NoiseHistory) -> None:
        stream = history.stream_of(round.number).child("server")
        add_gaussian(total, float(np.sqrt(round.aggregate_variance)), stream)

    def joint_variance(self, round: RoundPlan) -> FloatArray:
        return np.full(round.participants.size, round.aggregate_variance)

    def marginal_variance(self, round: RoundPlan) -> FloatArray:
        return np.zeros(round.participants.size)

    def left_over_variance(self, round: RoundPlan) -> float:
        return float(round.own_variance.max())

    def adversary(self, plan: Plan) -> str:
        return "anyone who sees the released models; the server sees every bare update and is trusted"

    def why_no_guarantee(self, plan: Plan) -> str:
        return "The released sums carry no noise."


class Alone(CentralDp):
    """One client, that with most data, trains by itself: what it has without the others, at the same promise.

    Where records are hidden that is DP-SGD on its own n of all N records, divided by its own planned batch: the noise
    has N / n times the deviation of that of `central-dp`.
    """

    name = "alone"
    look = Look(CRIMSON, "X", SHORT)
    trusts = "nobody"
    trusts_server = False
    samplings = ("alone",)

    def adversary(self, plan: Plan) -> str:
        return "anyone who sees the models of the one client that trains by itself"


@settings
class CentralDpSampled(CentralDp):
    """Every client joins a round with probability q, on its own and in secret; the sum carries `(z p clip)^2`.

    z is the least noise multiplier at which dp-accounting's PLD accountant finds the target for all rounds of the run
    together (`niss.mechanism.poisson_multiplier`), so the claim is amplified by sampling. At 1,000 of 6,000 clients and
    30 rounds that is 0.20, 0.27 and 0.46 of the variance of `central-dp` for epsilon 1, 3 and 8.

    The claim holds against those who see the released models and do NOT learn who took part. It does not hold against
    the server, against a client that is told of another's participation, nor against anyone who watches who connects.
    Every update enters with the same weight, one over the expected number of participants: a weight that depended on
    who joined would void the accounting. A ledger holds what a round costs against someone who knows the participants;
    there is no budget to be filtered by, since a draw that depended on what was spent would not be Poisson.

    sampling_probability  q; 1: no secret

    Sources: Abadi et al. 2016 (1607.00133); Koskela et al. 2020 (1906.03049) and dp-accounting for the numbers.
    """

    name = "central-dp-sampled"
    look = Look(BROWN, "<", DASH_DOT)
    trusts = "the server, and who learns who took part"
    samplings = ("poisson",)
    secret_draw = True
    whole_run = True
    needs = MappingProxyType(
        {
            "unit": ("client", "it is accounted for whole clients"),
            "relation": ("zero-out", "it is accounted for clients whose update becomes zero"),
            "epsilon": (float, "its noise must not depend on who takes part"),
            "mechanism": ("analytic", "it is calibrated by dp-accounting"),
            "privacy.participations": ("planned", "a cap would make its secret draw depend on the past"),
        }
    )

    sampling_probability: Annotated[float, Gt(0), Le(1)] = 1.0

    def round_mu(self, plan: Plan, epsilon: float) -> float:
        """1 / z: what a round costs against someone who knows who took part in it."""
        return 1.0 / poisson_multiplier(epsilon, plan.delta, self.sampling_probability, plan.planned_rounds)

    def epsilon_of_run(self, plan: Plan, noise_multipliers: Sequence[float]) -> float:
        # Rounds of one multiplier are accounted for at once, so those that differ by rounding alone are made one: down.
        multipliers = Counter(map(_without_rounding, noise_multipliers))
        rounds = ((self.sampling_probability, z, count) for z, count in multipliers.items())
        return Slots.of(*rounds).epsilon(plan.delta)

    def calibrated(self, plan: Plan) -> bool:
        """False: the target holds by construction, but against one who does not know what a filter would have to."""
        return False

    def adversary(self, plan: Plan) -> str:
        return (
            "anyone who sees the released models and does not learn who took part; the server sees every bare update "
            "and is trusted, as is everyone who learns the participants"
        )

    def over(self, plan: Plan, participations: int) -> str:
        return (
            f"over {plan.planned_rounds} round{'s' if plan.planned_rounds != 1 else ''} that each draw a client in "
            f"secret with probability {self.sampling_probability:.3g}"
        )

    def caveats(self, plan: Plan) -> tuple[str, ...]:
        return (
            "The epsilon is amplified by secret sampling: it does not hold against the server, nor against anyone who "
            "learns who took part.",
        )


def _without_rounding(multiplier: float) -> float:
    """The multiplier without its last bits (2^-40 of it at most), never above it: less noise costs more."""
    mantissa, exponent = math.frexp(multiplier)
    return math.ldexp(math.floor(math.ldexp(mantissa, _BITS)), exponent - _BITS)


@settings
class CentralMf(CentralDp):
    """Round t is released with `s n_t`, `C n = z` with a banded matrix C (`niss.mechanism.noise.CorrelatedNoise`).

    `n_t = (z_t - sum_{j=1}^{b-1} C_{t,t-j} n_{t-j}) / C_tt`: the last b - 1 noises are all that is remembered. With
    participations at least b rounds apart, columns of C do not overlap, and each costs the squared norm of its column,
    exactly. `s^2` is `max_k sigma_k^2` times what a participation costs at scale 1, so that all participations of a
    client keep the target. The model, the sum over rounds, carries less noise than independent noise of the same mu
    would leave in it; a single round carries more.

    bands     b; at most the separation of the run, which is the default
    strategy  `optimised` (BandMF), or the square root of the matrix of prefix sums, cut off (`square-root`)

    The view is that of anyone who sees all released models, and who took part. Nothing holds against the server.

    Sources (DP-FTRL, BandMF): Denisov et al. 2022 (2202.08312), Choquette-Choo et al. 2023 (2306.08153), McKenna 2024
    (2405.15913).
    """

    name = "central-mf"
    look = Look(VERMILION, "P", SHORT)
    whole_run = True
    correlates = True
    samplings = ("cyclic", "uniform")

    bands: Count | None = None
    strategy: Annotated[str, OneOf(lambda: STRATEGIES)] = "optimised"

    def check(self, plan: Plan) -> None:
        super().check(plan)
        if plan.planned_rounds > MOST_ROUNDS:
            raise ConfigError(
                f"correlated noise is planned for at most {MOST_ROUNDS} rounds, not {plan.planned_rounds}",
                field="horizon",
                hint="plan a shorter run",
            )
        if self.bands is not None and self.bands > plan.separation:
            raise ConfigError(
                f"{self.bands} bands, but a client may return after {plan.separation} "
                f"round{'s' if plan.separation != 1 else ''}",
                field="bands",
                hint="use at most as many bands as rounds between two participations, or let clients rest longer",
            )

    def noise(self, plan: Plan) -> CorrelatedNoise:
        """The law of the noise over the rounds of a run."""
        return correlated_noise(
            plan.planned_rounds, plan.separation, self.bands, plan.turns, strategy=self.strategy
        )

    def add_server_noise(self, total: FloatArray, round: RoundPlan, history: NoiseHistory) -> None:
        total += math.sqrt(self._scale2(round)) * self._unit_noise(total.size, round, history)

    def _unit_noise(self, size: int, round: RoundPlan, history: NoiseHistory) -> FloatArray:
        """`n_t` of this round: the same numbers whether earlier rounds are remembered or drawn again."""
        number, kept, law = round.number, history.kept, self.noise(round.plan)
        if number in kept:
            return kept[number]
        start, bands = number, len(law.columns)
        if not all(earlier in kept for earlier in range(max(number - bands + 1, 0), number)):
            start = 0
            kept.clear()
        for current in range(start, number + 1):
            noise = np.zeros(size)
            add_gaussian(noise, 1.0, history.stream_of(current).child("server"))
            row = law.row(current)
            for lag in range(1, row.size):
                noise -= row[lag] * kept[current - lag]
            noise /= row[0]
            kept[current] = noise
            kept.pop(current - bands + 1, None)
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
            gain
            if mean < 1.0
            else "Clients may return at once, so that correlating the noise gains nothing.",
        )
