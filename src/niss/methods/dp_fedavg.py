"""DP-FedAvg with local noise: every client hides its upload alone, and the noise of all of them stays in the sum."""

# ruff: noqa: ARG002  (a method ignores what it does not need to know)

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from niss.mechanism.shares import Edges
from niss.methods.base import (
    FloatArray,
    Method,
    PlanSettings,
    Round,
    RoundNumbers,
    UploadRows,
    server_adversary,
)
from niss.randomness import SimStream


class OwnNoise(Method):
    """A method in which nothing is shared and the server adds nothing: `own_variance` is all the noise there is."""

    def joint_variance(self, round_plan: RoundNumbers) -> FloatArray:
        return round_plan.own_variance

    def marginal_variance(self, round_plan: RoundNumbers) -> FloatArray:
        return round_plan.own_variance

    def aggregate_variance(self, round_plan: RoundNumbers) -> float:
        return float(round_plan.own_variance.sum())

    def left_over_variance(
        self,
        round_plan: RoundNumbers,
        absent: Collection[int],
        *,
        repaired: bool,
    ) -> float:
        return float(np.delete(round_plan.own_variance, sorted(absent)).sum())


class DpFedAvg(OwnNoise):
    """Client k adds `N(0, sigma_k^2 I)` to its upload; the sum of m uploads carries `m sigma_k^2`.

    Each upload is protected by its own noise alone, so it makes no difference what the server does with the others or
    how many clients collude.
    """

    name = "dp-fedavg"
    trusts = "nobody"
    adds_own_noise = True

    def add_client_noise(
        self,
        uploads: UploadRows,
        round_plan: Round,
        stream: SimStream,
        edges: Edges | None = None,
        *,
        keep_factors: bool | None = None,
    ) -> Round:
        uploads.add_own_noise(np.sqrt(round_plan.own_variance), stream)
        return round_plan

    def adversary(self, plan: PlanSettings) -> str:
        return server_adversary(0)
