"""Who takes part in a round, and with which public weight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from niss.randomness import SimStream

IntArray = NDArray[np.int64]


def choose_participants(
    number: int, *, sampling: str, size: int, eligible: NDArray[np.bool_], stream: SimStream
) -> IntArray:
    """The participants of round `number` (counted from 0), in ascending order.

    `shuffled`: clients are shuffled and dealt out in whole cohorts, then shuffled anew, so that all take
    part equally often. `uniform`: a fresh random set each round, as in the paper. Clients that are not
    eligible, because their budget is spent, stay out.
    """
    clients = eligible.size
    if sampling == "shuffled":
        cohorts = clients // size
        shuffle, place = divmod(number, cohorts)
        order = stream.child("shuffle", shuffle).generator().permutation(clients)
        chosen = order[place * size : (place + 1) * size]
        chosen = chosen[eligible[chosen]]
    else:
        pool = np.flatnonzero(eligible)
        chosen = stream.child("uniform", number).generator().permutation(pool)[:size]
    return np.sort(chosen).astype(np.int64)


def aggregation_weights(sizes: IntArray, *, rule: str, cap: int | None) -> NDArray[np.float64]:
    """`p_k` of the participants: equal, or in proportion to declared dataset sizes, capped.

    Both are public and fixed before anything is uploaded; a weight that depended on private sizes would
    leak through everybody's upload.
    """
    if rule == "equal":
        return np.full(sizes.size, 1.0 / sizes.size)
    declared = np.minimum(sizes, cap) if cap is not None else sizes
    return np.asarray(declared / declared.sum(), dtype=np.float64)
