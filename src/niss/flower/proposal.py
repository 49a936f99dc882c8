"""What a server proposes for a run, signed: who it is, who holds the beacon, and the plan.

A client checks it against its own limits, keeps it, and holds the server to it for the rest of the run.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from niss.accounting import Plan
from niss.errors import ConfigError, NissError, RemoteProtocolError
from niss.protocol.keys import Identity, verify
from niss.protocol.messages import MODES

VERSION = 1
RUN_BYTES = 16
MOST_PREKEYS = 64
_PURPOSE = "flower proposal"
_SIGNATURE_BYTES = 64
# The parts of a plan the protocol can carry out; the rest is fixed: niss, one client-level target for all.
_PLANNED = (
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
)
# What rounding in the terms may add is not worth a refusal.
_ROUNDING = 1.0 + 1e-9


@dataclass(frozen=True)
class Proposal:
    """One run, as the server wants it; `participants` is the fewest of a round, `tracker` its address or empty."""

    run: bytes
    server: bytes
    holder: bytes
    anchor: bytes
    plan: Plan
    mode: str
    participants: int
    prekeys: int
    tracker: str = ""

    @property
    def round_mu(self) -> float:
        """The most that one round may cost a client; without a calibrated plan there is no bound to hold it to."""
        if not self.plan.calibrated:
            return math.inf
        return float(self.plan.round_mu(np.zeros(1, dtype=np.int64))[0]) * _ROUNDING

    def signed(self, server: Identity) -> bytes:
        """The proposal as it travels: a signature, then JSON."""
        values = {
            "version": VERSION,
            "run": self.run.hex(),
            "server": self.server.hex(),
            "holder": self.holder.hex(),
            "anchor": self.anchor.hex(),
            "plan": plan_values(self.plan),
            "mode": self.mode,
            "participants": self.participants,
            "prekeys": self.prekeys,
            "tracker": self.tracker,
        }
        text = json.dumps(values, sort_keys=True, separators=(",", ":")).encode()
        return server.sign(_PURPOSE, text) + text


def read_proposal(data: bytes) -> Proposal:
    """A proposal that is signed by the server it names; whether that is the right one is for the limits to say."""
    signature, text = data[:_SIGNATURE_BYTES], data[_SIGNATURE_BYTES:]
    try:
        values = json.loads(text)
        if values["version"] != VERSION:
            raise RemoteProtocolError("a proposal of another version", hint="use the same niss everywhere")
        proposal = Proposal(
            run=_bytes(values["run"], RUN_BYTES),
            server=_bytes(values["server"], 32),
            holder=_bytes(values["holder"], 32),
            anchor=_bytes(values["anchor"], 32),
            plan=_plan(values["plan"]),
            mode=str(values["mode"]),
            participants=int(values["participants"]),
            prekeys=int(values["prekeys"]),
            tracker=str(values["tracker"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        # A ConfigError of the plan is a ValueError too: its words say what is wrong.
        what = error.message if isinstance(error, ConfigError) else type(error).__name__
        raise RemoteProtocolError(f"a proposal that cannot be read: {what}") from None
    verify(proposal.server, _PURPOSE, text, signature)
    if proposal.mode not in MODES or not 1 <= proposal.prekeys <= MOST_PREKEYS:
        raise RemoteProtocolError("a proposal that no round can follow")
    return proposal


def plan_values(plan: Plan) -> dict[str, Any]:
    """The plan as JSON; refuses what the protocol cannot carry out."""
    default = {field.name: field.default for field in fields(Plan)}
    for field in default:
        if field not in _PLANNED and getattr(plan, field) != default[field]:
            raise ConfigError(
                f"{getattr(plan, field)!r} cannot be carried out by the protocol",
                field=f"plan.{field}",
                hint=f"leave it at {default[field]!r}",
            )
    if isinstance(plan.epsilon, tuple) or isinstance(plan.tau2, tuple):
        raise ConfigError("the protocol takes one target for all", field="plan.epsilon")
    if plan.graph not in ("regular", "complete"):
        raise ConfigError(f"no graph {plan.graph!r} on Flower", field="plan.graph", hint="use 'regular'")
    return {field: getattr(plan, field) for field in _PLANNED}


def _plan(values: dict[str, Any]) -> Plan:
    if set(values) != set(_PLANNED):
        raise RemoteProtocolError("a proposal with an unknown kind of plan")
    try:
        plan = Plan(**values)
        plan_values(plan)
        plan.budget(1)
    except NissError as error:
        raise RemoteProtocolError(f"a plan that cannot be carried out: {error.message}") from None
    return plan


def _bytes(text: str, length: int) -> bytes:
    value = bytes.fromhex(text)
    if len(value) != length:
        raise ValueError("length")
    return value
