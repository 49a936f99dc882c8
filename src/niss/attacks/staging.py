"""Plays one round with the mechanism itself and hands out what the adversary may see.

The truth stays with the caller, who scores the attack; the attack is given the `Observation`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niss.accounting import Plan, RoundPlan, effective_variance
from niss.attacks.observation import Observation
from niss.errors import ConfigError
from niss.graph import ShareGraph
from niss.mechanism import add_gaussian, add_shares, clip_elements, clip_l2
from niss.randomness import SimStream

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Staged:
    """A played round: what the adversary sees, what the clients really contributed, and what was drawn."""

    observation: Observation
    updates: FloatArray
    plan: RoundPlan

    def predicted_variance(self, victim: int) -> float:
        """The accountant's effective variance of the victim's upload against this very adversary."""
        plan, seen = self.plan, self.observation
        if plan.plan.method != "niss":
            return float(plan.own_variance[victim]) if plan.plan.private else 0.0
        additive = plan.plan.distortion == "additive"
        if plan.plan.distortion == "coordinate" and plan.scales is None and np.any(plan.tau2 > 0.0):
            raise ConfigError(
                "the factors of this round were not kept", field="keep_factors", hint="stage it with them"
            )
        residual = plan.tau2 * plan.unit_variance * plan.graph.in_weight if additive else 0.0
        found = effective_variance(
            plan.graph,
            unit_variance=plan.unit_variance,
            residual_variance=residual,
            colluders=seen.colluders,
            scales=plan.scales,
        )
        return float(found[int(np.searchsorted(seen.honest, victim))])

    def predicted_fraction(self, victim: int) -> float:
        """The most of the victim's update that the accountant expects to be recovered (see `recovered_fraction`).

        With signal ||x||^2 / h and noise v / p^2 per coordinate, the squared cosine between the best linear
        estimate and the truth is signal / (signal + noise).
        """
        signal = float(np.mean(self.updates[victim] ** 2))
        noise = self.predicted_variance(victim) / float(self.observation.share[victim]) ** 2
        return signal / (signal + noise) if signal + noise > 0.0 else 0.0


def stage_round(
    updates: NDArray[np.floating[Any]],
    weights: NDArray[np.floating[Any]],
    plan: Plan,
    *,
    stream: SimStream,
    share: FloatArray | None = None,
    records: float = 1.0,
    colluders: Collection[int] = (),
    knows_updates_of: Collection[int] = (),
    keep_factors: bool = False,
    public: RoundPlan | None = None,
) -> Staged:
    """Clip, weigh and hide `updates` (m x h) as the plan says; `share` defaults to 1/m each.

    The adversary is told the updates of its colluders and of `knows_updates_of`. `public` takes over the graph and
    the noise of an earlier round, as where the graph is complete and nothing else has changed.
    """
    size = len(updates)
    p = np.full(size, 1.0 / size) if share is None else share
    if public is None:
        public = plan.for_round(
            np.arange(size),
            weights=p,
            records=np.full(size, records),
            beacon=stream.child("beacon").generator().bytes(32),
        )
    clipped = np.stack([clip_update(row, plan) for row in updates.astype(np.float64)])
    uploads = p[:, None] * clipped
    noise = stream.child("noise")
    drawn = hide(uploads, public, noise, keep_factors=keep_factors)
    told = sorted({*colluders, *knows_updates_of})
    observation = Observation(
        uploads=uploads,
        weights=weights,
        plan=public,
        share=p,
        colluders=tuple(sorted(colluders)),
        known_updates={seat: clipped[seat] for seat in told},
        known_shares=_shares_of(public, set(colluders), uploads.shape[1], noise),
    )
    return Staged(observation, clipped, drawn)


def clip_update(update: FloatArray, plan: Plan) -> FloatArray:
    """What the plan's unit bounds: the L2 norm, or single entries in the paper's reading; nothing in fedavg."""
    if not plan.private:
        return update.copy()
    return clip_elements(update, plan.clip) if plan.unit == "nbafl" else clip_l2(update, plan.clip)


def recovered_fraction(estimate: FloatArray, truth: FloatArray) -> float:
    """The squared cosine between estimate and truth: the part of the update's energy that a scaled estimate gets.

    1 is the whole update, 0 nothing; noise alone scores about 1/h.
    """
    product = float(np.sum(estimate * truth))
    energy = float(np.sum(estimate**2)) * float(np.sum(truth**2))
    return product * product / energy if energy > 0.0 else 0.0


def relative_error(estimate: FloatArray, truth: FloatArray) -> float:
    """||estimate - truth|| / ||truth||."""
    return float(np.sqrt(np.sum((estimate - truth) ** 2) / np.sum(truth**2)))


def hide(uploads: FloatArray, plan: RoundPlan, stream: SimStream, *, keep_factors: bool = False) -> RoundPlan:
    """Add every client's noise to its row `p_k x_k`, in place; returns the plan with what was drawn."""
    if plan.plan.method == "dp-fedavg":
        for seat, variance in enumerate(plan.own_variance):
            add_gaussian(uploads[seat], float(np.sqrt(variance)), stream.child("own", seat))
    if plan.plan.method != "niss":
        return plan
    scales = add_shares(
        uploads,
        plan.graph,
        unit_variance=plan.unit_variance,
        tau2=plan.tau2,
        distortion=plan.plan.distortion,
        stream=stream,
        keep_factors=keep_factors,
    )
    return plan.with_scales(None if scales is None else scales.astype(np.float64))


def _shares_of(
    plan: RoundPlan, colluders: set[int], coordinates: int, stream: SimStream
) -> dict[tuple[int, int], FloatArray]:
    """The shares that colluders sent or received, from the mechanism: an edge draws the same numbers again."""
    graph = plan.graph
    known: dict[tuple[int, int], FloatArray] = {}
    for sender, receiver, weight in zip(
        graph.senders.tolist(), graph.receivers.tolist(), graph.weights.tolist(), strict=True
    ):
        if {sender, receiver} <= colluders or not {sender, receiver} & colluders:
            continue
        rows = np.zeros((graph.size, coordinates))
        add_shares(
            rows,
            ShareGraph(graph.size, [(sender, receiver, weight)]),
            unit_variance=plan.unit_variance,
            tau2=0.0,
            distortion="additive",
            stream=stream,
        )
        known[sender, receiver] = rows[sender]
    return known
