"""Who takes part in a round, and with which weight: both public and fixed before anything is uploaded.

shuffled   clients are shuffled and dealt out in whole cohorts, then shuffled anew, so that all take part equally often;
           a client may be dealt out last and first again, so nothing is promised about the time between
cyclic     shuffled once and dealt out over and over: fixed cohorts, and every client returns after exactly
           clients / participants rounds
uniform    a fresh random set each round, as in the paper; with a `separation`, among the clients that stayed out of the
           last separation - 1 rounds
poisson    every client on its own, with probability participants / clients: the number varies from round to round

All draws follow from the seed, the number of the round, and who took part before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from niss.randomness import SimStream
from niss.simulation.sections import Sampling

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


def choose_participants(
    number: int,
    *,
    sampling: Sampling,
    size: int,
    eligible: NDArray[np.bool_],
    stream: SimStream,
    resting: Sequence[IntArray] = (),
) -> IntArray:
    """The participants of round `number` (counted from 0), in ascending order.

    size      how many take part (poisson: on average)
    eligible  the clients that have budget left; the others stay out
    resting   the participants of the latest rounds, who stay out too where they are drawn `uniform`
    """
    clients = eligible.size
    if sampling in ("shuffled", "cyclic"):
        shuffle, place = divmod(number, clients // size)
        # Cyclic cohorts are those of the first shuffle, again and again.
        shuffle = 0 if sampling == "cyclic" else shuffle
        order = stream.child("shuffle", shuffle).generator().permutation(clients)
        chosen = order[place * size : (place + 1) * size]
        chosen = chosen[eligible[chosen]]
    elif sampling == "poisson":
        drawn = stream.child("poisson", number).generator().random(clients) < size / clients
        chosen = np.flatnonzero(drawn & eligible)
    else:
        rested = eligible.copy()
        for participants in resting:
            rested[participants] = False
        pool = np.flatnonzero(rested)
        chosen = stream.child("uniform", number).generator().permutation(pool)[:size]
    return np.sort(chosen).astype(np.int64)


def absent_seats(size: int, share: float, stream: SimStream) -> list[int]:
    """The seats that drop out of a round, each with that probability; one always stays."""
    drawn = stream.generator().random(size) < share
    drawn[0] &= not drawn.all()
    return [int(seat) for seat in np.flatnonzero(drawn)]


def aggregation_weights(
    sizes: IntArray, *, rule: str, cap: int | None, expected: int | None = None
) -> FloatArray:
    """`p_k` of the participants: equal, or in proportion to declared dataset sizes, capped.

    Both are public and fixed before anything is uploaded; a weight that depended on private sizes would
    leak through everybody's upload. `expected` is what equal weights divide by where the number of participants is
    drawn in secret.
    """
    if rule == "equal":
        return np.full(sizes.size, 1.0 / (expected or sizes.size))
    declared = np.minimum(sizes, cap) if cap is not None else sizes
    return np.asarray(declared / declared.sum(), dtype=np.float64)
