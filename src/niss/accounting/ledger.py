"""What each client has spent, and the budget that may not be overspent: charges, their filter, and a node's limits.

A `Charge` is what one upload costs. Gaussian mechanisms compose exactly: `mu_total^2` is the sum of `mu_t^2` over the
rounds a client took part in. With a budget B fixed in advance a ledger is a privacy filter: a round that would push the
total past B is refused before anything is sent, and B is the claim. The running total is only "spent". `Ledger` is that
filter, in memory; a `LedgerFile` keeps one on disk, as a `LedgerHeader` and a `LedgerEntry` for each round.

In the record unit a round is a slot (q, z) and the budget a multiset of slots, in which each round takes a free one
that dominates it (`niss.mechanism.slots`). A ledger is of one unit and one dataset: a round that hides records says
nothing for a client, and one that hides clients costs a record twice its mu, since removing a record replaces the
update.

What all runs of a node may cost it together has several limits, of which the smallest binds:

    the first budget   fixed in the ledger by the first run that charged it, for good
    the owner's        `niss-epsilon` and `niss-delta` of today, or the ceiling of a node that sets none

A lowered limit of the owner's counts from the next charge on. A raised one does not make the first budget larger: what
was promised when the ledger was begun stays promised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from niss.checks import BOOKS, LIMITS, require_real
from niss.claims import digits
from niss.errors import ConfigError, PrivacyError
from niss.files import to_json
from niss.mechanism import Slots, gdp_epsilon, gdp_mu
from niss.mechanism.slots import Slot
from niss.settings import Count, NotNegative, Positive, Probability, settings

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Amount = float | Slots
"""What is spent or may be: mu of Gaussian rounds together, or slots of rounds with secret batches."""

FORMAT = "niss-ledger/3"
FIRST_BUDGET = "the budget that the ledger was begun with"


@dataclass(frozen=True)
class Charge:
    """What one upload costs a client: an event, not a number, since not every mechanism composes by mu^2.

    mu2           that it adds in the joint view; infinite: no guarantee
    marginal_mu2  of the upload looked at alone
    slot          (q, z) of a round with secret batches: probability and noise multiplier; None: no secret
    grid_delta    what grid and sampler add to delta; None: nothing was promised that it could count against

    Of several clients at once the first two are arrays.
    """

    mu2: float | FloatArray = 0.0
    marginal_mu2: float | FloatArray = 0.0
    slot: tuple[float, float] | None = None
    grid_delta: float | None = None

    @classmethod
    def of(
        cls,
        joint: float | FloatArray,
        marginal: float | FloatArray = 0.0,
        *,
        batch: float | None = None,
        grid_delta: float | None = None,
    ) -> Charge:
        """From the mu of both views; a negative one is refused, since its square would not show it.

        batch  in the record unit, q; the round is then the slot (q, 1 / mu), at the largest mu of any client
        """
        if np.less(joint, 0.0).any() or np.less(marginal, 0.0).any():
            raise ConfigError("must be a number of at least 0", field="mu")
        slot = None
        if batch is not None:
            worst = float(np.max(joint, initial=0.0))
            slot = batch, (1.0 / worst if worst > 0.0 else math.inf)
        return cls(joint * joint, marginal * marginal, slot, grid_delta)

    @property
    def joint(self) -> float:
        """mu of the joint view, of one client."""
        return math.sqrt(self.mu2)

    @property
    def marginal(self) -> float:
        """mu of the upload looked at alone, of one client."""
        return math.sqrt(self.marginal_mu2)

    def require_unit(self, unit: str) -> None:
        """Refuse a charge of another unit than the ledger's: neither counts for the other, or at another price."""
        if (self.slot is not None) != (unit == "record"):
            ours, theirs = ("records", "whole clients") if unit == "record" else ("whole clients", "records")
            raise PrivacyError(
                f"this ledger is of rounds that hide {ours} (unit {unit!r}); a round that hides {theirs} cannot be "
                "charged to it",
                hint="a ledger is of one unit and one dataset: begin another, for other data",
            )
        if self.slot is not None:
            try:
                Slots.of((*self.slot, 1))
            except ConfigError as error:
                raise PrivacyError(error.message) from None


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
    budgets         B_k of each client, as mu or in the record unit as (q, z, how many) of each slot (None: nothing
                    promised); None as a whole: any client may be charged, and nothing is promised to anyone
    numbered, each  in place of that: clients "0" to `numbered - 1`, all with the budget `each`
    unit, relation  what is hidden, as in `Plan`
    dataset         the name of the data it is about, where a client has several
    delta_failure   the part of delta that pays for bounds that may fail, such as that on colluding neighbours;
                    mu becomes epsilon at the delta that is left
    """

    run: str
    delta: Probability
    budgets: Mapping[str, Positive | tuple[tuple[float, float, Count], ...] | None] | None = None
    unit: str = "client"
    dataset: str = ""
    relation: str = "zero-out"
    delta_failure: NotNegative = 0.0
    numbered: Count | None = None
    each: Positive | tuple[tuple[float, float, Count], ...] | None = None

    def __post_init__(self) -> None:
        require_real(self.delta_failure, field="delta_failure", below=self.delta)
        if self.budgets is not None and self.numbered is not None:
            raise ConfigError("clients have names or numbers, not both", field="numbered")
        for budget in {*(self.budgets or {}).values(), self.each} - {None}:
            if isinstance(budget, tuple) != (self.unit == "record"):
                raise ConfigError(
                    f"{budget}: slots go with the unit 'record', mu with the others", field="budgets"
                )
            if isinstance(budget, tuple):
                Slots.of(*budget)

    def budget(self, client: str) -> Amount | None:
        """What this client may spend, which is the claim; None where nothing was promised."""
        budget = self.each if self.budgets is None else self.budgets[client]
        return Slots.of(*budget) if isinstance(budget, tuple) else budget

    @property
    def promised(self) -> list[Amount]:
        """The budgets that differ, of all clients to whom anything was promised."""
        budgets = {*(self.budgets or {}).values(), self.each} - {None}
        return [Slots.of(*budget) if isinstance(budget, tuple) else budget for budget in budgets if budget]

    def names(self, client: str) -> bool:
        """Whether this client has a budget here, even one of None."""
        if self.numbered is None:
            return client in (self.budgets or ())
        number = int(client) if client.isascii() and client.isdecimal() and len(client) < 20 else -1
        return 0 <= number < self.numbered and str(number) == client

    def allows(self, client: str) -> bool:
        """Whether this client may be charged: one that is named, or any where none is."""
        return self.names(client) or (self.budgets is None and self.numbered is None)

    def body(self) -> dict[str, Any]:
        """The record, without its hash; what is not said of dataset and numbered clients is left out."""
        body = {"format": FORMAT, **vars(self), "budgets": self.budgets and dict(self.budgets)}
        left_out = {"" if self.dataset else "dataset"} | (
            {"numbered", "each"} if self.numbered is None else {"budgets"}
        )
        return {name: value for name, value in body.items() if name not in left_out}


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
        """The record, without its hash, after the record with the hash `previous`.

        What is the same for all clients stands once, in `each`; a charge of which only mu^2 is left is that number.
        """
        plain = self.to_json()
        charges: dict[str, dict[str, Any]] = plain["charges"]
        first = next(iter(charges.values()), {})
        each = {
            name: value
            for name, value in first.items()
            if name != "mu2" and all(one.get(name, ...) == value for one in charges.values())
        }
        own = {
            client: {name: value for name, value in charge.items() if name not in each}
            for client, charge in charges.items()
        }
        short = {client: one["mu2"] if one.keys() == {"mu2"} else one for client, one in own.items()}
        return {**plain, "charges": short, "each": each, "previous": previous}

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


def epsilon_of(amount: Amount, delta: float) -> float:
    """What is spent as epsilon; infinite where nothing is left of delta."""
    if isinstance(amount, Slots):
        return amount.epsilon(delta) if delta > 0.0 else math.inf if amount.size else 0.0
    if amount <= 0.0:
        return 0.0
    return gdp_epsilon(amount, delta) if delta > 0.0 else math.inf


def slot_taken(charge: Charge, taken: Slots, budget: object) -> Slot | None:
    """The slot that a charge takes: of the budget, or its own where nothing was promised; None: there is none."""
    if charge.slot is None or not isinstance(budget, Slots):
        return charge.slot
    return budget.free(taken, charge.slot)


def overspent(client: object, spent: Amount, charge: Charge, budget: Amount) -> PrivacyError:
    """The error for a charge that a client who spent so much cannot afford."""
    if isinstance(spent, Slots) and isinstance(budget, Slots) and charge.slot is not None:
        q, z = charge.slot
        why = (
            f"none of its {budget.size - spent.size} free slots (of {budget.size}) covers a round with q = {q:.6g}, "
            f"z = {z:.6g}"
        )
    else:
        assert isinstance(spent, float)
        why = f"mu {math.sqrt(spent**2 + float(charge.mu2)):.6g} of {budget:.6g}"
    return PrivacyError(
        f"client {client} would overspend its privacy budget: {why}",
        hint="fewer rounds, a larger epsilon, or a higher cap on participations",
    )


@dataclass
class Ledger:
    """Spent privacy of every client: squared mu in the joint and the marginal view, and rounds taken part in.

    `budget` holds one B_k per client (infinite: nothing was promised to it) or the slots of every client, or None where
    nothing was promised in advance. `slots` holds what each client took of them, in the record unit. `history` holds
    the participants of every round charged, in order.
    """

    joint_squared: FloatArray
    marginal_squared: FloatArray
    participations: IntArray
    budget: FloatArray | Slots | None = None
    unit: str = field(default="client", kw_only=True)
    slots: dict[int, Slots] = field(default_factory=dict, kw_only=True)
    history: list[IntArray] = field(default_factory=list, kw_only=True)

    @classmethod
    def empty(cls, clients: int, budget: FloatArray | Slots | None = None, *, unit: str = "client") -> Ledger:
        """A ledger of that many clients, numbered from 0, before the first round."""
        unit = "record" if isinstance(budget, Slots) else unit
        return cls(np.zeros(clients), np.zeros(clients), np.zeros(clients, dtype=np.int64), budget, unit=unit)

    def spent(self, client: int) -> Amount:
        """What all charges of a client come to in the joint view."""
        if self.unit == "record":
            return self.slots.get(client, Slots())
        return math.sqrt(self.joint_squared[client])

    def room(self, clients: IntArray, charge: Charge) -> NDArray[np.bool_]:
        """Whether the budget of each of these clients allows one more such charge: the filter."""
        charge.require_unit(self.unit)
        if isinstance(self.budget, Slots):
            taken = [self.slots.get(client, Slots()) for client in clients.tolist()]
            return np.array([slot_taken(charge, one, self.budget) is not None for one in taken], dtype=bool)
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
        budget = self.budget if isinstance(self.budget, Slots) else float(self.budget[client])
        own = replace(charge, mu2=float(np.broadcast_to(charge.mu2, clients.shape)[first]))
        raise overspent(client, self.spent(client), own, budget)

    def charge(self, participants: IntArray, charge: Charge, attempt: int = 0) -> None:  # noqa: ARG002
        """Charge a round before it is sent; refuse it whole if any participant would overspend.

        participants  by number, each once
        charge        what the round costs each of them
        attempt       which attempt at the round is played, for those who write it down
        """
        if np.unique(participants).size != participants.size:
            raise ConfigError("a client takes part in a round once", field="participants")
        self.require_room(participants, charge)
        for client in participants.tolist() if self.unit == "record" else ():
            taken = self.slots.get(client, Slots())
            self.slots[client] = taken.plus(slot_taken(charge, taken, self.budget))
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
    mu       the most that Gaussian noise of all charges may cost, which is what the limit comes to
    """

    source: str
    epsilon: float
    delta: float
    failing: float
    mu: float

    @classmethod
    def of_ledger(cls, budget: Amount, delta: float, failing: float) -> Limit:
        """The budget that is fixed in a ledger, with the parts of its delta."""
        epsilon = epsilon_of(budget, delta - failing)
        if isinstance(budget, Slots):
            return cls.of_owner(FIRST_BUDGET, epsilon, delta, failing)
        return cls(FIRST_BUDGET, epsilon, delta, failing, budget)

    @classmethod
    def of_owner(cls, source: str, epsilon: float, delta: float, failing: float) -> Limit:
        """A target, of which so much of delta is taken up by what may fail."""
        left = delta - failing
        return cls(source, epsilon, delta, failing, gdp_mu(epsilon, left) if left > 0.0 else 0.0)

    def spent(self, amount: Amount) -> float:
        """Epsilon of charges that come to so much, at the limit's delta; infinite where nothing of it is left."""
        return epsilon_of(amount, self.delta - self.failing)

    def allows(self, amount: Amount) -> bool:
        """Whether charges that come to so much stay within it.

        Of slots that are all alike, as a node's are, that fixes in advance how many may be taken.
        """
        if isinstance(amount, Slots):
            return self.spent(amount) <= self.epsilon * (1.0 + LIMITS)
        return amount**2 <= self.mu**2 * (1.0 + LIMITS)

    @property
    def words(self) -> str:
        """The limit as a node's log and `niss account` show it."""
        return f"{self.source}, epsilon {self.epsilon:.4g} at delta {digits(self.delta)}"


def binding(limits: list[Limit]) -> Limit | None:
    """The limit that is reached first; None without limits."""
    return min(limits, key=lambda limit: limit.mu, default=None)


def require_within(limits: list[Limit], amount: Amount) -> None:
    """Raise `PrivacyError` for charges that come to more in the joint view than a limit allows."""
    limit = binding([limit for limit in limits if not limit.allows(amount)])
    if limit is None:
        return
    raised = [other for other in limits if other.epsilon > limit.epsilon and limit.source == FIRST_BUDGET]
    why = f"; a larger one ({raised[0].words}) does not raise it" if raised else ""
    total = limit.spent(amount)
    cost = f"cost epsilon {total:.4g} at delta {digits(limit.delta)}"
    if not math.isfinite(total):
        cost = "take up the whole delta with bounds that may fail"
    raise PrivacyError(
        f"would overspend: all runs together would {cost}, and what binds is {limit.words}{why}",
        hint="use fewer rounds or a smaller epsilon in the plan; `niss account` on the node's niss-state folder shows "
        "what is left",
    )
