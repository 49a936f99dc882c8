"""Central DP: a trusted server sees every bare update and adds noise once, to the sum it releases."""

# ruff: noqa: ARG002  (a method ignores what it does not need to know)

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from niss.mechanism import add_gaussian
from niss.methods.base import FloatArray, Method, NoiseHistory
from niss.methods.look import DASHED, ORANGE, Look
from niss.randomness import SimStream

if TYPE_CHECKING:
    from niss.accounting.plans import Plan
    from niss.accounting.round_plans import RoundPlan


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
        round_plan: RoundPlan,
        stream: SimStream,
        history: NoiseHistory | None = None,
    ) -> None:
        add_gaussian(total, float(np.sqrt(round_plan.aggregate_variance)), stream.child("server"))

    def joint_variance(self, round_plan: RoundPlan) -> FloatArray:
        return np.full(round_plan.participants.size, round_plan.aggregate_variance)

    def marginal_variance(self, round_plan: RoundPlan) -> FloatArray:
        return np.zeros(round_plan.participants.size)

    def left_over_variance(
        self, round_plan: RoundPlan, absent: Collection[int] = (), *, repaired: bool = False
    ) -> float:
        return float(round_plan.own_variance.max())

    def adversary(self, plan: Plan) -> str:
        return "anyone who sees the released models; the server sees every bare update and is trusted"

    def why_no_guarantee(self, plan: Plan) -> str:
        return "The released sums carry no noise."
