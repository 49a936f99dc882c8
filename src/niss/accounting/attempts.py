"""Attempts at a round: the first graph that keeps the promise, and how much more noise each next one takes.

The noise is committed to before the graph is known. An attempt that would cost too much is given up before any client
is told of it: nothing is sent, so no client is charged. What attempts do cost is delta. A graph that is drawn again is
a new chance for colluders to surround a client, so the failure probability of the collusion bound counts once for
each of `Plan.attempts`, whether it is used or not.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from niss.errors import PrivacyError, RemoteProtocolError
from niss.protocol.agreement import Agreed, agree
from niss.protocol.messages import RoundOpen

_MARGIN, _MOST = 1.1, 10.0


def draw_round(
    propose: Callable[[int, float], RoundOpen],
    assess: Callable[[Agreed, int], float],
    *,
    attempts: int,
    colluders: int,
    allowed: float,
) -> tuple[RoundOpen, float]:
    """The first attempt whose graph costs no client more than `allowed`, and its mu.

    `propose(attempt, more)` draws the graph of an attempt, with `more` times the residual variance of the terms. A
    graph on which clients would refuse the round altogether is given up like one that costs too much.
    """
    more, least = 1.0, math.inf
    refusal: RemoteProtocolError | None = None
    for attempt in range(attempts):
        opened = propose(attempt, more)
        try:
            mu = assess(agree(opened), colluders)
        except RemoteProtocolError as error:
            refusal = error
            continue
        if mu <= allowed:
            return opened, mu
        least = min(least, mu)
        more *= more_noise(mu, allowed)
    why = f"the best would cost mu = {least:.4g}, {allowed:.4g} is allowed"
    if refusal is not None and least == math.inf:
        why = refusal.message
    raise PrivacyError(
        f"none of {attempts} graphs keeps the promise for every client: {why}",
        hint="more neighbours, a larger kappa, more participants, or fewer colluders to be assumed",
    )


def more_noise(mu: float, allowed: float) -> float:
    """The factor on the residual variance for the next attempt, after one that would cost `mu`.

    Variance falls with mu^2, so (mu / allowed)^2 would do on the same graph; 1.1 times that allows for another one.
    """
    return min(_MARGIN * (mu / allowed) ** 2, _MOST)
