"""What all runs of a node may cost it together: several limits hold, and the smallest binds.

    the first budget   fixed in the ledger by the first run that charged it, for good
    the owner's        `niss-epsilon` and `niss-delta` of today, or the ceiling of a node that sets none

A lowered limit of the owner's counts from the next charge on. A raised one does not make the first budget larger: what
was promised when the ledger was begun stays promised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from niss.checks import LIMITS
from niss.errors import PrivacyError
from niss.mechanism import gdp_epsilon, gdp_mu

FIRST_BUDGET = "the budget that the ledger was begun with"
# What sums of a few thousand charges may differ by from the exact value.


@dataclass(frozen=True)
class Limit:
    """One limit.

    source   what sets it, in words
    epsilon  of all charges together
    delta    of all charges together
    failing  the part of delta that pays for bounds that may fail and for the grid
    mu       the most that the noise of all charges may cost, which is what the limit comes to
    """

    source: str
    epsilon: float
    delta: float
    failing: float
    mu: float

    @classmethod
    def of_ledger(cls, mu: float, delta: float, failing: float) -> Limit:
        """The budget mu that is fixed in a ledger, with the parts of its delta."""
        return cls(FIRST_BUDGET, gdp_epsilon(mu, delta - failing), delta, failing, mu)

    @classmethod
    def of_owner(cls, source: str, epsilon: float, delta: float, failing: float) -> Limit:
        """A target, of which so much of delta is taken up by what may fail."""
        left = delta - failing
        return cls(source, epsilon, delta, failing, gdp_mu(epsilon, left) if left > 0.0 else 0.0)

    def spent(self, mu: float) -> float:
        """Epsilon of charges that come to this mu, at the limit's delta; infinite where nothing of it is left."""
        if mu <= 0.0:
            return 0.0
        left = self.delta - self.failing
        return gdp_epsilon(mu, left) if left > 0.0 else math.inf

    @property
    def words(self) -> str:
        """The limit as a node's log and `niss account` show it."""
        return f"{self.source}, epsilon {self.epsilon:.4g} at delta {self.delta:g}"


def binding(limits: list[Limit]) -> Limit | None:
    """The limit that is reached first; None without limits."""
    return min(limits, key=lambda limit: limit.mu, default=None)


def require_within(limits: list[Limit], joint_squared: float) -> None:
    """Raise `PrivacyError` for charges whose mu^2 in the joint view come to more than a limit allows."""
    limit = binding(limits)
    if limit is None or joint_squared <= limit.mu**2 * (1.0 + LIMITS):
        return
    raised = [other for other in limits if other.epsilon > limit.epsilon and limit.source == FIRST_BUDGET]
    why = f"; a larger one ({raised[0].words}) does not raise it" if raised else ""
    total = limit.spent(math.sqrt(joint_squared))
    cost = f"cost epsilon {total:.4g} at delta {limit.delta:g}"
    if not math.isfinite(total):
        cost = "take up the whole delta with bounds that may fail"
    raise PrivacyError(
        f"would overspend: all runs together would {cost}, and what binds is {limit.words}{why}",
        hint="use fewer rounds or a smaller epsilon in the plan; `niss account` on the node's niss-state folder shows "
        "what is left",
    )
