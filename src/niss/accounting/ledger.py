"""What each client has spent, and the budget that may not be overspent: charges, their filter, and a node's limits.

A `Charge` is what one upload costs. Gaussian mechanisms compose exactly: `mu_total^2` is the sum of `mu_t^2` over the
rounds a client took part in. With a budget B fixed in advance a ledger is a privacy filter: a round that would push the
total past B is refused before anything is sent, and B is the claim. The running total is only "spent". `Ledger` is that
filter, in memory; a `LedgerFile` keeps one on disk, as a `LedgerHeader` and a `LedgerEntry` for each round.

What all runs of a node may cost it together has several limits, of which the smallest binds:

    the first budget   fixed in the ledger by the first run that charged it, for good
    the owner's        `niss-epsilon` and `niss-delta` of today, or the ceiling of a node that sets none

A lowered limit of the owner's counts from the next charge on. A raised one does not make the first budget larger: what
was promised when the ledger was begun stays promised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from niss.checks import BOOKS, LIMITS, require_real
from niss.errors import ConfigError, PrivacyError
from niss.files import to_json
from niss.mechanism import gdp_epsilon, gdp_mu
from niss.settings import NotNegative, Positive, Probability, settings

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

FORMAT = "niss-ledger/2"
FIRST_BUDGET = "the budget that the ledger was begun with"


@dataclass(frozen=True)
class Charge:
    """What one upload costs a client: an event, not a number, since not every mechanism composes by mu^2.

    mu2           that it adds in the joint view; infinite: no guarantee
    marginal_mu2  of the upload looked at alone
    slot          (q, z) of a round that was joined in secret: probability and noise multiplier; None: no secret
    grid_delta    what grid and sampler add to delta; None: nothing was promised that it could count against

    Of several clients at once the first two are arrays.
    """

    mu2: float | FloatArray = 0.0
    marginal_mu2: float | FloatArray = 0.0
    slot: tuple[float, float] | None = None
    grid_delta: float | None = None

    @classmethod
    def of(cls, joint: float | FloatArray, marginal: float | FloatArray = 0.0) -> Charge:
        """From the mu of both views; a negative one is refused, since its square would not show it."""
        if np.less(joint, 0.0).any() or np.less(marginal, 0.0).any():
            raise ConfigError("must be a number of at least 0", field="mu")
        return cls(joint * joint, marginal * marginal)

    @property
    def joint(self) -> float:
        """mu of the joint view, of one client."""
        return math.sqrt(self.mu2)

    @property
    def marginal(self) -> float:
        """mu of the upload looked at alone, of one client."""
        return math.sqrt(self.marginal_mu2)

    def require_composable(self) -> None:
        """Refuse what does not compose by mu^2, which is all that a ledger adds up: a slot would count for nothing."""
        if self.slot is not None:
            raise PrivacyError(
                f"a slot (q, z) = {self.slot} cannot be charged: ledgers compose mu^2 and nothing else",
                hint="charge the round by its mu, as if everybody knew who took part",
            )


class ChargeableLedger(Protocol):
    """Where one upload of each named client is charged; see `LedgerFile.charge`."""

    def charge(
        self, round: int, attempt: int, charges: Mapping[str, Charge], basis: Mapping[str, Any]
    ) -> object:
        """Charge before anything is sent, or raise PrivacyError."""


@settings
class LedgerHeader:
    """What a ledger promises; its first record.

    run             whose charges these are, in words
    delta           of every claim
    budgets         B_k of each client (None: nothing promised); None as a whole: any client may be charged, and nothing
                    is promised to anyone
    unit, relation  what is hidden, as in `Plan`
    delta_failure   the part of delta that pays for bounds that may fail, such as that on colluding neighbours;
                    mu becomes epsilon at the delta that is left
    """

    run: str
    delta: Probability
    budgets: Mapping[str, Positive | None] | None = None
    unit: str = "client"
    relation: str = "zero-out"
    delta_failure: NotNegative = 0.0

    def __post_init__(self) -> None:
        require_real(self.delta_failure, field="delta_failure", below=self.delta)

    def body(self) -> dict[str, Any]:
        """The record, without its hash."""
        return {"format": FORMAT, **vars(self), "budgets": self.budgets and dict(self.budgets)}


@dataclass(frozen=True)
class LedgerEntry:
    """One upload of each of these clients, charged before it left.

    round, attempt  which upload; no two entries of a ledger have the same
    charges         what it cost each client
    basis           in a few words, which worst case was charged
    hash            of the record, once it is written
    """

    round: int
    attempt: int
    charges: Mapping[str, Charge]
    basis: Mapping[str, Any]
    hash: str = ""

    def body(self, previous: str) -> dict[str, Any]:
        """The record, without its hash, after the record with the hash `previous`."""
        return {**self.to_json(), "previous": previous}

    def to_json(self) -> dict[str, Any]:
        """Plain values; null stands for an infinite mu, and what a charge does not have is left out."""
        charges = {
            client: {name: value for name, value in vars(charge).items() if value is not None}
            for client, charge in self.charges.items()
        }
        entry = {"round": self.round, "attempt": self.attempt, "basis": dict(self.basis)}
        return {**entry, "charges": to_json(charges)}


def client_order(client: str) -> tuple[int, int, str]:
    """Numbers in their own order, then names: a key for `sorted`."""
    return (0, int(client), client) if client.isdecimal() else (1, 0, client)


def fits(mu2: Any, budget: Any) -> Any:
    """Whether charges that come to mu^2 stay within a budget of mu: the filter, for numbers and arrays alike."""
    return mu2 <= budget**2 * (1.0 + BOOKS)


def overspent(client: object, mu2: float, budget: float) -> PrivacyError:
    """The error for a charge that would bring a client to mu^2, past its budget."""
    return PrivacyError(
        f"client {client} would overspend its privacy budget: mu {math.sqrt(mu2):.6g} of {budget:.6g}",
        hint="fewer rounds, a larger epsilon, or a higher cap on participations",
    )


@dataclass
class Ledger:
    """Spent privacy of every client: squared mu in the joint and the marginal view, and rounds taken part in.

    `budget` holds one B_k per client (infinite: nothing was promised to it), or None where nothing was promised in
    advance. `history` holds the participants of every round charged, in order.
    """

    joint_squared: FloatArray
    marginal_squared: FloatArray
    participations: IntArray
    budget: FloatArray | None = None
    history: list[IntArray] = field(default_factory=list, kw_only=True)

    @classmethod
    def empty(cls, clients: int, budget: FloatArray | None = None) -> Ledger:
        """A ledger of that many clients, numbered from 0, before the first round."""
        return cls(np.zeros(clients), np.zeros(clients), np.zeros(clients, dtype=np.int64), budget)

    def room(self, clients: IntArray, charge: Charge) -> NDArray[np.bool_]:
        """Whether the budget of each of these clients allows one more such charge: the filter."""
        charge.require_composable()
        if self.budget is None:
            return np.ones(clients.size, dtype=bool)
        total = self.joint_squared[clients] + charge.mu2
        return np.asarray(fits(total, self.budget[clients]))

    def require_room(self, clients: IntArray, charge: Charge) -> None:
        """Refuse (`PrivacyError`) a charge that any of them cannot afford."""
        room = self.room(clients, charge)
        if room.all():
            return
        assert self.budget is not None
        first = int(np.argmin(room))
        client = int(clients[first])
        mu2 = self.joint_squared[client] + np.broadcast_to(charge.mu2, clients.shape)[first]
        raise overspent(client, mu2, self.budget[client])

    def charge(self, participants: IntArray, charge: Charge, attempt: int = 0) -> None:  # noqa: ARG002
        """Charge a round before it is sent; refuse it whole if any participant would overspend.

        participants  by number, each once
        charge        what the round costs each of them
        attempt       which attempt at the round is played, for those who write it down
        """
        if np.unique(participants).size != participants.size:
            raise ConfigError("a client takes part in a round once", field="participants")
        self.require_room(participants, charge)
        self.joint_squared[participants] += charge.mu2
        self.marginal_squared[participants] += charge.marginal_mu2
        self.participations[participants] += 1
        self.history.append(participants)


@dataclass(frozen=True)
class Limit:
    """One limit on all runs of a node.

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
