"""The numbers that a planner has found: how much noise of which kind there is in an upload, and who is assumed away."""

from __future__ import annotations

from dataclasses import dataclass

from niss.checks import require_real, require_whole


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The noise of rounds of one size, variances in units of Delta^2, the squared sensitivity of one upload.

    participants          of a round, m
    neighbours            unit shares that each client sends within the round, each of the variance `unit`
    residual              of the fresh noise in one upload
    carried               of all that one upload carries on to the next round, where it is taken out; 0: nothing
    self_mask             of what an upload carries until the round is repaired, so that a client that is called dropped
                          although it uploaded is hidden without its shares
    colluders             most participants of a round that tell the server all they know
    dropped, revealed     most clients of a round that repairs may call dropped, and most edges of a client that they
                          reveal; the shares of the former are known like a colluder's
    committee, threshold  members that repair a round, and how many of them must answer; 0: nothing is repaired
    """

    participants: int
    neighbours: float
    unit: float
    residual: float
    carried: float = 0.0
    self_mask: float = 0.0
    colluders: int = 0
    dropped: int = 0
    revealed: int = 0
    committee: int = 0
    threshold: int = 0

    def __post_init__(self) -> None:
        for name in ("participants", "colluders", "dropped", "revealed", "committee", "threshold"):
            require_whole(getattr(self, name), field=name, at_least=1 if name == "participants" else 0)
        for name in ("unit", "residual", "carried", "self_mask"):
            require_real(getattr(self, name), field=name)

    @property
    def spatial(self) -> float:
        """Variance of all shares within the round in one upload, sent and received."""
        return 2.0 * self.neighbours * self.unit

    @property
    def known(self) -> int:
        """Clients of a round whose shares the adversary may know."""
        return self.colluders + self.dropped
