"""What is assumed of dishonest participants, and the worst that was found."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from niss.errors import ConfigError


@dataclass(frozen=True)
class Corruption:
    """At most `colluders` static colluders, and what a repair of dropouts may give away.

    `revealed` edges of any one client, at most, are told to the server, and at most `dropped` clients are
    declared dropped in a round: all their edges may be revealed and their own noise is lost, so they count
    like colluders. `failure` is the probability, per client and round, with which more of its neighbours
    may collude than the accountant assumes.
    """

    colluders: int = 0
    revealed: int = 0
    dropped: int = 0
    failure: float = 0.0

    @property
    def removed(self) -> int:
        """The most participants whose part is known to the server or missing."""
        return self.colluders + max(self.revealed, self.dropped)

    def __post_init__(self) -> None:
        for field in ("colluders", "revealed", "dropped"):
            value = getattr(self, field)
            if not isinstance(value, (int, np.integer)) or value < 0:
                raise ConfigError(f"must be a whole number, not below 0, not {value!r}", field=field)
        if not 0.0 <= self.failure < 1.0:
            raise ConfigError(f"must lie in [0, 1), not {self.failure!r}", field="failure")


@dataclass(frozen=True)
class WorstCase:
    """The worst that was found: `ratio` is effective variance over target, for `client`, with `colluders`.

    `exact` says whether every admissible set was covered; otherwise `examined` sets were.
    """

    ratio: float
    client: int
    colluders: tuple[int, ...]
    exact: bool
    examined: int


@lru_cache(maxsize=4_096)
def colluding_neighbours(participants: int, neighbours: int, colluders: int, failure: float) -> int:
    """The least q with P(more than q of the neighbours collude) <= failure.

    The neighbours are a uniform sample of the other participants, `colluders` of whom collude.
    """
    if not 0 <= neighbours < participants or not 0 <= colluders < participants:
        raise ConfigError("neighbours and colluders must be fewer than the participants", field="neighbours")
    most = min(neighbours, colluders)
    if failure <= 0.0:
        # A probability too small for a float is not yet none.
        return most
    from scipy.stats import hypergeom

    for count in range(most):
        if hypergeom.sf(count, participants - 1, colluders, neighbours) <= failure:
            return count
    return most
