"""How far the server moves the model in each round, fixed before the first: `server_rate` times a factor.

    constant   1
    linear     1 - t / T           t = 0, ..., T - 1
    cosine     (1 + cos(pi t / T)) / 2

All factors are above 0, and public: noise that one round adds and another takes out is rescaled by their ratio.
"""

from __future__ import annotations

import math
from typing import Literal

ServerRateSchedule = Literal["constant", "linear", "cosine"]


def rate_factors(schedule: ServerRateSchedule, rounds: int) -> tuple[float, ...]:
    """The factor of every round; () where all are alike."""
    if schedule == "linear":
        return tuple(1.0 - number / rounds for number in range(rounds))
    if schedule == "cosine":
        return tuple((1.0 + math.cos(math.pi * number / rounds)) / 2.0 for number in range(rounds))
    return ()
