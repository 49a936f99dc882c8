"""The noise that is needed against colluders who are known: an oracle for what is proved against unknown ones."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq

from niss.graph import ShareGraph
from niss.views import effective_variance


def calibrate_tau2(
    graph: ShareGraph,
    *,
    unit_variance: float,
    target_variance: ArrayLike,
    colluders: Collection[int] = (),
) -> float:
    """The smallest common tau^2 that gives everyone but these colluders the variance that it wants."""
    target = np.delete(np.broadcast_to(np.asarray(target_variance, float), graph.size), list(colluders))
    received = unit_variance * graph.in_weight

    def shortfall(log_tau2: float) -> float:
        reached = effective_variance(
            graph,
            unit_variance=unit_variance,
            residual_variance=np.exp(log_tau2) * received,
            colluders=colluders,
        )
        return float(np.log(np.min(reached / target)))

    ends = np.log(target.max() / received.sum()) - 1.0, np.log(target.max() / received.min()) + 1.0
    return float(np.exp(brentq(shortfall, *ends, xtol=1e-13) + 1e-12))
