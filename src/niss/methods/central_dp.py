"""Central DP: a trusted server sees every bare update and adds noise once, to the sum; `sampled`: of a secret draw."""

# ruff: noqa: ARG002  (a method ignores what it does not need to know)

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from niss.errors import ConfigError
from niss.mechanism import add_gaussian, poisson_epsilon, poisson_multiplier
from niss.methods.base import FloatArray, Method, NoiseHistory
from niss.methods.look import BROWN, DASH_DOT, DASHED, ORANGE, Look
from niss.randomness import SimStream

if TYPE_CHECKING:
    from niss.accounting.plans import Plan
    from niss.accounting.round_plans import RoundPlan


# Of a noise multiplier that are accounted for.
_BITS = 40


class CentralDp(Method):
    """The released sum carries `max_k sigma_k^2`, which protects every client as its own noise would have done.

    The view is that of anyone who sees the released models. Against the server itself there is nothing: the uploads
    carry no noise, so the marginal variance is zero.
    """

    name = "central-dp"
    look = Look(ORANGE, "s", DASHED)
    trusts = "the server, which sees every bare update"
    trusts_server = True

    def add_server_noise(
        self,
        total: FloatArray,
        round: RoundPlan,
        stream: SimStream,
        history: NoiseHistory | None = None,
    ) -> None:
        add_gaussian(total, float(np.sqrt(round.aggregate_variance)), stream.child("server"))

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

    Sources: Abadi et al. 2016 (1607.00133); Koskela et al. 2020 (1906.03049) and dp-accounting for the numbers.
    """

    name = "central-dp-sampled"
    look = Look(BROWN, "<", DASH_DOT)
    trusts = "the server, which sees every bare update, and everyone who learns who took part"
    samplings = ("poisson",)
    secret_draw = True
    whole_run = True

    def check(self, plan: Plan) -> None:
        if plan.unit != "client" or plan.relation != "zero-out":
            raise ConfigError(
                f"{self.name} is accounted for clients whose update becomes zero, not for {plan.unit}, "
                f"{plan.relation}",
                field="relation",
                hint="use unit = 'client' and relation = 'zero-out'",
            )
        if isinstance(plan.epsilon, tuple):
            raise ConfigError(
                f"the noise of {self.name} must not depend on who takes part",
                field="epsilon",
                hint="give one number",
            )
        if plan.mechanism != "analytic":
            raise ConfigError(
                f"{self.name} is calibrated by dp-accounting", field="mechanism", hint="use analytic"
            )

    def round_mu(self, plan: Plan, epsilon: float) -> float:
        """1 / z: what a round costs against someone who knows who took part in it."""
        return 1.0 / poisson_multiplier(epsilon, plan.delta, plan.sampling_probability, plan.planned_rounds)

    def epsilon_of_run(self, plan: Plan, noise_multipliers: Sequence[float]) -> float:
        # Rounds of one multiplier are accounted for at once, so those that differ by rounding alone are made one: down.
        rounds = tuple(sorted(Counter(map(_without_rounding, noise_multipliers)).items()))
        return poisson_epsilon(rounds, plan.sampling_probability, plan.delta) if rounds else 0.0

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
            f"secret with probability {plan.sampling_probability:.3g}"
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
