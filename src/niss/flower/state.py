"""What a client keeps between messages: its identity, the protocol's memory, what it agreed to, what it spent.

Flower gives a ClientApp one durable thing, the Context of a run, and in a deployment saves it only after the reply
has left: a crash in between brings back an old Context. A node that has a folder of its own (`niss-state`) does not
depend on the Context. There everything is on disk before anything is sent, and one budget holds for all runs together:

    identity.key   the identity, as `niss keys new` makes it; made at first use where there is none
    notes          the `ClientState`: protocol memory with its one-time keys, and what was agreed to; mode 0600
    ledger.jsonl   what was spent, in every run, against one budget

A Context has one record, `niss`, with the identity, the same `notes`, the budget, the sums of mu^2 in the joint and the
marginal view, and the number of charges.
"""

from __future__ import annotations

import base64
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context

from niss.accounting import ChargeableLedger, Ledger, LedgerFile
from niss.errors import ConfigError, LocalProtocolError, PrivacyError
from niss.files import LEDGER, locked_folder, read_private, write_atomically
from niss.flower.limits import Budget
from niss.protocol import Identity, SecretBytes, create_keyfile, load_identity

RECORD = "niss"
SELF = "self"
"""The name of the client in its own ledger."""
_IDENTITY, _STATE = "identity.key", "notes"


@dataclass
class ClientState:
    """What a client remembers of its runs, which are named by their id in hex.

    memory     of the protocol's machine, with its one-time keys: secret
    proposals  the proposal agreed to, as the server signed it
    steps      how many requests were answered
    """

    memory: bytes | None = None
    proposals: dict[str, bytes] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)

    def to_bytes(self) -> SecretBytes:
        """The state as it is kept: JSON, with bytes in base64."""
        values = {
            "version": 1,
            "memory": None if self.memory is None else base64.b64encode(self.memory).decode(),
            "proposals": {run: base64.b64encode(data).decode() for run, data in self.proposals.items()},
            "steps": self.steps,
        }
        return SecretBytes(json.dumps(values, sort_keys=True).encode())

    @classmethod
    def from_bytes(cls, data: bytes) -> ClientState:
        """The state in `data`; raises `LocalProtocolError`, without showing any of it, if it is damaged."""
        data = SecretBytes(data)  # Not left for a traceback to show.
        state = cls._parse(data)
        if state is None:
            # Raised here, where no traceback finds the keys among the locals.
            raise LocalProtocolError(
                "this client's saved state is damaged",
                hint="enrol with a new identity; an old one without its memory could answer a round twice",
            )
        return state

    @classmethod
    def _parse(cls, data: SecretBytes) -> ClientState | None:
        try:
            values = json.loads(data)
            if values["version"] != 1:
                return None
            return cls(
                None if values["memory"] is None else SecretBytes(base64.b64decode(values["memory"])),
                {str(run): base64.b64decode(text) for run, text in values["proposals"].items()},
                {str(run): int(step) for run, step in values["steps"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            return None


class StateStore(ABC):
    """Where a client keeps its identity, its state and its ledger."""

    identity: Identity
    state: ClientState

    @abstractmethod
    def save(self) -> None:
        """Keep `state`; durable when this returns, as far as the place allows."""

    @abstractmethod
    def ledger(self, run: str, relation: str, budget: Budget, failure: float) -> ChargeableLedger:
        """The ledger that the rounds of a run are charged to.

        run       id of the run, in hex
        relation  what the run hides, `zero-out` or `replace-one`
        budget    what may be spent in all, where no earlier run has fixed it
        failure   probability that a round's bound on colluding neighbours fails, which counts against delta
        """


class ContextStore(StateStore):
    """Keeps everything in the Context of a run: all there is in a simulation, and gone with the run.

    spent   ledger of this one client
    budget  what the first charge was made against; None before it
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self.spent, self.budget = Ledger.empty(1), None
        record: Any = context.state.config_records.get(RECORD)
        if record is None:
            self.identity, self.state = Identity.generate(os.urandom), ClientState()
            return
        self.identity = Identity(record["identity"])
        self.state = ClientState.from_bytes(record["notes"])
        self.spent = Ledger(*(np.array([record[name]]) for name in ("joint", "marginal", "charges")))
        self.budget = Budget(*record["budget"]) if record["budget"] else None

    def save(self) -> None:
        self._context.state[RECORD] = ConfigRecord(
            {
                "identity": bytes(self.identity.secret_bytes()),
                "notes": bytes(self.state.to_bytes()),
                "joint": float(self.spent.joint_squared[0]),
                "marginal": float(self.spent.marginal_squared[0]),
                "charges": int(self.spent.participations[0]),
                "budget": [] if self.budget is None else list(astuple(self.budget)),
            }
        )

    def ledger(self, run: str, relation: str, budget: Budget, failure: float) -> ChargeableLedger:
        del run, relation
        return _ContextLedger(self, budget, failure)


@dataclass(frozen=True)
class _ContextLedger:
    """Charges a Context, and saves it at once: what follows the charge may fail."""

    store: ContextStore
    budget: Budget
    failure: float

    def charge(
        self, round: int, attempt: int, mus: Mapping[str, tuple[float, float]], basis: Mapping[str, Any]
    ) -> None:
        del round, attempt, basis  # The protocol's memory knows which rounds were answered.
        store, (joint, marginal) = self.store, mus[SELF]
        # The first budget holds: a server cannot propose a second run to get a larger one.
        budget = store.budget or self.budget
        _check_failures(int(store.spent.participations[0]) + 1, self.failure, budget.delta_failure)
        store.spent.budget = np.array([budget.mu])
        store.spent.charge(np.zeros(1, dtype=np.int64), np.array([joint]), np.array([marginal]))
        store.budget = budget
        store.save()


class FolderStore(StateStore):
    """Keeps everything in a folder of the node; `open_store` locks it for one process at a time.

    Raises `PrivacyError` for a folder in which something is missing, or that others can read: a client without
    its memory could answer a round twice.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        key = folder / _IDENTITY
        if not key.exists():
            if (folder / _STATE).exists() or (folder / LEDGER).exists():
                raise PrivacyError(
                    f"{folder} has been used before but has no identity",
                    hint="restore its key file, or use a new folder",
                )
            create_keyfile(key, Identity.generate(os.urandom))
        self.identity = load_identity(key)
        try:
            saved = SecretBytes(read_private(folder / _STATE, follow_links=True))
            self.state = ClientState.from_bytes(saved)
        except FileNotFoundError:
            self.state = ClientState()
        if self.state.memory is None and (folder / LEDGER).exists():
            raise PrivacyError(
                f"{folder} has a ledger but has lost its memory, the file {_STATE!r}",
                hint="use a new folder with a new identity; this one could answer a round twice",
            )

    def save(self) -> None:
        path = self._folder / _STATE
        write_atomically(path, self.state.to_bytes(), temporary=self._folder / f".{_STATE}.new")

    def ledger(self, run: str, relation: str, budget: Budget, failure: float) -> ChargeableLedger:
        return _FolderLedger(self._folder / LEDGER, run, relation, budget, failure)


@dataclass(frozen=True)
class _FolderLedger:
    """One ledger file for all runs: rounds are numbered as they come, and the basis says which run they were of."""

    path: Path
    run: str
    relation: str
    budget: Budget
    failure: float

    def charge(
        self, round: int, attempt: int, mus: Mapping[str, tuple[float, float]], basis: Mapping[str, Any]
    ) -> None:
        with self._open() as ledger:
            number, counted = len(ledger.entries), ledger.header.relation
            if counted == "zero-out" and self.relation != "zero-out":
                # A round that hides more also hides this: its mu is for twice the distance.
                basis = {**basis, "relation": self.relation}
            elif counted != self.relation:
                raise PrivacyError(
                    f"this node's ledger counts {counted}, but the run hides only {self.relation}"
                )
            if math.isfinite(self.budget.mu) and ledger.budget(SELF) is None:
                raise PrivacyError(
                    f"{self.path} was started without a budget, so it can promise nothing",
                    hint="use a new niss-state folder, with a new identity",
                )
            _check_failures(number + 1, self.failure, ledger.header.delta_failure)
            ledger.charge(number, 0, mus, {**basis, "run": self.run, "round": round, "attempt": attempt})

    def _open(self) -> LedgerFile:
        """The node's ledger; the first run that charges it fixes budget and relation for all that follow."""
        if self.path.exists():
            return LedgerFile.open(self.path)
        return LedgerFile.create(
            self.path,
            run="all runs of this node",
            budgets={SELF: self.budget.mu if math.isfinite(self.budget.mu) else None},
            delta=self.budget.delta,
            unit="client",
            relation=self.relation,
            delta_failure=self.budget.delta_failure,
        )


def _check_failures(charges: int, failure: float, allowed: float) -> None:
    """Refuse a charge whose bound on colluding neighbours may fail more often than delta has room for.

    By the union bound, `charges` rounds fail with probability `charges * failure` at most.
    """
    if charges * failure > allowed * (1.0 + 1e-9):
        raise PrivacyError(
            f"{charges} uploads, each with a bound on colluders that may fail, exceed this client's delta",
            hint="use fewer rounds, or raise the cap on participations",
        )


@contextmanager
def open_store(context: Context, folder: Path | None) -> Iterator[StateStore]:
    """The store in `folder`, while no other process uses it, or in the Context where there is no folder.

    A folder that does not exist is made, for its owner alone.
    """
    with ExitStack() as stack:
        if folder is None:
            yield ContextStore(context)
            return
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            stack.enter_context(locked_folder(folder))
        except OSError as error:
            raise ConfigError(f"cannot use {folder}: {error.strerror}", field="niss-state") from None
        yield FolderStore(folder)
