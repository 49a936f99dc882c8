"""What the owner of a node insists on, whatever a server proposes.

Each limit that is set is checked against the proposal of a run, and again in every round. What is not set is taken
from the first proposal of a run and then held fixed: trust on first use. Limits never come from the run's
configuration, which in Flower the server's side writes.

Trust on first use ends where it would cost most. A node without an epsilon of its own spends `FIRST_USE` at most, over
all runs that its state knows of, and joins no run whose plan promises nothing unless its owner agreed to that by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, BeforeValidator

from niss.accounting import Charge, Plan, scheduled_run
from niss.accounting.asked import Relation, SettledMode
from niss.accounting.ledger import Amount, Limit, overspent, require_within, slot_taken
from niss.checks import LIMITS
from niss.claims import digits
from niss.errors import ConfigError, PrivacyError, RemoteProtocolError
from niss.mechanism import Slots, gdp_mu
from niss.mechanism.noise import colluders_among
from niss.methods import RELATIONS
from niss.protocol.keyfile import load_coalition
from niss.protocol.keys import LINKS_PER_ROUND
from niss.protocol.messages import VERSION as WIRE_VERSION
from niss.protocol.schedule import Policy, Schedule
from niss.session.proposal import MOST_ROUNDS, Key, Proposal
from niss.settings import Count, NotNegative, Positive, Share, Whole, settings
from niss.version import which_to_upgrade

STRONGEST = 1_000_000
"""Largest kappa: beside shares much stronger than that, floats no longer tell exactly how much noise is left."""
PREFIX = "niss-"
"""What the names of limits start with in a node's configuration."""


# Rounds and attempts that a chain of links has room for, and shares that can still be reckoned with.
_POSSIBLE = {
    "possible_rounds": MOST_ROUNDS,
    "attempts": LINKS_PER_ROUND,
    "kappa": STRONGEST,
}


def _from_hex(value: Any) -> Any:
    if isinstance(value, str) and not re.fullmatch("[0-9a-fA-F]{64}", value):
        raise ValueError("must be a public key of 64 hex digits")
    return bytes.fromhex(value) if isinstance(value, str) else value


def _names(value: Any) -> Any:
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


PublicKey = Annotated[Key, BeforeValidator(_from_hex)]
OwnPath = Annotated[Path, AfterValidator(Path.expanduser)]


@dataclass(frozen=True)
class Ceiling:
    """The most that all runs together may cost, whatever was promised when the ledger was begun.

    setting  what sets it, in words
    """

    epsilon: float
    delta: float
    setting: str = f"{PREFIX}epsilon"


FIRST_USE = Ceiling(10.0, 1e-5, f"the limit of a node without an {PREFIX}epsilon of its own")
"""The ceiling of a node that sets none."""


@dataclass(frozen=True)
class Budget:
    """What a client may spend in all.

    most           B of the privacy filter: mu, or slots where records are hidden; infinite where nothing is promised
    delta          of the promise
    delta_failure  the part of delta that pays for bounds on colluding neighbours that may fail, and for the grid
    ceiling        the owner's limit of today; None: there is none
    unit, dataset  what is hidden, as in `Plan`, and of which data, where a client has several
    """

    most: Amount
    delta: float
    delta_failure: float
    ceiling: Ceiling | None = None
    unit: str = "client"
    dataset: str = ""

    @property
    def promises(self) -> bool:
        """Whether anything is promised."""
        return self.most != math.inf


@dataclass(frozen=True)
class Spent:
    """All that was charged to a client, or promised to servers.

    amount    what all rounds come to in the joint view: mu, or slots
    failures  with what probability a bound on colluders fails in any run that was joined, and what the grids cost
    first     the budget that the first charge was made against: a server cannot propose a second run to get a larger
    """

    amount: Amount
    failures: float
    first: Budget

    def require_room(self, budget: Budget, charge: Charge) -> Charge:
        """Refuse (`PrivacyError`) a charge that goes beyond what a client may spend; else the charge, as it is booked.

        Nothing of the grid counts where nothing is promised.
        """
        grid = charge.grid_delta or 0.0 if budget.promises else 0.0
        self._require_failures(self.failures + grid)
        self._require(self._limits(budget, grid), self._with(budget, charge))
        return replace(charge, grid_delta=grid)

    def require_round(self, budget: Budget, charge: Charge, rounds: int = 1) -> None:
        """Refuse (`PrivacyError`) a run of which not even one round is left, or so many, at such a charge at most."""
        if math.isfinite(float(charge.mu2)):
            self._require(self._limits(budget), self._with(budget, charge, rounds))

    def _with(self, budget: Budget, charge: Charge, rounds: int = 1) -> Amount:
        """What all come to with more rounds; refuses those of other data or another unit, or without a free slot."""
        charge.require_unit(self.first.unit)
        if self.first.dataset != budget.dataset:
            raise PrivacyError(
                f"this client's ledger is about the dataset {self.first.dataset!r}, and the run about "
                f"{budget.dataset!r}",
                hint="give other data a niss-state folder and an identity of their own",
            )
        if not isinstance(self.amount, Slots):
            return math.sqrt(self.amount**2 + rounds * float(charge.mu2))
        taken = self.amount
        for _ in range(rounds):
            if (slot := slot_taken(charge, taken, self.first.most)) is None:
                raise overspent("self", taken, charge, self.first.most)
            taken = taken.plus(slot)
        return taken

    def rounds(self, budget: Budget, charge: Charge, most: int) -> int:
        """How many such rounds are left, as a server is told that must not count on more: `most`, or a power of two.

        It has to know whether a round of its run will find enough who can pay for it. What else it learns of a ledger
        is a factor of two, once a run; nothing of one that has room for all. That there is room for one round it learns
        from anyone who joins. What grids and failing bounds take of delta is not counted: a client may decline earlier.
        """
        told = [most, *(1 << power for power in reversed(range(most.bit_length())))]
        return next((count for count in told if count <= most and self._has_room(budget, charge, count)), 1)

    def _has_room(self, budget: Budget, charge: Charge, rounds: int) -> bool:
        try:
            self.require_round(budget, charge, rounds)
        except PrivacyError:
            return False
        return True

    def require_run(self, budget: Budget, failure: float) -> None:
        """Refuse (`PrivacyError`) another run whose bounds on colluders may fail with this probability."""
        self._require_failures(self.failures + failure)
        self._require(self._limits(budget, failure), self.amount)

    def _require(self, limits: list[Limit], amount: Amount) -> None:
        """Refuse what a limit does not allow. Slots cost no more than all of the first budget, worked out once."""
        whole = self.first.most
        if not isinstance(whole, Slots) or not all(limit.allows(whole) for limit in limits):
            require_within(limits, amount)

    def _require_failures(self, failures: float) -> None:
        """By the union bound, all graphs together fail with the sum of their probabilities at most."""
        allowed = self.first.delta_failure
        if failures > allowed * (1.0 + LIMITS):
            raise PrivacyError(
                "the bounds on colluders of all runs that this client joined may fail with probability "
                f"{digits(failures, 2)}; its delta has room for {digits(allowed, 2)}",
                hint="plan with a smaller delta than the nodes' niss-delta, or with more rounds (plan.chain_rounds); a "
                "new folder and identity would be a new budget on the same data",
            )

    def _limits(self, budget: Budget, more: float = 0.0) -> list[Limit]:
        """The limits that hold: the first budget, and the owner's of today, with so much more that may fail."""
        limits, first, ceiling = [], self.first, budget.ceiling
        if first.promises:
            limits.append(Limit.of_ledger(first.most, first.delta, first.delta_failure))
        if ceiling is not None:
            failures = self.failures + more
            limits.append(Limit.of_owner(ceiling.setting, ceiling.epsilon, ceiling.delta, failures))
        return limits


@settings
class Limits:
    """Limits of one node; in its node configuration they are written `niss-state`, `niss-server` and so on.

    state            folder for identity, memory and ledger; without it they live in Flower's Context, for one run
    server, holder   public keys of the server and of the beacon's holder (the tracker)
    coalition        file with the identities to share noise with
    participants     fewest participants of a round
    collusion        what share of them is assumed, at least, to help the server
    clip             largest clip
    batch            largest probability with which a record is in a batch, where a run hides records
    epsilon, delta   most to be spent by all runs together, of a record where they hide records; `FIRST_USE` where they
                     are not set
    uncalibrated     whether to join runs whose plan promises nothing, if no epsilon is set
    relation         what must be hidden: `zero-out` or `replace-one`
    modes            how dropouts may be handled
    tracker          address of the tracker; no other one is spoken to, and none where it is not set
    tracker_ca       certificate of the authority that signed the tracker's, which must then be an address of https
    wasted_rounds    how many rounds of a run this node pays for of which the server names no sum; then it declines
    deadline         fewest seconds to train in, where a run has a deadline: a shorter one would waste the budget.
                     Where records are hidden, several times what a round takes, so that no hair of time decides
    raises           whether an app that fails raises instead of uploading a blank: for development alone, since Flower
                     tells the server of it

    Raises `ConfigError` for a limit that cannot be kept.
    """

    state: OwnPath | None = None
    server: PublicKey | None = None
    holder: PublicKey | None = None
    coalition: OwnPath | None = None
    participants: Whole | None = None
    collusion: Share | None = None
    clip: NotNegative | None = None
    batch: NotNegative | None = None
    epsilon: float | None = None
    delta: float | None = None
    relation: Relation | None = None
    modes: Annotated[tuple[SettledMode, ...], BeforeValidator(_names)] | None = None
    tracker: str | None = None
    tracker_ca: OwnPath | None = None
    uncalibrated: bool = False
    wasted_rounds: Count = 3
    deadline: Positive = 1.0
    raises: bool = False

    def __post_init__(self) -> None:
        if (self.epsilon is None) != (self.delta is None):
            raise ConfigError("must be set together", field="epsilon, delta", hint="set both or neither")
        if self.epsilon is not None and self.delta is not None:
            gdp_mu(self.epsilon, self.delta)  # Refuses values that are not a target.
        if (
            self.tracker is not None
            and self.tracker_ca is not None
            and not self.tracker.lower().startswith("https://")
        ):
            raise ConfigError(
                "must be an address of https, since an authority for its certificate is set", field="tracker"
            )

    def of_node(self, node_config: Mapping[str, Any]) -> Limits:
        """These limits, replaced by those of the node's own configuration where it has any.

        An unknown name that starts with `niss-` is an error: a misspelt limit would not be kept.
        """
        limits = {
            key.removeprefix(PREFIX).replace("-", "_"): value
            for key, value in node_config.items()
            if key.startswith(PREFIX)
        }
        try:
            return replace(self, **limits)
        except ConfigError as error:
            named = error.message.replace("\n", f"\n{PREFIX}")
            raise ConfigError(f"{PREFIX}{named}", hint=error.hint) from None

    @property
    def pinned(self) -> tuple[str, ...]:
        """The names of the limits that are set, and so not taken on trust."""
        return tuple(
            field.name
            for field in fields(self)
            if field.default is None and getattr(self, field.name) is not None
        )

    def check(self, proposal: Proposal) -> None:
        """Raise `RemoteProtocolError` for a run that would not keep these limits."""
        plan, address = proposal.plan, proposal.tracker
        # Before it joins: a node that cannot read the rounds would leave its neighbours' noise in every sum.
        _require(
            proposal.wire == WIRE_VERSION,
            which_to_upgrade(
                "the wire format", proposal.wire, WIRE_VERSION, them="the server", us="this node"
            ),
        )
        for name in ("server", "holder"):
            _require(
                getattr(self, name) in (None, getattr(proposal, name)),
                f"the {name} of this run is not the one this node expects",
                f"compare its key with the node's {PREFIX}{name}",
            )
        # Before a name is looked up: how long a node takes to find nobody there would describe its network.
        _require(
            address.rstrip("/") == (self.tracker or "").rstrip("/"),
            "the tracker of this run is not the one this node expects",
            f"compare its address with the node's {PREFIX}tracker",
        )
        for name, possible in _POSSIBLE.items():
            proposed = getattr(plan, name)
            _require(
                proposed <= possible,
                f"{name} = {digits(proposed)} is proposed, but at most {possible} is possible",
            )
        _require(
            self.epsilon is None or plan.calibrated,
            "a plan that sets tau2 itself promises nothing, but this node requires an epsilon",
        )
        most = {"clip": (self.clip, f"{PREFIX}clip")}
        if plan.batch is not None:
            most["batch"] = self.batch, f"{PREFIX}batch"
        if (ceiling := self.ceiling_for(plan)) is not None:
            setting = f"{PREFIX}epsilon and {PREFIX}delta"
            most |= {"epsilon": (ceiling.epsilon, setting), "delta": (ceiling.delta, setting)}
        for name, (limit, setting) in most.items():
            proposed = getattr(plan, name)
            if limit is not None and not proposed <= limit:
                raise RemoteProtocolError(
                    f"{name} = {digits(proposed)} is proposed, but this node allows at most {digits(limit)}",
                    hint=f"its owner may set {setting}",
                )
        _require(
            plan.collusion >= (self.collusion or 0.0),
            f"the plan allows for a share of {plan.collusion:g} that colludes, but this node assumes {self.collusion}",
        )
        _require(
            self.relation in (None, plan.relation),
            f"the plan is for {plan.relation!r}, but this node requires {self.relation!r}",
        )
        _require(
            self.modes is None or plan.settled_mode in self.modes,
            f"mode {plan.settled_mode!r} is not accepted by this node",
        )
        _require(
            proposal.deadline is None or proposal.deadline >= self.deadline,
            f"a deadline of {proposal.deadline} seconds is proposed, but this node insists on {self.deadline:g}",
            f"its owner may set {PREFIX}deadline",
        )
        if proposal.schedule is not None:
            self._check_schedule(proposal, proposal.schedule)

    def _check_schedule(self, proposal: Proposal, schedule: Schedule) -> None:
        """Refuse rounds that are too small, and noise that does not keep what the plan promises."""
        plan = proposal.plan
        _require(
            schedule.participants >= max(self.participants or 2, proposal.participants),
            f"rounds of {schedule.participants} are scheduled, but this node requires more participants",
        )
        if not plan.calibrated:
            return
        colluders = colluders_among(plan.collusion, schedule.participants)
        worth = scheduled_run(schedule, relation=plan.relation, colluders=colluders)
        _require(
            worth.private and worth.mu <= proposal.run_mu,
            "the noise that is scheduled does not keep what the plan promises",
            "a schedule is made for one plan, by `make_schedule`",
        )

    def require_sums(self, wasted: int) -> None:
        """Decline (`RemoteProtocolError`) once so many rounds of a run were paid for that came to nothing.

        A client pays before it uploads, and learns only from the next round whether others uploaded too. To hear of
        their acceptances first would take a second message a round, and they could be those of clients that the server
        made up; so could any proof of a sum. A server that lies can waste a budget, as it can by giving no model back.
        This bounds what is wasted where it does not lie: nobody else comes, or the sum is lost in every round.
        """
        _require(
            wasted < self.wasted_rounds,
            f"this client paid for {wasted} rounds of this run of which there is no sum",
            f"see the server's log; its owner may raise {PREFIX}wasted-rounds",
        )

    def failure(self, proposal: Proposal) -> float:
        """With what probability a graph of this run may have more colluders around a client than its bound says.

        That of the plan, where the owner vouches for the holder of the beacon by pinning its key: it signs how many
        rounds the chain has, among whose graphs a server could choose, and all of them are counted. Else the server may
        know every graph beforehand, and 0 counts all colluders as placed after it was drawn: on a sparse graph they may
        be all neighbours of this client.
        """
        return proposal.plan.failure if self.holder is not None and proposal.tracker else 0.0

    def ceiling_for(self, plan: Plan) -> Ceiling | None:
        """What all runs may cost together: the owner's own target, or that of first use.

        None for a plan that promises nothing where the owner agreed to such; raises `RemoteProtocolError` where not.
        """
        if self.epsilon is not None and self.delta is not None:
            return Ceiling(self.epsilon, self.delta)
        if plan.calibrated:
            return FIRST_USE
        if not self.uncalibrated:
            raise RemoteProtocolError(
                "a plan that sets tau2 itself promises nothing, and the owner of this node has not agreed to that",
                hint=f"leave tau2 out; only to try things out, nodes may set {PREFIX}uncalibrated=true",
            )
        return None

    def policy(self, proposal: Proposal) -> Policy:
        """What the protocol's client enforces in each round of the run; checks the proposal first."""
        self.check(proposal)
        plan, schedule = proposal.plan, proposal.schedule
        trusted = None
        if self.coalition is not None:
            trusted = frozenset(load_coalition(self.coalition).members.values())
        return Policy(
            participants=max(self.participants or 2, proposal.participants),
            collusion=plan.collusion,
            mu=proposal.round_mu,
            clip=proposal.plan.clip,
            run=proposal.run,
            server=proposal.server,
            holder=proposal.holder,
            anchor=proposal.anchor,
            rounds=plan.possible_rounds if schedule is None else schedule.rounds,
            attempts=plan.attempts,
            batch=plan.batch,
            modes=(plan.settled_mode,),
            trusted=trusted,
            # With a schedule, all that may be in the terms is fixed.
            strength=None
            if schedule is not None
            else plan.kappa
            * (RELATIONS[plan.relation] / float(plan.round_mu(np.zeros(1, dtype=np.int64))[0])) ** 2,
            schedule=schedule,
        )

    def budget(self, proposal: Proposal) -> Budget:
        """The owner's own target where it is set, else that of the proposal; in slots like the plan's, of which the
        owner's target has room for more or fewer.

        The owner's delta is divided between noise and bounds that may fail in the proportion of the plan.
        """
        plan, ceiling = proposal.plan, self.ceiling_for(proposal.plan)
        most: Amount = math.inf
        delta, failing = plan.delta, 0.0
        if plan.calibrated:
            most, failing = plan.whole, 1.0 - plan.gaussian_delta / plan.delta
            if self.epsilon is not None and self.delta is not None:
                delta, left = self.delta, self.delta * (1.0 - failing)
                most = (
                    most.like(self.epsilon, left) if isinstance(most, Slots) else gdp_mu(self.epsilon, left)
                )
        return Budget(most, delta, failing * delta, ceiling, plan.unit)


def _require(kept: bool, why: str, hint: str | None = None) -> None:
    """Refuse a run that does not keep a limit."""
    if not kept:
        raise RemoteProtocolError(why, hint=hint)
