"""What the adversary holds, and nothing else.

The adversary is the server, perhaps with some clients on its side. It has every upload, what everyone may
know (the plan of the round with its graph and variances, the weights it sent out), what it knows or guesses
of other clients' updates, and every share that one of its colluders sent or received.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niss.accounting import RoundPlan
from niss.errors import ConfigError

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Observation:
    """One round as the adversary sees it.

    uploads           one row per participant: what really left the devices
    weights           the global model the server had sent out, as one vector
    plan              the public numbers of the round; the drawn distortion factors are not among them
    share             the public aggregation weights p_k
    colluders         seats on the adversary's side
    known_updates     updates x_j the adversary knows or guesses, by seat; the others it takes to be zero
    known_shares      the shares (sender, receiver) that a colluder sent or received
    """

    uploads: FloatArray
    weights: NDArray[np.floating[Any]]
    plan: RoundPlan
    share: FloatArray
    colluders: tuple[int, ...] = ()
    known_updates: Mapping[int, FloatArray] = field(default_factory=dict)
    known_shares: Mapping[tuple[int, int], FloatArray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.plan.scales is not None:
            raise ConfigError("the drawn factors are secret and no part of an observation", field="plan")
        strangers = [ends for ends in self.known_shares if not set(ends) & set(self.colluders)]
        if strangers:
            raise ConfigError(f"no colluder sits at an end of {strangers[0]}", field="known_shares")

    @property
    def size(self) -> int:
        return len(self.uploads)

    @property
    def honest(self) -> NDArray[np.int64]:
        """Seats that are not on the adversary's side, in order."""
        return np.setdiff1d(np.arange(self.size), self.colluders)

    def known_shares_into(self, seat: int) -> int:
        """How many shares that this seat received are known."""
        return sum(receiver == seat for _, receiver in self.known_shares)
