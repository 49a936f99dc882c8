"""How a run begins: the server proposes it under its signature, a client joins it under its own.

The proposal says who the server is, who holds the beacon, and what is planned. A client checks it against its own
limits, keeps it, and holds the server to it for the rest of the run. The enrolment gives the server the client's
identity and one-time keys, and says what the client does not take on trust.

    proposal   64 bytes of Ed25519 signature, then JSON: version, run, server, holder, anchor (hex), plan, mode,
               participants, prekeys, tracker, and metrics where there are any
    enrolment  the tag `niss enrolment/1`, then JSON: identity, prekeys, signature (hex), pinned
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np

from niss.accounting import Plan
from niss.errors import ConfigError, NissError, RemoteProtocolError
from niss.flower.metrics import NO_METRICS, NoisyMetrics
from niss.protocol import (
    MODES,
    PUBLIC_BYTES,
    SIGNATURE_BYTES,
    Identity,
    Prekey,
    SignedPrekey,
    check_prekey,
    length_prefixed,
    verify,
)

VERSION = 3
# By version, what its plans did not say: how many rounds the chain has, who repairs them. A client may have agreed to
# such a proposal, and keep it.
_VERSIONS: dict[Any, dict[str, None]] = {
    1: {"rounds": None, "committee": None},
    2: {"committee": None},
    VERSION: {},
}
RUN_BYTES = 16
MOST_PREKEYS = 64
ENROLMENT_TAG = b"niss enrolment/1"
_LONGEST_ENROLMENT = 100_000
_PROPOSAL_PURPOSE, _ENROLMENT_PURPOSE = "flower proposal", "flower enrolment"
# The parts of a plan the protocol can carry out; the rest is fixed: niss, one client-level target for all.
_PLAN_FIELDS = (
    "relation",
    "clip",
    "epsilon",
    "delta",
    "participations",
    "kappa",
    "neighbours",
    "graph",
    "tau2",
    "colluders",
    "revealed",
    "dropped",
    "attempts",
    "rounds",
    "shares",
    "committee",
)
_WHOLE = ("participations", "colluders", "revealed", "dropped", "attempts", "rounds", "committee")
_NUMBERS = ("clip", "epsilon", "delta", "kappa", "neighbours", "tau2")
_MAY_BE_MISSING = ("tau2", "rounds", "committee")
# Left out where nothing was chosen: plans look as they did before there was a choice.
_GIVEN_IF_CHOSEN = {"shares": Plan.shares}
_SMALLEST, _LARGEST = 1e-30, 1e12
_BYTE_FIELDS = {"run": RUN_BYTES, "server": PUBLIC_BYTES, "holder": PUBLIC_BYTES, "anchor": 32}
# What rounding in the terms may add is not worth a refusal.
_ROUNDING = 1.0 + 1e-9
# What JSON of somebody else's making can raise while it is read.
_UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError)


@dataclass(frozen=True)
class Proposal:
    """One run, as the server wants it.

    run           id of the run
    server        public key of the server
    holder        public key of the beacon's holder
    anchor        end of the beacon chain of this run
    plan          what the clients are promised
    mode          how dropouts are handled
    participants  fewest participants of a round
    prekeys       how many one-time keys a client is to hand over
    tracker       address of the tracker, or empty
    metrics       what travels inside the uploads beside the updates
    """

    run: bytes
    server: bytes
    holder: bytes
    anchor: bytes
    plan: Plan
    mode: str
    participants: int
    prekeys: int
    tracker: str = ""
    metrics: NoisyMetrics = NO_METRICS

    @property
    def round_mu(self) -> float:
        """The most that one round may cost a client; infinite for a plan that promises nothing."""
        if not self.plan.calibrated:
            return math.inf
        return float(self.plan.round_mu(np.zeros(1, dtype=np.int64))[0]) * _ROUNDING

    def signed(self, server: Identity) -> bytes:
        """The proposal as it travels: the server's signature, then JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values |= {name: values[name].hex() for name in _BYTE_FIELDS}
        values |= {"version": VERSION, "plan": plan_values(self.plan), "metrics": self.metrics.to_json()}
        if not self.metrics:
            del values["metrics"]  # As before there were any.
        text = json.dumps(values, sort_keys=True, separators=(",", ":")).encode()
        return server.sign(_PROPOSAL_PURPOSE, text) + text


def read_proposal(data: bytes) -> Proposal:
    """A proposal that is signed by the server it names; whether that is the right one is for the limits to say.

    Raises `RemoteProtocolError` for anything else.
    """
    signature, text = data[:SIGNATURE_BYTES], data[SIGNATURE_BYTES:]
    try:
        values = json.loads(text)
        if values["version"] not in _VERSIONS:
            raise RemoteProtocolError(
                "the proposal was made by another version of niss", hint="use the same version everywhere"
            )
        proposal = Proposal(
            **{name: _bytes(values[name], length) for name, length in _BYTE_FIELDS.items()},
            plan=_read_plan(_VERSIONS[values["version"]] | values["plan"]),
            mode=str(values["mode"]),
            participants=_whole(values["participants"]),
            prekeys=_whole(values["prekeys"]),
            tracker=str(values["tracker"]),
            metrics=NoisyMetrics.of(**values.get("metrics", {})),
        )
    except _UNREADABLE as error:
        raise RemoteProtocolError(f"the proposal cannot be read: {type(error).__name__}") from None
    verify(proposal.server, _PROPOSAL_PURPOSE, text, signature)
    try:
        check_mode(proposal.plan, proposal.mode)
    except ConfigError as error:
        raise RemoteProtocolError(f"the mode of the proposal: {error.message}") from None
    if not 1 <= proposal.prekeys <= MOST_PREKEYS:
        raise RemoteProtocolError("the proposal asks for too few or too many keys")
    return proposal


def check_mode(plan: Plan, mode: str) -> None:
    """Refuse (`ConfigError`) an unknown mode, and one in which the plan's shares could not be taken out again."""
    if mode not in MODES:
        raise ConfigError(f"unknown value {mode!r}", field="mode", hint="use one of: " + ", ".join(MODES))
    if plan.uniform and mode != "repair":
        raise ConfigError(
            "uniform masks leave no sum after a dropout that is tolerated", field="mode", hint="use 'repair'"
        )


def plan_values(plan: Plan) -> dict[str, Any]:
    """The plan as JSON; raises `ConfigError` for one that the protocol cannot carry out."""
    for field in fields(Plan):
        value = getattr(plan, field.name)
        if field.name not in _PLAN_FIELDS and value != field.default:
            raise ConfigError(
                f"the protocol cannot carry out {value!r}",
                field=f"plan.{field.name}",
                hint=f"leave it at {field.default!r}",
            )
    if isinstance(plan.epsilon, tuple) or isinstance(plan.tau2, tuple):
        raise ConfigError("the protocol needs the same target for all clients", field="plan.epsilon")
    if plan.graph not in ("regular", "complete"):
        raise ConfigError(
            f"Flower runs do not support {plan.graph!r}", field="plan.graph", hint="use 'regular'"
        )
    values = {name: getattr(plan, name) for name in _PLAN_FIELDS}
    return {name: value for name, value in values.items() if (name, value) not in _GIVEN_IF_CHOSEN.items()}


def _read_plan(values: dict[str, Any]) -> Plan:
    """The plan that `plan_values` wrote; a server may have made up any other."""
    values = _GIVEN_IF_CHOSEN | values
    if set(values) != set(_PLAN_FIELDS):
        raise RemoteProtocolError("the plan in the proposal has unknown or missing fields")
    for name, value in values.items():
        kind = int if name in _WHOLE else int | float if name in _NUMBERS else str
        if value is None and name in _MAY_BE_MISSING:
            continue
        if isinstance(value, bool) or not isinstance(value, kind):
            raise RemoteProtocolError(f"the plan in the proposal has no valid {name!r}")
        if not isinstance(value, str) and not _is_sensible(value):
            raise RemoteProtocolError(f"{name} in the proposed plan is not a number that a plan could have")
    try:
        plan = Plan(**values)
        plan_values(plan)
        plan.budget(1)
    except NissError as error:
        raise RemoteProtocolError(f"the proposed plan cannot be carried out: {error.message}") from None
    return plan


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError("no whole number")
    return value


def _is_sensible(value: Any) -> bool:
    """Whether it is a number, and one that squares and quotients of a few such numbers do not run out of range on."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value == 0 or _SMALLEST <= abs(value) <= _LARGEST


def _bytes(text: str, length: int) -> bytes:
    value = bytes.fromhex(text)
    if len(value) != length:
        raise ValueError("length")
    return value


@dataclass(frozen=True)
class Enrolment:
    """What the server learns of a client when it joins.

    identity   public key of the client
    prekeys    one-time keys, each signed by the identity
    pinned     names of the limits that the client has set, in its own word
    signature  under all of it and the run, so that it holds for no other run
    """

    identity: bytes
    prekeys: tuple[Prekey, ...]
    pinned: tuple[str, ...]
    signature: bytes = b""

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
        values = {
            "identity": self.identity.hex(),
            "prekeys": [key.hex() for key in self._encoded_prekeys()],
            "pinned": list(self.pinned),
            "signature": self.signature.hex(),
        }
        return ENROLMENT_TAG + json.dumps(values, sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """An enrolment that is well formed, but not yet checked."""
        if not data.startswith(ENROLMENT_TAG) or len(data) > _LONGEST_ENROLMENT:
            raise RemoteProtocolError("expected an enrolment, got another message")
        try:
            values = json.loads(data[len(ENROLMENT_TAG) :])
            keys = [SignedPrekey.decode(bytes.fromhex(text)) for text in values["prekeys"]]
            enrolment = cls(
                _bytes(values["identity"], PUBLIC_BYTES),
                tuple(Prekey(key.id, key.public, key.signature) for key in keys),
                tuple(str(name) for name in values["pinned"]),
                _bytes(values["signature"], SIGNATURE_BYTES),
            )
        except _UNREADABLE as error:
            raise RemoteProtocolError(f"the enrolment cannot be read: {type(error).__name__}") from None
        if not 1 <= len(enrolment.prekeys) <= MOST_PREKEYS:
            raise RemoteProtocolError(
                f"the enrolment has {len(enrolment.prekeys)} one-time keys, expected 1 to {MOST_PREKEYS}"
            )
        return enrolment

    def _encoded_prekeys(self) -> list[bytes]:
        return [SignedPrekey(one.number, one.public, one.signature).encode() for one in self.prekeys]

    def _signed_part(self, proposal: Proposal) -> bytes:
        """Run, chain, identity, keys and pins, each after its length, so that no two enrolments read alike."""
        names = [name.encode() for name in self.pinned]
        return length_prefixed(
            proposal.run,
            proposal.anchor,
            self.identity,
            length_prefixed(*self._encoded_prekeys()),
            length_prefixed(*names),
        )
