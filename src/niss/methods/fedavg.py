"""FedAvg without noise, the accuracy that all else is measured by; and with local noise, which stays in the sum."""

# ruff: noqa: ARG002  (a method ignores what it does not need to know)

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from niss.methods.base import Method, UploadRows, server_adversary
from niss.methods.look import DOTTED, INK, PINK, SHORT, Look
from niss.randomness import SimStream

if TYPE_CHECKING:
    from niss.accounting.plans import Plan, RoundPlan


class FedAvg(Method):
    """Updates are uploaded as they are; all variances are zero and every mu is infinite."""

    name = "fedavg"
    look = Look(INK, "p", DOTTED, hollow=True)
    trusts = "all who see the updates"
    private = False

    def adversary(self, plan: Plan) -> str:
        return "none: the server sees every bare update"


class DpFedAvg(Method):
    """Client k adds `N(0, sigma_k^2 I)` to its upload; the sum of m uploads carries `m sigma_k^2`.

    Each upload is protected by its own noise alone, so it makes no difference what the server does with the others or
    how many clients collude.
    """

    name = "dp-fedavg"
    look = Look(PINK, "v", SHORT)
    trusts = "nobody"
    adds_own_noise = True

    def add_client_noise(self, uploads: UploadRows, round: RoundPlan, stream: SimStream) -> RoundPlan:
        uploads.add_own_noise(np.sqrt(round.own_variance), stream)
        return round

    def adversary(self, plan: Plan) -> str:
        return server_adversary(0)
