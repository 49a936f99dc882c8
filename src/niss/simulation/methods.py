"""What distinguishes the methods: which noise is added, where, and by whom.

`fedavg` adds none, `dp-fedavg` lets every client add its own, `niss` shares noise that cancels, and in
`central-dp` a trusted server adds noise once, to the sum.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from niss.accounting import RoundPlan
from niss.learning import Uploads
from niss.mechanism import add_gaussian
from niss.mechanism.shares import Edges
from niss.randomness import SimStream


def add_client_noise(
    uploads: Uploads, plan: RoundPlan, stream: SimStream, edges: Edges | None = None
) -> RoundPlan:
    """Turn `p_k x_k` into what each client uploads, in place; returns the plan with what was drawn.

    `edges`, where only some of the graph's are left: then the rows are the uploads without the others.
    """
    if plan.plan.method == "dp-fedavg":
        uploads.add_own_noise(np.sqrt(plan.own_variance), stream)
    if plan.plan.method == "niss":
        scales = uploads.add_shares(
            plan.graph if edges is None else edges,
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
