"""What a client keeps between messages: its identity, the protocol's memory, what it agreed to, what it spent.

Flower gives a ClientApp one durable thing, the Context of a run, and in a deployment saves it only after the reply
has left: a crash in between brings back an old Context. A node that has a folder of its own (`niss-state`) does not
depend on the Context. There everything is on disk before anything is sent, and one budget holds for all runs together:

    identity.key   the identity, as `niss keys new` makes it; made at first use where there is none
    notes          the `ClientState`: protocol memory with its one-time keys, and what was agreed to; mode 0600
    ledger.jsonl   what was spent, in every run, against one budget; mode 0600
    limits.json    the owner's limit when a run was last answered, for `niss account`; nothing rests on it

The folder has mode 0700. Notes and ledger name each other: the notes say what the head of the ledger was, each charge
how often the notes had been written. A ledger that is gone or was cut, and notes that were put back to before a charge,
are noticed and refused. Nothing here notices a copy of the whole folder; against that each reply carries a step.

A Context has one record, `niss`, with the identity, the same `notes`, the budget, the sums of mu^2 in the joint and the
marginal view, the number of charges, and what their grids cost in delta.

**Runs are paid for when they are joined.** A server that sees a graph before it shows it could show only those on
which a client's bound on colluders fails. So the probability that it fails on any graph of a run's whole chain is
added up over all runs that were joined, shown or not, and stays within the part of delta that is set aside for it.
"""

from __future__ import annotations

import base64
import json
import math
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context

from niss.accounting import ChargeableLedger, Ledger, LedgerFile
from niss.accounting.node_limits import Limit, require_within
from niss.errors import ConfigError, LocalProtocolError, PrivacyError
from niss.files import LEDGER, LIMITS, PRIVATE, locked_folder, read_private, write_atomically
from niss.flower.limits import Budget, Ceiling
from niss.protocol import Identity, SecretBytes, create_keyfile, load_identity

RECORD = "niss"
SELF = "self"
"""The name of the client in its own ledger."""
OWN_KEY, NOTES = "identity.key", "notes"
_MOST_RUNS = 64
MOST_FAILING_RUNS = 1_000
"""Most runs that one identity joins whose bounds on colluders may fail."""
_START_ANEW = (
    "it could answer a round twice, or overspend; a new folder and identity are a new budget on the same data"
)
_CONTEXT = {"identity", "notes", "joint", "marginal", "charges", "failures", "budget"}
# What sums of a few thousand charges may differ by from the exact value.
_ROUNDING = 1.0 + 1e-8


@dataclass
class ClientState:
    """What a client remembers of its runs, which are named by their id in hex.

    memory     of the protocol's machine, with its one-time keys: secret
    proposals  the proposal agreed to, as the server signed it
    steps      how many requests were answered
    saves      how often this was written
    ledger     head of the ledger after the last charge; None before the first
    failures   with what probability any bound on colluders of a run that was joined may fail, at most
    failing    how many runs that is for
    first_keys number of the first prekey that was made for the run
    """

    memory: bytes | None = None
    proposals: dict[str, bytes] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    saves: int = 0
    ledger: str | None = None
    failures: float = 0.0
    failing: int = 0
    first_keys: dict[str, int] = field(default_factory=dict)

    def join(self, run: str, proposal: bytes, *, failure: float = 0.0, first_key: int = 0) -> bytes:
        """The proposal that was agreed to for a run: this one, unless it was joined before.

        run        id of the run, in hex
        proposal   as the server signed it
        failure    with what probability a bound on colluders of any graph of the run may fail
        first_key  number of the next prekey to be made: the run takes none from before

        Of many runs those joined first are forgotten, so that nobody fills the disk with them; a run that was
        forgotten counts as never joined, and its rounds stay answered in the protocol's memory.
        """
        if run not in self.proposals:
            self.proposals[run], self.first_keys[run] = proposal, first_key
            self.failures, self.failing = self.failures + failure, self.failing + (failure > 0.0)
        for oldest in list(self.proposals)[:-_MOST_RUNS]:
            del self.proposals[oldest]
            self.steps.pop(oldest, None)
            self.first_keys.pop(oldest, None)
        return self.proposals[run]

    def to_bytes(self) -> SecretBytes:
        """The state as it is kept: JSON, with bytes in base64, and runs in the order in which they were joined."""
        values = {
            "failing": self.failing,
            "failures": self.failures,
            "first_keys": self.first_keys,
            "ledger": self.ledger,
            "memory": None if self.memory is None else base64.b64encode(self.memory).decode(),
            "proposals": {run: base64.b64encode(data).decode() for run, data in self.proposals.items()},
            "saves": self.saves,
            "steps": self.steps,
            "version": 1,
        }
        return SecretBytes(json.dumps(values).encode())

    @classmethod
    def from_bytes(cls, data: bytes) -> ClientState:
        """The state in `data`; raises `LocalProtocolError`, without showing any of it, if it is damaged."""
        data = SecretBytes(data)  # Not left for a traceback to show.
        state = cls._parse(data)
        if state is None:
            # Raised here, where no traceback finds the keys among the locals.
            raise LocalProtocolError(
                "this client's saved state is damaged, or another niss wrote it",
                hint="go on with the niss that wrote it; without its memory a client could answer a round twice",
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
                int(values["saves"]),
                None if values["ledger"] is None else str(values["ledger"]),
                float(values["failures"]),
                int(values["failing"]),
                {str(run): int(number) for run, number in values["first_keys"].items()},
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
    def spent(self, budget: Budget) -> tuple[float, float, Budget]:
        """All that was charged: mu^2 of the joint view, failure probabilities, and the budget that was fixed for them.

        budget  what may be spent in all, where no earlier run has fixed it
        """

    def join(
        self,
        run: str,
        proposal: bytes,
        *,
        failure: float,
        first_key: int,
        budget: Budget,
        ceiling: Ceiling | None,
        mu: float = 0.0,
    ) -> bytes:
        """`ClientState.join`, for a run that there is room for; kept with the next `save`.

        mu  what one round of it costs, at most

        Raises `PrivacyError` where the budget does not cover another round, so that nobody waits for this client, and
        where the bounds on colluders of all runs together could fail too often.
        """
        joint_squared, failures, first = self.spent(budget)
        if math.isfinite(mu):
            require_within(_limits(first, ceiling, failures), joint_squared + mu**2)
        if run not in self.state.proposals and failure > 0.0:
            if self.state.failing >= MOST_FAILING_RUNS:
                raise PrivacyError(
                    f"this identity has joined {MOST_FAILING_RUNS} runs whose bounds on colluders may fail",
                    hint="a new niss-state folder and identity would be a new budget on the same data",
                )
            _check_failures(failures + failure, first.delta_failure)
            require_within(_limits(first, ceiling, failures + failure), joint_squared)
        return self.state.join(run, proposal, failure=failure, first_key=first_key)

    @abstractmethod
    def ledger(
        self, run: str, relation: str, budget: Budget, ceiling: Ceiling | None = None
    ) -> ChargeableLedger:
        """The ledger that the rounds of a run are charged to.

        run       id of the run, in hex
        relation  what the run hides, `zero-out` or `replace-one`
        budget    what may be spent in all, where no earlier run has fixed it
        ceiling   what may be spent in all, even if an earlier run fixed more
        """


class ContextStore(StateStore):
    """Keeps everything in the Context of a run: all there is in a simulation, and gone with the run.

    charged   ledger of this one client
    budget    what the first charge was made against; None before it
    failures  what the grids of all rounds cost in delta
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self.charged, self.budget, self.failures = Ledger.empty(1), None, 0.0
        record: Any = context.state.config_records.get(RECORD)
        if record is None:
            self.identity, self.state = Identity.generate(os.urandom), ClientState()
            return
        if missing := _CONTEXT - record.keys():
            raise LocalProtocolError(
                f"this client's Context has no {min(missing)!r}: another version of niss wrote it",
                hint=_START_ANEW,
            )
        self.identity = Identity(record["identity"])
        self.state = ClientState.from_bytes(record["notes"])
        self.charged = Ledger(*(np.array([record[name]]) for name in ("joint", "marginal", "charges")))
        self.budget = Budget(*record["budget"]) if record["budget"] else None
        self.failures = float(record["failures"])

    def save(self) -> None:
        self.state.saves += 1
        self._context.state[RECORD] = ConfigRecord(
            {
                "identity": bytes(self.identity.secret_bytes()),
                "notes": bytes(self.state.to_bytes()),
                "joint": float(self.charged.joint_squared[0]),
                "marginal": float(self.charged.marginal_squared[0]),
                "charges": int(self.charged.participations[0]),
                "failures": self.failures,
                "budget": [] if self.budget is None else list(astuple(self.budget)),
            }
        )

    def spent(self, budget: Budget) -> tuple[float, float, Budget]:
        # The first budget holds: a server cannot propose a second run to get a larger one.
        first = self.budget or budget
        return float(self.charged.joint_squared[0]), self.failures + self.state.failures, first

    def ledger(
        self, run: str, relation: str, budget: Budget, ceiling: Ceiling | None = None
    ) -> ChargeableLedger:
        del run, relation
        return _ContextLedger(self, budget, ceiling)


@dataclass(frozen=True)
class _ContextLedger:
    """Charges a Context, and saves it at once: what follows the charge may fail."""

    store: ContextStore
    budget: Budget
    ceiling: Ceiling | None

    def charge(
        self, round: int, attempt: int, mus: Mapping[str, tuple[float, float]], basis: Mapping[str, Any]
    ) -> None:
        del round, attempt  # The protocol's memory knows which rounds were answered.
        store, (joint, marginal) = self.store, mus[SELF]
        joint_squared, failures, first = store.spent(self.budget)
        grid = _grid_delta(self.budget, basis)
        _check_failures(failures + grid, first.delta_failure)
        require_within(_limits(first, self.ceiling, failures + grid), joint_squared + joint**2)
        store.failures += grid
        store.budget = store.budget or self.budget
        store.charged.budget = np.array([store.budget.mu])
        store.charged.charge(np.zeros(1, dtype=np.int64), np.array([joint]), np.array([marginal]))
        store.save()


class FolderStore(StateStore):
    """Keeps everything in a folder of the node; `open_store` locks it for one process at a time.

    Raises `PrivacyError` for a folder in which something is missing or older than the rest, or that others can enter:
    a client without its memory could answer a round twice, one without its ledger overspend.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._ledger = folder, folder / LEDGER
        _require_private(folder, "700")
        key = folder / OWN_KEY
        if not key.exists():
            if (folder / NOTES).exists() or self._ledger.exists():
                raise PrivacyError(
                    f"{folder} has been used before but has no identity",
                    hint="restore its key file, or use a new folder",
                )
            create_keyfile(key, Identity.generate(os.urandom))
        self.identity = load_identity(key)
        try:
            saved = SecretBytes(read_private(folder / NOTES, follow_links=True))
            self.state = ClientState.from_bytes(saved)
        except FileNotFoundError:
            self.state = ClientState()
        if self._ledger.exists():
            self._check_ledger()
        elif self.state.ledger is not None:
            raise PrivacyError(f"{folder} has lost its ledger, the file {LEDGER!r}", hint=_START_ANEW)

    def _check_ledger(self) -> None:
        """Ledger and notes must name each other."""
        if self.state.memory is None:
            raise PrivacyError(
                f"{self._folder} has a ledger but has lost its memory, the file {NOTES!r}", hint=_START_ANEW
            )
        if self.state.ledger is None and not stat.S_IMODE(self._ledger.stat().st_mode) & 0o022:
            # Made, and not yet closed to those who could not enter the folder either, when this client was killed.
            self._ledger.chmod(PRIVATE)
        _require_private(self._ledger, "600")
        ledger = LedgerFile.read(self._ledger, expected_head=self.state.ledger)
        if any(not {"failure", "notes"} <= entry.basis.keys() for entry in ledger.entries):
            raise PrivacyError(
                f"{self._ledger} has charges that this version of niss did not write", hint=_START_ANEW
            )
        if self.state.saves < max((int(entry.basis["notes"]) for entry in ledger.entries), default=0):
            raise PrivacyError(
                f"the file {NOTES!r} in {self._folder} is older than the last charge of its ledger",
                hint=_START_ANEW,
            )

    def save(self) -> None:
        self.state.saves += 1
        path = self._folder / NOTES
        write_atomically(path, self.state.to_bytes(), temporary=self._folder / f".{NOTES}.new")

    def spent(self, budget: Budget) -> tuple[float, float, Budget]:
        if not self._ledger.exists():
            return 0.0, self.state.failures, budget
        return self.spent_by(LedgerFile.read(self._ledger))

    def spent_by(self, ledger: LedgerFile) -> tuple[float, float, Budget]:
        """`spent`, of a ledger that is open."""
        header, mu = ledger.header, ledger.budget(SELF)
        first = Budget(math.inf if mu is None else mu, header.delta, header.delta_failure)
        grids = math.fsum(float(entry.basis["failure"]) for entry in ledger.entries)
        return ledger.spent(SELF) ** 2, grids + self.state.failures, first

    def ledger(
        self, run: str, relation: str, budget: Budget, ceiling: Ceiling | None = None
    ) -> ChargeableLedger:
        limits = {} if ceiling is None else {**asdict(ceiling), "failures": self.state.failures}
        path, text = self._folder / LIMITS, (json.dumps(limits) + "\n").encode()
        if not path.exists() or path.read_bytes() != text:
            write_atomically(path, text)
        return _FolderLedger(self, self._ledger, run, relation, budget, ceiling)


@dataclass(frozen=True)
class _FolderLedger:
    """One ledger file for all runs: rounds are numbered as they come, and the basis says which run they were of."""

    store: FolderStore
    path: Path
    run: str
    relation: str
    budget: Budget
    ceiling: Ceiling | None

    def charge(
        self, round: int, attempt: int, mus: Mapping[str, tuple[float, float]], basis: Mapping[str, Any]
    ) -> None:
        state = self.store.state
        with self._open() as ledger:
            counted, this = ledger.header.relation, {"run": self.run, "round": round, "attempt": attempt}
            if any(this.items() <= entry.basis.items() for entry in ledger.entries):
                raise PrivacyError(f"round {round}, attempt {attempt}, of this run was charged before")
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
                    hint="use a new niss-state folder, with a new identity; what left before stays uncovered",
                )
            joint_squared, failures, first = self.store.spent_by(ledger)
            grid = _grid_delta(self.budget, basis)
            _check_failures(failures + grid, first.delta_failure)
            require_within(_limits(first, self.ceiling, failures + grid), joint_squared + mus[SELF][0] ** 2)
            noted = {"failure": grid, "notes": state.saves}
            ledger.charge(len(ledger.entries), 0, mus, {**basis, **this, **noted})
            state.ledger = ledger.head
        self.store.save()

    def _open(self) -> LedgerFile:
        """The node's ledger; the first run that charges it fixes budget and relation for all that follow."""
        if self.path.exists():
            return LedgerFile.open(self.path)
        ledger = LedgerFile.create(
            self.path,
            run="all runs of this node",
            budgets={SELF: self.budget.mu if math.isfinite(self.budget.mu) else None},
            delta=self.budget.delta,
            unit="client",
            relation=self.relation,
            delta_failure=self.budget.delta_failure,
        )
        self.path.chmod(PRIVATE)  # Until now nobody else could reach it: the folder is private.
        return ledger


def _grid_delta(budget: Budget, basis: Mapping[str, Any]) -> float:
    """What the grid of a round costs in delta; nothing where nothing is promised."""
    return float(basis.get("grid_delta", 0.0)) if math.isfinite(budget.mu) else 0.0


def _check_failures(failures: float, allowed: float) -> None:
    """Refuse runs whose bounds on colluders may fail more often, with what their grids cost, than delta has room for.

    By the union bound, all graphs together fail with the sum of their probabilities at most.
    """
    if failures > allowed * _ROUNDING:
        raise PrivacyError(
            "the bounds on colluders of all runs that this client joined may fail with probability "
            f"{failures:.2g}; its delta has room for {allowed:.2g}",
            hint="plan with a smaller delta than the nodes' niss-delta, or with more rounds (plan.chain_rounds); a new "
            "folder and identity would be a new budget on the same data",
        )


def _limits(first: Budget, ceiling: Ceiling | None, failures: float) -> list[Limit]:
    """The limits that hold for a client: the first budget, and its owner's of today."""
    limits = []
    if math.isfinite(first.mu):
        limits.append(Limit.of_ledger(first.mu, first.delta, first.delta_failure))
    if ceiling is not None:
        limits.append(Limit.of_owner(ceiling.setting, ceiling.epsilon, ceiling.delta, failures))
    return limits


def _require_private(path: Path, wanted: str) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    if os.name == "posix" and mode & 0o077:
        raise PrivacyError(
            f"others on this machine have rights to {path} (mode {mode:04o})", hint=f"chmod {wanted} {path}"
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
