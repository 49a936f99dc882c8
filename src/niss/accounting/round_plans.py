"""The numbers of one round under a plan: what is added where, and what that promises to whom."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from niss.graph import ShareGraph
from niss.mechanism.shares import Edges, SomeEdges
from niss.methods import CarriedEdges, mu_of
from niss.views import EXACT_LIMIT, WorstCase, effective_variance

if TYPE_CHECKING:
    from niss.accounting.plans import Plan

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Balance:
    """How unequally shares were received, as multiples of what was sent, and what the worst-off client kept.

    `kept` is its effective variance as a part of the worst-off client's on a balanced graph of the same
    size; None where there is nothing to compare, or too much to do it exactly.
    """

    least_received: float
    most_received: float
    kept: float | None


@dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """The numbers of one round: what is added where, and what that promises to whom.

    All arrays are in the order of `participants`. Variances are per coordinate of the upload `p_k x_k`.
    Methods that share no noise have a graph without edges.

    sensitivity    how far each can move its upload, in L2 norm
    own_variance   sigma_k^2, the noise each would need if it stood alone
    graph          who shares with whom, by seat
    unit_variance  sigma^2, the variance of a share of weight 1
    tau2           distortion of the shares each receives
    scales         the factors that a multiplicative distortion drew, once they are drawn and kept
    opponent       the worst case for which tau2 was calibrated
    number         of the round, from 0
    absent         seats that never uploaded
    repaired       whether their shares were taken out of the sum again
    before, after  what is carried to this round and from it; None: nothing
    history        participants of all earlier rounds, where noise is carried; None: nothing is known of other rounds
    keep_factors   whether to keep a distortion's factors per coordinate; None: where they can be accounted for
    """

    plan: Plan
    participants: IntArray
    sensitivity: FloatArray
    own_variance: FloatArray
    graph: ShareGraph
    unit_variance: float
    tau2: FloatArray
    scales: FloatArray | None = None
    opponent: WorstCase | None = None
    number: int = 0
    absent: tuple[int, ...] = ()
    repaired: bool = False
    before: CarriedEdges | None = None
    after: CarriedEdges | None = None
    history: tuple[IntArray, ...] | None = None
    keep_factors: bool | None = None

    def with_scales(self, scales: FloatArray | None) -> RoundPlan:
        """The same round, conditioned on the distortion factors that were drawn."""
        return replace(self, scales=scales)

    def with_lost(self, absent: Collection[int], *, repaired: bool = False) -> RoundPlan:
        """The same round without the uploads of these seats."""
        return replace(self, absent=tuple(sorted(absent)), repaired=repaired)

    @property
    def here(self) -> IntArray:
        """The seats whose uploads arrived."""
        return np.delete(np.arange(self.participants.size), self.absent)

    @property
    def edges(self) -> Edges:
        """The edges that are left: all, or after a repair those between survivors.

        Each has the same noise with and without the others.
        """
        if not (self.absent and self.repaired):
            return self.graph
        lost = np.zeros(self.graph.size, dtype=bool)
        lost[list(self.absent)] = True
        return SomeEdges.of(self.graph, ~(lost[self.graph.senders] | lost[self.graph.receivers]))

    @property
    def aggregate_variance(self) -> float:
        """Predicted noise variance of the sum of all uploads, with what a trusted server adds."""
        return self.plan.kind.aggregate_variance(self)

    @property
    def residual_variance(self) -> FloatArray:
        """What each client's distortion adds, `tau_k^2 sigma^2 in_k`."""
        return self.tau2 * self.unit_variance * self.graph.in_weight

    @cached_property
    def joint_variance(self) -> FloatArray | None:
        """Effective variance per client against a server that sees everything; None: not computed.

        Where the server is trusted, the view is that of anyone who sees the released model.
        """
        return self.plan.kind.joint_variance(self)

    @cached_property
    def worst(self) -> WorstCase | None:
        """The worst case over colluders; None where nobody is assumed to collude, or none is computed.

        The worst ratio of effective to wanted variance found at any client is charged to every client.
        """
        return self.plan.kind.worst(self)

    def balance(self) -> Balance | None:
        """What an unbalanced graph costs; None where every client receives as much as it sends."""
        if self.graph.balanced:
            return None
        received = self.graph.in_weight / self.graph.out_weight
        if self.graph.size > EXACT_LIMIT:
            return Balance(float(received.min()), float(received.max()), None)
        regular = ShareGraph.regular(
            self.participants.size, degree=self.plan.neighbours, beacon=self.graph.digest()
        )
        residual = self.tau2 * self.unit_variance * regular.in_weight
        fair = effective_variance(regular, unit_variance=self.unit_variance, residual_variance=residual)
        # Nobody colludes on either side of the comparison: what is measured is the graph.
        trusting = replace(
            self, plan=replace(self.plan, colluders=0, revealed=0), opponent=None
        ).joint_variance
        kept = None
        if trusting is not None and fair.min() > 0.0:
            kept = float(trusting.min() / fair.min())
        return Balance(float(received.min()), float(received.max()), kept)

    @property
    def marginal_variance(self) -> FloatArray:
        """Noise variance of one upload looked at alone: the paper's view."""
        return self.plan.kind.marginal_variance(self)

    def outsider_mu(self, variance: float) -> float:
        """mu of the worst-off participant against someone who sees the released sum, with noise of that variance."""
        return float(mu_of(self.sensitivity, variance).max())

    @property
    def joint_mu(self) -> FloatArray:
        """mu of the joint view; infinite where there is no guarantee or none was computed."""
        return self.plan.kind.joint_mu(self)

    @property
    def marginal_mu(self) -> FloatArray:
        """mu of the marginal view; infinite where an upload carries no noise."""
        return self.plan.kind.marginal_mu(self)
