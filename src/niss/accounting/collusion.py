"""How bad it can get when some clients tell the server all they know.

The corruption is static: at most `colluders` participants, chosen before the beacon, and so before the
graph, is known. A client's neighbours are then a random sample, and the number of colluders among them
stays below a hypergeometric quantile except with a stated probability, which is charged to delta. Given
that bound, the worst set of colluders is found exactly where all sets can be tried (or are all alike),
and else by a search, which is reported as such.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from niss.accounting.collusion_search import Search, by_ratio
from niss.accounting.corruption import Corruption, WorstCase
from niss.accounting.joint import effective_variance, least_tau2, received_variance, target_per_client
from niss.accounting.view import per_client
from niss.errors import PrivacyError
from niss.graph import ShareGraph

FloatArray = NDArray[np.float64]

# All sets of colluders are tried when there are at most this many.
EXACT_SETS = 3_000
_REFINEMENTS = 6
_SMALL = 500


def worst_case(
    graph: ShareGraph,
    corruption: Corruption,
    *,
    unit_variance: float,
    residual_variance: ArrayLike,
    target_variance: ArrayLike,
) -> WorstCase:
    """The smallest ratio of effective to target variance over honest clients and colluder sets."""
    residual = per_client(residual_variance, graph.size, "residual_variance")
    target = target_per_client(target_variance, graph.size)
    removed = corruption.removed
    if removed > graph.size - 2:
        raise PrivacyError(
            f"{removed} of {graph.size} participants known to the server leave nobody to share noise with",
            hint="assume fewer colluders or reveals, or let more clients take part",
        )
    search = Search(graph, corruption, unit_variance, residual, target)
    if removed == 0:
        return search.evaluate_all((), exact=True)
    if search.all_alike():
        return search.evaluate_all(tuple(range(graph.size - removed, graph.size)), exact=True)
    if math.comb(graph.size, removed) <= EXACT_SETS:
        return search.enumerate(removed)
    return search.guided(removed)


def calibrate_for(
    graph: ShareGraph,
    corruption: Corruption,
    *,
    unit_variance: float,
    target_variance: ArrayLike,
) -> tuple[float, WorstCase]:
    """The smallest common tau^2 that keeps every target in the worst case found, and that worst case."""
    target = target_per_client(target_variance, graph.size)
    everyone = np.arange(graph.size)
    received = received_variance(graph, unit_variance, everyone)

    def examine(tau2: float) -> WorstCase:
        return worst_case(
            graph,
            corruption,
            unit_variance=unit_variance,
            residual_variance=tau2 * received,
            target_variance=target,
        )

    opponents: list[WorstCase] = []

    def ratio_of(opponent: WorstCase, tau2: float) -> float:
        variance = effective_variance(
            graph,
            unit_variance=unit_variance,
            residual_variance=tau2 * received,
            colluders=opponent.colluders,
            clients=[opponent.client],
        )
        return float(variance[0] / target[opponent.client])

    def ratio(tau2: float) -> float:
        return min(ratio_of(opponent, tau2) for opponent in opponents) if opponents else examine(tau2).ratio

    def worst_known(tau2: float, found: WorstCase) -> WorstCase:
        """The search may miss at this tau^2 what it found at another."""
        again = [replace(opponent, ratio=ratio_of(opponent, tau2)) for opponent in opponents]
        worst = min([found, *again], key=by_ratio)
        return replace(worst, examined=found.examined)

    first = examine(float(np.max(target / received)) / graph.size)
    # Following one opponent is quick; on a small graph so is asking for the worst of all each time.
    if not first.exact or first.colluders or graph.size > _SMALL:
        opponents.append(first)
    for _ in range(_REFINEMENTS):
        tau2 = least_tau2(graph, unit_variance, target, everyone, ratio)
        found = examine(tau2)
        if found.ratio >= 1.0 - 1e-9:
            return tau2, worst_known(tau2, found)
        opponents.append(found)
    # The search keeps finding slightly worse sets: step past the last one.
    while found.ratio < 1.0 - 1e-9:
        tau2 *= 1.02
        found = examine(tau2)
    return tau2, worst_known(tau2, found)
