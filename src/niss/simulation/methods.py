"""The noise of a round, added by the method of its plan."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from niss.accounting import RoundPlan
from niss.learning import Uploads
from niss.mechanism.shares import Edges
from niss.randomness import SimStream


def add_client_noise(
    uploads: Uploads, plan: RoundPlan, stream: SimStream, edges: Edges | None = None
) -> RoundPlan:
    """As `Method.add_client_noise` of the plan's method."""
    return plan.plan.kind.add_client_noise(uploads, plan, stream, edges)


def add_server_noise(total: NDArray[np.float64], plan: RoundPlan, stream: SimStream) -> None:
    """As `Method.add_server_noise` of the plan's method."""
    plan.plan.kind.add_server_noise(total, plan, stream)
