"""What a client keeps between messages: its identity, the protocol's memory, what it agreed to, what it spent.

Flower gives a ClientApp one durable thing, the Context of a run, and in a deployment saves it only after the reply
has left. A crash in between brings back an old Context. A node that has a folder of its own (`niss-state`) does not
depend on it: there everything is on disk before anything is sent, and the budget holds for all runs together.
"""

from __future__ import annotations

import base64
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from flwr.app import ConfigRecord, Context

from niss.accounting import Ledger
from niss.accounting.assess import charge_to
from niss.errors import LocalProtocolError, PrivacyError
from niss.flower.limits import Budget
from niss.protocol.agreement import Agreed
from niss.protocol.keys import Identity
from niss.protocol.secret import SecretBytes

RECORD = "niss"
SELF = "self"


@dataclass
class Notes:
    """The protocol's memory, and by run (in hex) the proposal agreed to and the steps taken."""

    memory: bytes | None = None
    proposals: dict[str, bytes] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)

    def to_bytes(self) -> SecretBytes:
        values = {
            "version": 1,
            "memory": None if self.memory is None else base64.b64encode(self.memory).decode(),
            "proposals": {run: base64.b64encode(data).decode() for run, data in self.proposals.items()},
            "steps": self.steps,
        }
        return SecretBytes(json.dumps(values, sort_keys=True).encode())

    @classmethod
    def from_bytes(cls, data: bytes) -> Notes:
        data = SecretBytes(data)  # Not left for a traceback to show.
        notes = _parsed(data)
        if notes is None:
            # Raised here, where no traceback finds the keys among the locals.
            raise LocalProtocolError(
                "what this client kept is damaged",
                hint="enrol with a new identity; an old one without its memory could answer a round twice",
            )
        return notes


def _parsed(data: SecretBytes) -> Notes | None:
    try:
        values = json.loads(data)
        if values["version"] != 1:
            return None
        return Notes(
            None if values["memory"] is None else SecretBytes(base64.b64decode(values["memory"])),
            {str(run): base64.b64decode(text) for run, text in values["proposals"].items()},
            {str(run): int(step) for run, step in values["steps"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return None


Charge = Callable[[Agreed, float], None]


class Keeper(ABC):
    """Where a client keeps things; `save` is durable before it returns, as far as its place allows."""

    identity: Identity
    notes: Notes

    @abstractmethod
    def save(self) -> None: ...

    @abstractmethod
    def charges(self, run: str, relation: str, budget: Budget, failure: float) -> Charge:
        """A function that charges one round to this client's ledger, or refuses."""


class ContextKeeper(Keeper):
    """In the Context of a run: all there is in a simulation, and gone with the run."""

    def __init__(self, context: Context) -> None:
        self._context = context
        record = context.state.config_records.get(RECORD)
        if record is None:
            self.identity, self.notes = Identity.generate(os.urandom), Notes()
            self._spent = (0.0, 0.0, 0)
            self._budget: Budget | None = None
            return
        self.identity = Identity(cast(bytes, record["identity"]))
        self.notes = Notes.from_bytes(cast(bytes, record["notes"]))
        self._spent = (
            cast(float, record["joint"]),
            cast(float, record["marginal"]),
            cast(int, record["charges"]),
        )
        self._budget = _budget_from(cast(list[float], record["budget"]))

    def save(self) -> None:
        joint, marginal, charges = self._spent
        self._context.state[RECORD] = ConfigRecord(
            {
                "identity": bytes(self.identity.secret_bytes()),
                "notes": bytes(self.notes.to_bytes()),
                "joint": joint,
                "marginal": marginal,
                "charges": charges,
                "budget": _budget_values(self._budget),
            }
        )

    def charges(self, run: str, relation: str, budget: Budget, failure: float) -> Charge:  # noqa: ARG002
        return charge_to(_ContextLedger(self, budget, failure), SELF, relation=relation)

    def spend(self, mu: tuple[float, float], budget: Budget, failure: float) -> None:
        joint, marginal, charges = self._spent
        # The first budget holds: a server cannot propose a second run to get a larger one.
        budget = self._budget or budget
        check_failures(charges + 1, failure, budget.delta_failure)
        ledger = Ledger(
            np.array([joint]),
            np.array([marginal]),
            np.array([charges]),
            None if budget.mu is None else np.array([budget.mu]),
        )
        ledger.charge(np.zeros(1, dtype=np.int64), np.array([mu[0]]), np.array([mu[1]]))
        self._spent = (float(ledger.joint_squared[0]), float(ledger.marginal_squared[0]), charges + 1)
        self._budget = budget
        self.save()


@dataclass(frozen=True)
class _ContextLedger:
    """Charges a Context as `charge_to` charges a file."""

    keeper: ContextKeeper
    budget: Budget
    failure: float

    def charge(
        self, round: int, attempt: int, mus: Mapping[str, tuple[float, float]], basis: Mapping[str, Any]
    ) -> None:
        del round, attempt, basis  # The protocol's memory knows which rounds were answered.
        self.keeper.spend(mus[SELF], self.budget, self.failure)


def _budget_values(budget: Budget | None) -> list[float]:
    """As a record holds it: nothing, or B (infinite where there is none), delta and its part for failures."""
    if budget is None:
        return []
    return [math.inf if budget.mu is None else budget.mu, budget.delta, budget.delta_failure]


def _budget_from(values: list[float]) -> Budget | None:
    if not values:
        return None
    mu, delta, failure = values
    return Budget(mu if math.isfinite(mu) else None, delta, failure)


def check_failures(charges: int, failure: float, allowed: float) -> None:
    """Refuse a charge whose bound on colluding neighbours may fail more often than delta has room for."""
    if charges * failure > allowed * (1.0 + 1e-9):
        raise PrivacyError(
            f"{charges} uploads, each of which may fail its bound on colluders, exceed this client's delta",
            hint="fewer rounds, or a higher cap on participations",
        )


def keep_in_context(context: Context) -> AbstractContextManager[Keeper]:
    return nullcontext(ContextKeeper(context))
