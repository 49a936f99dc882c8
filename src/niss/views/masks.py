"""Uniform masks in place of Gaussian shares: how much residual noise they need.

Modulo 2^b, a uniform mask on each edge of a connected graph, added at one end and taken off at the other, makes the
uploads uniform among all with the same sum: along a spanning tree the masks can be solved for, whatever the uploads but
the last. So a server that sees all uploads and knows some of the masks sees, of each connected group of clients that is
left once colluders, clients that were declared dropped and revealed edges are taken away, its sum and nothing else:

    effective variance of k  =  sum of eta_j^2 over the group of k.

With n equal clients in the group that is n eta^2, and `eta^2 = sigma_k^2 / n` keeps the promise: the sum of m uploads
then carries m / n of what a trusted server would add, 1 / (1 - rho) without dropouts. It is the limit of the joint view
as shares grow, and the bound of `niss.views.collusion` holds in it: where its `spare` and `kept` are above 0, the
honest clients are connected (a graph in two parts has a vector y of sum 0 with y' L_H y = 0). Where that is not shown,
a client is left with its own noise.
"""

from __future__ import annotations

import math
from dataclasses import replace

from numpy.typing import ArrayLike

from niss.graph import ShareGraph
from niss.views.collusion import Corruption, WorstCase, worst_case


def calibrate_masks(
    graph: ShareGraph, corruption: Corruption, *, target_variance: ArrayLike
) -> tuple[float, WorstCase]:
    """The least residual variance, equal for all, that keeps every target in the worst case, and that worst case.

    The arguments are those of `worst_case`. What a client has left is proportional to the residual, so no search is
    needed.
    """
    worst = worst_case(
        graph, corruption, unit_variance=math.inf, residual_variance=1.0, target_variance=target_variance
    )
    return 1.0 / worst.ratio, replace(worst, ratio=1.0)
