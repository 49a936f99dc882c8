"""What distinguishes the methods: which noise is added, where, and by whom.

`fedavg` adds none, `dp-fedavg` lets every client add its own, `niss` shares noise that cancels, and in
`central-dp` a trusted server adds noise once, to the sum.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from niss.accounting import RoundPlan
from niss.graph import ShareGraph
from niss.mechanism import add_gaussian, add_shares
from niss.randomness import SimStream

Uploads = NDArray[np.floating[Any]]


class AddShares(Protocol):
    """`niss.mechanism.add_shares`, or what a device does in its place."""

    def __call__(
        self,
        uploads: Uploads,
        edges: ShareGraph,
        *,
        unit_variance: float,
        tau2: ArrayLike,
        distortion: str,
        stream: SimStream,
        keep_factors: bool = False,
    ) -> NDArray[np.floating[Any]] | None: ...


def add_client_noise(
    uploads: Uploads, plan: RoundPlan, stream: SimStream, add_shares: AddShares = add_shares
) -> RoundPlan:
    """Turn `p_k x_k` into what each client uploads, in place; returns the plan with what was drawn."""
    if plan.plan.method == "dp-fedavg":
        for seat, variance in enumerate(plan.own_variance):
            add_gaussian(uploads[seat], float(np.sqrt(variance)), stream.child("own", seat))
    if plan.plan.method == "niss":
        scales = add_shares(
            uploads,
            plan.graph,
            unit_variance=plan.unit_variance,
            tau2=plan.tau2,
            distortion=plan.plan.distortion,
            stream=stream,
            keep_factors=_affordable(plan, uploads.shape[1]),
        )
        return plan.with_scales(None if scales is None else scales.astype(np.float64))
    return plan


def _affordable(plan: RoundPlan, coordinates: int) -> bool:
    """Whether a distortion per coordinate can be accounted for: one matrix of the cohort per coordinate."""
    clients, edges = plan.participants.size, plan.graph.senders.size
    return clients <= 40 and edges * coordinates <= 2e7


def add_server_noise(total: NDArray[np.float64], plan: RoundPlan, stream: SimStream) -> None:
    """What a trusted server adds to the sum before releasing it, in place."""
    if plan.plan.method == "central-dp":
        add_gaussian(total, float(np.sqrt(plan.aggregate_variance)), stream.child("server"))
