"""Attempts at a round: how much more noise the next one takes when the drawn graph costs more than was promised.

The noise is committed to before the graph is known. An attempt that would cost too much is given up before any client
is told of it: nothing is sent, so no client is charged. What attempts do cost is delta. A graph that is drawn again is
a new chance for colluders to surround a client, so the failure probability of the collusion bound counts once for
each of `Plan.attempts`, whether it is used or not.
"""

from __future__ import annotations

_MARGIN, _MOST = 1.1, 10.0


def more_noise(mu: float, allowed: float) -> float:
    """The factor on the residual variance for the next attempt, after one that would cost `mu`.

    Variance falls with mu^2, so (mu / allowed)^2 would do on the same graph; 1.1 times that allows for another one.
    """
    return min(_MARGIN * (mu / allowed) ** 2, _MOST)
