"""What every plan starts from: the parts of delta, and committees."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from niss.views import colluding_neighbours
from niss.views.numerics import binomial_quantile

FloatArray = NDArray[np.float64]

# The parts of delta that pay for bounds on colluders among neighbours and in committees, and for noise on a grid.
FAILURE_SHARE = 0.1
# What committees take of the first, where they are drawn from larger rounds.
COMMITTEE_SHARE = 0.5
# A committee has at least so many members, or everyone: one that fell out of use for two dropouts would help nobody.
_LEAST_COMMITTEE = 10
GRID_SHARE = 0.02


def most_dropped(count: int, dropout: float, delta: float) -> int:
    """The most of `count` clients that drop out, but for one round in a million; beyond it a repair is refused."""
    return binomial_quantile(min(1e-6, delta), count, dropout) if dropout else 0


def split_failure(failure: float, *, drawn: bool) -> tuple[float, float]:
    """What bounds on the neighbours, and what the bound on a committee, may fail with on one graph.

    `drawn`: a committee is drawn from a larger round; else nothing about it can fail.
    """
    part = COMMITTEE_SHARE * failure if drawn else 0.0
    return failure - part, part


def committee_threshold(participants: int, committee: int, colluders: int, failure: float) -> int:
    """The fewest members that must answer: `t = floor((n + c) / 2) + 1`, if at most c of n members collude.

    Of two survivor sets that each gather t members, `2 t - n > c` members answer both: one of them is honest, and an
    honest one answers for one set. c is exceeded with at most the probability `failure` (hypergeometric; 0: all
    colluders may be members). Where the threshold is larger than the committee, it cannot be that safe.
    """
    feared = min(committee, colluders)
    if committee < participants:
        feared = colluding_neighbours(participants, committee, colluders, failure)
    return (committee + feared) // 2 + 1


def committee_size(participants: int, colluders: int, failure: float, dropout: float) -> int | None:
    """The smallest committee that repairs all but one round in a million at this dropout rate; None: everyone, or none.

    failure   with which more members may collude than its threshold allows for, on one graph
    """
    for size in range(min(_LEAST_COMMITTEE, participants), participants):
        threshold = committee_threshold(participants, size, colluders, failure)
        if most_dropped(size, dropout, 1.0) <= size - threshold:
            return size
    return None
