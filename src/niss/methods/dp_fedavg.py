"""DP-FedAvg with local noise: every client hides its upload alone, and the noise of all of them stays in the sum."""

# ruff: noqa: ARG002  (a method ignores what it does not need to know)

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from niss.mechanism.shares import Edges
from niss.methods.base import Method, UploadRows, server_adversary
from niss.methods.look import PINK, SHORT, Look
from niss.randomness import SimStream

if TYPE_CHECKING:
    from niss.accounting.plans import Plan
    from niss.accounting.round_plans import RoundPlan


class DpFedAvg(Method):
    """Client k adds `N(0, sigma_k^2 I)` to its upload; the sum of m uploads carries `m sigma_k^2`.

    Each upload is protected by its own noise alone, so it makes no difference what the server does with the others or
    how many clients collude.
    """

    name = "dp-fedavg"
    look = Look(PINK, "v", SHORT)
    trusts = "nobody"
    adds_own_noise = True

    def add_client_noise(
        self,
        uploads: UploadRows,
        round_plan: RoundPlan,
        stream: SimStream,
        edges: Edges | None = None,
        *,
        keep_factors: bool | None = None,
    ) -> RoundPlan:
        uploads.add_own_noise(np.sqrt(round_plan.own_variance), stream)
        return round_plan

    def adversary(self, plan: Plan) -> str:
        return server_adversary(0)
