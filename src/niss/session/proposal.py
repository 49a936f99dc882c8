"""How a run begins: the server proposes it under its signature, a client joins it under its own.

The proposal says who the server is, who holds the beacon, and what is planned. A client checks it against its own
limits, keeps it, and holds the server to it for the rest of the run. The enrolment gives the server the client's
identity and one-time keys, and says what the client does not take on trust.

    proposal   64 bytes of Ed25519 signature, then JSON with the fields of `Proposal` that are not null
    enrolment  the tag `niss enrolment/1`, then JSON with the fields of `Enrolment`

Bytes are written in hex. Both are read by the types of their fields, and nothing besides the fields is read.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from annotated_types import Ge, Gt, Le, Len
from pydantic import PlainSerializer, PlainValidator

from niss.accounting import Plan, make_schedule, make_terms
from niss.checks import BOOKS
from niss.errors import ConfigError, NissError, PrivacyError, RemoteProtocolError
from niss.mechanism import Slots
from niss.mechanism.clipping import AdaptiveClip
from niss.protocol.agreement import agree
from niss.protocol.keyfile import Coalition
from niss.protocol.keys import (
    PUBLIC_BYTES,
    SIGNATURE_BYTES,
    Identity,
    check_prekey,
    decode_prekey,
    encode_prekey,
    verify,
)
from niss.protocol.messages import VERSION as WIRE_VERSION
from niss.protocol.messages import Beacon, Participant, Prekey, RoundCohorts, RoundOpen, Terms
from niss.protocol.schedule import Schedule
from niss.protocol.wire import length_prefixed, uint64
from niss.session.metrics import NO_METRICS, NoisyMetrics
from niss.settings import check_json, to_values
from niss.version import which_to_upgrade

VERSION = 1
RUN_BYTES = 16
MOST_PREKEYS = 64
MOST_ROUNDS = 100_000
"""Most rounds of all chains of a plan, and most participations: what a failing bound may cost is divided among them."""
MOST_SECONDS = 1e6
"""The longest deadline: no clock waits for ever."""
ENROLMENT_VERSION, ENROLMENT_PREFIX = 1, b"niss enrolment/"
ENROLMENT_TAG = ENROLMENT_PREFIX + b"%d" % ENROLMENT_VERSION
_OTHER_ENROLMENT = re.compile(re.escape(ENROLMENT_PREFIX) + rb"(?P<version>[0-9]{1,3})(?![0-9])")
_LONGEST_ENROLMENT = 100_000
_PROPOSAL_PURPOSE, _ENROLMENT_PURPOSE = "flower proposal", "flower enrolment"
# What a plan may say to the protocol. The rest is fixed: one target for all.
_ALWAYS = (
    *("unit", "batch", "records"),
    *(
        "relation",
        "clip",
        "epsilon",
        "delta",
        "participations",
        "horizon",
        "kappa",
        "neighbours",
        "graph",
        "tau2",
    ),
    *("collusion", "dropout", "mode", "attempts"),
)
# And this where noise is carried from round to round.
_CARRYING = ("separation", "pattern", "participants", "carried_to_residual", "closing")
_LONGEST_WORD = 30
SMALLEST, LARGEST = 1e-30, 1e12
# What JSON of somebody else's making can raise while it is read.
_UNREADABLE = (
    *(KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError),
    PrivacyError,
)

IN_HEX: Any = {"ser_json_bytes": "hex", "val_json_bytes": "hex", "extra": "forbid"}
"""How bytes are written in JSON; no names are read that are not fields."""
Key = Annotated[bytes, Len(PUBLIC_BYTES, PUBLIC_BYTES)]
PrekeyInHex = Annotated[
    Prekey,
    PlainValidator(lambda text: decode_prekey(bytes.fromhex(text))),
    PlainSerializer(lambda prekey: encode_prekey(prekey).hex()),
]


@dataclass(frozen=True)
class Proposal:
    """One run, as the server wants it.

    run           id of the run
    server        public key of the server
    holder        public key of the beacon's holder
    anchor        end of the beacon chain of this run
    plan          what the clients are promised, and how dropouts are handled
    participants  fewest participants of a round
    prekeys       how many one-time keys a client is to hand over
    tracker       address of the tracker, or empty
    metrics       what travels inside the uploads beside the updates
    wire          version of the messages of its rounds
    schedule      what a run that carries noise from round to round commits to; None: nothing is carried
    deadline      seconds from when a round is charged, after which a client that still trains uploads a blank; None:
                  it is waited for
    version       of the proposal itself
    """

    __pydantic_config__: ClassVar[Any] = IN_HEX

    run: Annotated[bytes, Len(RUN_BYTES, RUN_BYTES)]
    server: Key
    holder: Key
    anchor: Annotated[bytes, Len(32, 32)]
    plan: Plan
    participants: int
    prekeys: Annotated[int, Ge(1), Le(MOST_PREKEYS)]
    tracker: str = ""
    metrics: NoisyMetrics = NO_METRICS
    wire: int = WIRE_VERSION
    schedule: Schedule | None = None
    deadline: Annotated[float, Gt(0), Le(MOST_SECONDS)] | None = None
    version: int = VERSION

    @cached_property
    def round_mu(self) -> float:
        """The most that one round may cost a client; infinite for a plan that promises nothing.

        Where noise is carried over, what a round costs depends on those before: it is within what the run may cost.
        """
        if not self.plan.calibrated:
            return math.inf
        if self.schedule is not None:
            return self.run_mu
        return float(self.plan.round_mu(np.zeros(1, dtype=np.int64))[0]) * (1.0 + BOOKS)

    @cached_property
    def run_mu(self) -> float:
        """The most mu that the run may cost a client; infinite for a plan that promises nothing, or slots."""
        whole = self.plan.whole if self.plan.calibrated else math.inf
        return math.inf if isinstance(whole, Slots) else whole * (1.0 + BOOKS)

    def signed(self, server: Identity) -> bytes:
        """The proposal as it travels: the server's signature, then JSON."""
        text = json.dumps(to_values(self), sort_keys=True, separators=(",", ":")).encode()
        return server.sign(_PROPOSAL_PURPOSE, text) + text


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a run is started with.

    plan          what the clients are promised
    rounds        how many rounds the beacon chain is made for
    participants  fewest participants of a round; refused (`PrivacyError`) where they are too few for the plan
    coordinates   of the model; needed beforehand only where noise is carried from round to round
    metrics       what travels inside the uploads beside the updates
    adaptive      how the clip moves; None: it is always the plan's
    coalition     the identities that may join; None: anyone
    grid_bits     of the grid that uploads lie on; None: chosen for the noise
    modulus_bits  of an uploaded number; None: 32 where the sums fit, which halves the uploads, else 64
    deadline      seconds that clients have to train in a round; None: as long as they take
    """

    plan: Plan
    rounds: int
    participants: int
    coordinates: int = 0
    metrics: NoisyMetrics = NO_METRICS
    adaptive: AdaptiveClip | None = None
    coalition: Coalition | None = None
    grid_bits: int | None = None
    modulus_bits: int | None = None
    deadline: float | None = None

    def __post_init__(self) -> None:
        require_deadline(self.deadline)
        self.plan.assumed(self.participants)
        if not self.plan.kind.carries and self.rounds > self.plan.possible_rounds:
            raise ConfigError(
                f"a run of {self.rounds} rounds needs a plan for all of them, not for {self.plan.possible_rounds}: its "
                "delta pays for the graphs of every round",
                field="plan.horizon",
                hint=f"plan with horizon = {self.rounds}",
            )

    def terms(self, participants: int, coordinates: int, clip: float, run: bytes) -> Terms:
        """The terms of a round of that many; its number and attempt are yet to be filled in."""
        terms = make_terms(
            replace(self.plan, clip=clip),
            participants=participants,
            coordinates=coordinates,
            run=run,
            number=0,
            grid_bits=self.grid_bits,
            modulus_bits=self.modulus_bits or 32,
        )
        narrow = self.modulus_bits is not None or _fits(terms, participants)
        return terms if narrow else replace(terms, modulus_bits=64)

    def schedule(self) -> Schedule | None:
        """What a run that carries noise from round to round commits to; None where nothing is carried."""
        if not self.plan.kind.carries:
            return None
        schedule = make_schedule(
            self.plan,
            participants=self.participants,
            coordinates=self.coordinates + len(self.metrics.ranges),
            grid_bits=self.grid_bits,
            modulus_bits=self.modulus_bits or 32,
        )
        narrow = self.modulus_bits is not None or _fits(schedule.terms(b"run", 0), self.participants)
        return schedule if narrow else replace(schedule, modulus_bits=64)


def _fits(terms: Terms, participants: int) -> bool:
    """Whether the sum of a round of that many cannot wrap on its grid, whoever they are and whatever its graph."""
    people = tuple(
        Participant(number.to_bytes(32, "big"), Prekey(0, bytes(32), b"")) for number in range(participants)
    )
    cohorts = None if terms.carrying is None else RoundCohorts(people, None)
    try:
        agree(RoundOpen(terms, people, Beacon(1, bytes(32), b""), cohorts=cohorts)).check_fits()
    except ConfigError:
        return False
    return True


def read_proposal(data: bytes) -> Proposal:
    """A proposal that is signed by the server it names; whether that is the right one is for the limits to say.

    Raises `RemoteProtocolError` for anything else, and for one that could be written in another way.
    """
    signature, text = data[:SIGNATURE_BYTES], data[SIGNATURE_BYTES:]
    try:
        values = json.loads(text)
        version = values["version"]
        if version != VERSION or type(version) is not int:
            raise RemoteProtocolError(
                which_to_upgrade("the proposal", version, VERSION, them="the server", us="this node")
            )
        _check_sizes(values["plan"])
        proposal = check_json(Proposal, text)
        if to_values(proposal) != values:
            raise ConfigError("fields are missing")
        _check_plan(proposal)
    except _UNREADABLE as error:
        raise RemoteProtocolError(f"the proposal cannot be read: {_why(error)}") from None
    verify(proposal.server, _PROPOSAL_PURPOSE, text, signature)
    return proposal


def _why(error: Exception) -> str:
    """What cannot be read, in words of ours."""
    return error.message if isinstance(error, NissError) else type(error).__name__


def _check_sizes(plan: dict[str, Any]) -> None:
    """Refuse numbers whose squares and quotients run out of range, and words that no plan has; before they are used."""
    for name, value in plan.items():
        number = isinstance(value, int | float) and (value == 0 or SMALLEST <= abs(value) <= LARGEST)
        word = isinstance(value, str) and len(value) <= _LONGEST_WORD
        if not (number or word or value in (None, [])):
            raise RemoteProtocolError(
                f"{name} in the proposed plan is not a number that a plan could have, nor a word"
            )


def _check_plan(proposal: Proposal) -> None:
    """Refuse (`NissError`) a plan that cannot be carried out, and a schedule that is not one of it, in what both name;
    what its noise is worth is for the limits."""
    plan, schedule = proposal.plan, proposal.schedule
    require_proposable(plan)
    if plan.unit == "record" and proposal.metrics.ranges:
        raise ConfigError("have no place where records are hidden", field="metrics")
    plan.budget(1)
    if plan.kind.carries != (schedule is not None):
        raise ConfigError("a run has a schedule if it carries noise, and else none", field="schedule")
    if schedule is None:
        return
    both = {
        "mode": (plan.settled_mode, schedule.mode),
        "participants": (plan.participants, schedule.participants),
        "rounds": (plan.planned_rounds + plan.closing, schedule.rounds),
        "separation": (plan.separation, schedule.separation),
        "pattern": (plan.pattern == "cyclic", schedule.cyclic),
        "closing": (plan.closing, schedule.closing),
        "clip": (plan.clip, schedule.clip),
    }
    for name, (planned, scheduled) in both.items():
        if planned != scheduled:
            raise ConfigError(f"its schedule has another {name}", field=f"plan.{name}")


def require_same(before: Proposal, now: Proposal) -> None:
    """Refuse to go on with a run under other settings than its clients agreed to."""
    other = [one.name for one in fields(Proposal) if getattr(before, one.name) != getattr(now, one.name)]
    if other:
        raise ConfigError(
            f"the saved run was started with other settings: {', '.join(other)}",
            field="resume",
            hint="use the settings, the server's key and the tracker of that run, or a new folder",
        )


def require_deadline(seconds: float | None) -> None:
    """Refuse (`ConfigError`) a deadline that no clock can keep."""
    if seconds is not None and not 0.0 < seconds <= MOST_SECONDS:
        raise ConfigError(
            f"must be above 0 and at most {MOST_SECONDS:g} seconds, not {seconds!r}", field="deadline"
        )


def require_proposable(plan: Plan) -> None:
    """Refuse (`ConfigError`) a plan that the protocol cannot carry out."""
    carries, method = plan.kind.carries, Plan().kind
    names = _ALWAYS + (_CARRYING if carries else ("chain_rounds",))
    for field in fields(Plan):
        value, usual = getattr(plan, field.name), field.default
        if field.name == "method":
            usual = method.carrying if carries else method.name
        if field.name not in names and value != usual:
            raise ConfigError(
                f"the protocol cannot carry out {value!r}",
                field=f"plan.{field.name}",
                hint=f"leave it at {usual!r}",
            )
    if plan.unit == "nbafl":
        raise ConfigError("the protocol hides clients or records", field="plan.unit")
    if isinstance(plan.epsilon, tuple) or isinstance(plan.tau2, tuple):
        raise ConfigError("the protocol needs the same target for all clients", field="plan.epsilon")
    if plan.graph not in ("regular", "complete"):
        raise ConfigError(
            f"Flower runs do not support {plan.graph!r}", field="plan.graph", hint="use 'regular'"
        )


def proposable(plan: Plan) -> Plan:
    """The plan without what it says of rounds for the sake of other methods, where nothing is carried."""
    if plan.kind.carries:
        return plan
    usual: dict[str, Any] = {field.name: field.default for field in fields(Plan) if field.name in _CARRYING}
    return replace(plan, **usual)


@dataclass(frozen=True)
class Enrolment:
    """What the server learns of a client when it joins.

    identity   public key of the client
    prekeys    one-time keys, each signed by the identity
    pinned     names of the limits that the client has set, in its own word
    rounds     how many rounds of the run it can pay for, at least (`Spent.rounds`): the same however often it enrols
    signature  under all of it and the run, so that it holds for no other run
    """

    __pydantic_config__: ClassVar[Any] = IN_HEX

    identity: Key
    prekeys: Annotated[tuple[PrekeyInHex, ...], Len(1, MOST_PREKEYS)]
    pinned: tuple[str, ...]
    rounds: Annotated[int, Ge(1), Le(MOST_ROUNDS)]
    signature: Annotated[bytes, Len(SIGNATURE_BYTES, SIGNATURE_BYTES)] = b""

    def signed(self, identity: Identity, proposal: Proposal) -> Self:
        """This enrolment, signed for the run of the proposal."""
        return replace(self, signature=identity.sign(_ENROLMENT_PURPOSE, self._signed_part(proposal)))

    def check(self, proposal: Proposal) -> None:
        """Raise `RemoteProtocolError` for keys that are not this identity's, and for an enrolment in another run."""
        verify(self.identity, _ENROLMENT_PURPOSE, self._signed_part(proposal), self.signature)
        for prekey in self.prekeys:
            check_prekey(prekey, self.identity)

    def to_bytes(self) -> bytes:
        """The enrolment as it travels."""
        return ENROLMENT_TAG + json.dumps(to_values(self), sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Enrolment:
        """An enrolment that is well formed, but not yet checked."""
        found = _OTHER_ENROLMENT.match(data)
        if found is not None and (theirs := int(found["version"])) != ENROLMENT_VERSION:
            raise RemoteProtocolError(
                which_to_upgrade("the enrolment", theirs, ENROLMENT_VERSION, them="the node", us="the server")
            )
        if not data.startswith(ENROLMENT_TAG) or len(data) > _LONGEST_ENROLMENT:
            raise RemoteProtocolError("expected an enrolment, got another message")
        try:
            return check_json(cls, data[len(ENROLMENT_TAG) :])
        except _UNREADABLE as error:
            raise RemoteProtocolError(f"the enrolment cannot be read: {_why(error)}") from None

    def _signed_part(self, proposal: Proposal) -> bytes:
        """Run, chain, identity, keys, pins and rounds, each after its length, so that no two enrolments read alike."""
        names = [name.encode() for name in self.pinned]
        return length_prefixed(
            proposal.run,
            proposal.anchor,
            self.identity,
            length_prefixed(*map(encode_prekey, self.prekeys)),
            length_prefixed(*names),
            uint64(self.rounds),
        )
