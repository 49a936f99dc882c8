"""What a client keeps of its runs, and where: its identity, what it agreed to and remembers, what it spent.

Everything of one run is in its `JoinedRun`, and nothing of it elsewhere but in the ledger: runs share an identity, the
numbers of its keys, and a budget.

A `MemoryStore` is gone with its process. A `FolderStore` is on disk before anything is sent, and one budget holds for
all runs together:

    identity.key   the identity, as `niss keys new` makes it; made at first use where there is none
    notes          the `ClientState`: protocol memory with its one-time keys, and what was agreed to; mode 0600
    ledger.jsonl   what was spent, in every run, against one budget; mode 0600
    limits.json    the owner's limit when a run was last answered, for `niss account`; nothing rests on it

The folder has mode 0700. Notes and ledger name each other: the notes say what the head of the ledger was, each charge
how often the notes had been written. A ledger that is gone or was cut, and notes that were put back to before a charge,
are noticed and refused. Nothing here notices a copy of the whole folder; against that each reply carries a step.

A folder, and its ledger, is of one unit and one dataset: a run that hides records is refused where whole clients were
charged, and the other way round.
"""

from __future__ import annotations

import json
import math
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from niss.accounting import Charge, ChargeableLedger, Ledger, LedgerFile, LedgerHeader
from niss.errors import ConfigError, LocalProtocolError, PrivacyError
from niss.files import LEDGER, LIMITS, PRIVATE, read_private, write_atomically
from niss.mechanism import Slots
from niss.protocol.keyfile import create_keyfile, load_identity
from niss.protocol.keys import Entropy, Identity
from niss.redaction import SecretBytes
from niss.session.limits import Budget, Spent
from niss.settings import check_json, to_values

SELF = "self"
"""The name of the client in its own ledger."""
MOST_FAILING_RUNS = 1_000
"""Most runs that one identity joins whose bounds on colluders may fail."""
MOST_RUNS_OVER = 10_000
"""Most runs that one identity takes part in and then forgets."""
OWN_KEY, NOTES = "identity.key", "notes"
START_ANEW = (
    "it could answer a round twice, or overspend; a new folder and identity are a new budget on the same data"
)
_MOST_RUNS = 64
_VERSION = 2
_IN_BASE64 = {"ser_json_bytes": "base64", "val_json_bytes": "base64"}


@dataclass
class JoinedRun:
    """What a client remembers of a run.

    proposal   that it agreed to, as the server signed it
    first_key  number of the first prekey that was made after it was joined
    memory     of the protocol's machine in this run, with the one-time keys for it: secret
    rounds     how many of its rounds can be paid for, as the server was told
    paid       how many were paid for, or may have been
    step       how many of its requests were answered
    answered   whether any of its rounds was
    blanks     how many blanks were sent in place of updates, as far as it was noted
    """

    __pydantic_config__: ClassVar[Any] = _IN_BASE64

    proposal: bytes
    first_key: int
    memory: bytes | None = None
    rounds: int = 1
    paid: int = 0
    step: int = 0
    answered: bool = False
    blanks: int = 0

    def __post_init__(self) -> None:
        self.memory = None if self.memory is None else SecretBytes(self.memory)


@dataclass
class ClientState:
    """What a client remembers of its runs.

    runs      by id in hex, those last that were heard of last
    over      ids of runs that it took part in and has forgotten: none is joined again, as earlier rounds may count in
              the price of later ones
    next_key  number of the next prekey, whatever run it is for
    saves     how often this was written
    ledger    head of the ledger after the last charge; None before the first
    failures  with what probability any bound on colluders of a run that was joined may fail, at most
    failing   how many runs that is for
    """

    __pydantic_config__: ClassVar[Any] = _IN_BASE64

    runs: dict[str, JoinedRun] = field(default_factory=dict)
    over: list[str] = field(default_factory=list)
    next_key: int = 0
    saves: int = 0
    ledger: str | None = None
    failures: float = 0.0
    failing: int = 0

    def note(self, run: str, joined: JoinedRun) -> None:
        """Remember a run as the latest. Of those only joined the oldest are forgotten, and of those with rounds.

        So nobody fills the disk with runs, and whoever only proposes some makes a client forget none with rounds.
        """
        self.runs.pop(run, None)
        self.runs[run] = joined
        for answered in (False, True):
            alike = [one for one, known in self.runs.items() if known.answered == answered]
            for oldest in alike[:-_MOST_RUNS]:
                del self.runs[oldest]
                self.over += [oldest] if answered else []

    def to_bytes(self) -> SecretBytes:
        """The state as it is kept: JSON, with bytes in base64."""
        values = dict.fromkeys(_KEPT) | to_values(self) | {"version": _VERSION}
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
            whole = values["version"] == _VERSION and values.keys() >= _KEPT
            return check_json(cls, data) if whole else None
        except (ConfigError, KeyError, TypeError, ValueError, AttributeError, RecursionError):
            return None


_KEPT = {one.name for one in fields(ClientState)}


class Store(ABC):
    """Where a client keeps its identity, its state and its ledger."""

    identity: Identity
    state: ClientState

    @abstractmethod
    def save(self) -> None:
        """Keep `state`; durable when this returns, as far as the place allows."""

    def note_blank(self, run: bytes) -> int:
        """Remember another blank in a run; how many that makes. For the owner's log alone."""
        joined = self.state.runs[run.hex()]
        joined.blanks += 1
        self.save()
        return joined.blanks

    @abstractmethod
    def spent(self, budget: Budget) -> Spent:
        """All that was charged; `budget` is what may be spent in all, where no earlier run has fixed it."""

    @abstractmethod
    def ledger(self, run: str, relation: str, budget: Budget) -> ChargeableLedger:
        """The ledger that the rounds of a run are charged to.

        run       id of the run, in hex
        relation  what the run hides, `zero-out` or `replace-one`
        budget    what may be spent in all, where no earlier run has fixed it; its ceiling holds in any case
        """

    def join(
        self,
        run: str,
        proposal: bytes,
        budget: Budget,
        *,
        failure: float,
        charge: Charge | None = None,
        rounds: int = 1,
    ) -> JoinedRun:
        """What is remembered of a run: that this proposal was agreed to, unless it was joined before; kept with `save`.

        run       id of the run, in hex
        proposal  as the server signed it
        budget    what may be spent in all, where no earlier run has fixed it
        failure   with what probability a bound on colluders of any graph of the run may fail
        charge    what one round of it costs, at most; None: that is paid for
        rounds    that it may take part in

        Raises `PrivacyError` where the budget does not cover another round, so that nobody waits for this client, where
        the bounds on colluders of all runs together could fail too often, and for a run that is over for this client.
        """
        spent, state = self.spent(budget), self.state
        if charge is not None:
            spent.require_round(budget, charge)
        if run in state.runs:
            return state.runs[run]
        if run in state.over or len(state.over) >= MOST_RUNS_OVER:
            raise PrivacyError(
                f"the run is over for this client, or the {MOST_RUNS_OVER} runs that it can take part in are",
                hint="start a new run; a new niss-state folder and identity would be a new budget on the same data",
            )
        if failure > 0.0:
            if state.failing >= MOST_FAILING_RUNS:
                raise PrivacyError(
                    f"this identity has joined {MOST_FAILING_RUNS} runs whose bounds on colluders may fail",
                    hint="a new niss-state folder and identity would be a new budget on the same data",
                )
            spent.require_run(budget, failure)
            state.failures, state.failing = state.failures + failure, state.failing + 1
        joined = JoinedRun(
            proposal,
            state.next_key,
            rounds=rounds if charge is None else spent.rounds(budget, charge, rounds),
        )
        state.note(run, joined)
        return joined


class MemoryStore(Store):
    """Keeps everything in this process.

    charged   ledger of this one client
    budget    what the first charge was made against; None before it
    failures  what the grids of all rounds cost in delta
    """

    def __init__(self, entropy: Entropy = os.urandom) -> None:
        self.identity, self.state = Identity.generate(entropy), ClientState()
        self.charged, self.failures = Ledger.empty(1), 0.0
        self.budget: Budget | None = None

    def save(self) -> None:
        self.state.saves += 1

    def spent(self, budget: Budget) -> Spent:
        failures = self.failures + self.state.failures
        first = self.budget or budget
        self.charged.unit = first.unit
        return Spent(self.charged.spent(0), failures, first)

    def ledger(self, run: str, relation: str, budget: Budget) -> ChargeableLedger:
        del run, relation
        return _LedgerInMemory(self, budget)


@dataclass(frozen=True)
class _LedgerInMemory:
    """Charges a store, and saves it at once: what follows the charge may fail."""

    store: MemoryStore
    budget: Budget

    def charge(
        self, round: int, attempt: int, charges: Mapping[str, Charge], basis: Mapping[str, Any]
    ) -> None:
        del round, attempt, basis  # The protocol's memory knows which rounds were answered.
        store = self.store
        charge = store.spent(self.budget).require_room(self.budget, charges[SELF])
        store.budget = store.budget or self.budget
        most = store.budget.most
        store.charged.budget = most if isinstance(most, Slots) else np.array([most])
        store.charged.charge(np.zeros(1, dtype=np.int64), charge)
        store.failures += charge.grid_delta or 0.0
        store.save()


class FolderStore(Store):
    """Keeps everything in a folder of the node; whoever opens it locks it for one process at a time.

    Raises `PrivacyError` for a folder in which something is missing or older than the rest, or that others can enter:
    a client without its memory could answer a round twice, one without its ledger overspend.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._ledger = folder, folder / LEDGER
        require_private(folder, "700")
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
            raise PrivacyError(f"{folder} has lost its ledger, the file {LEDGER!r}", hint=START_ANEW)

    def _check_ledger(self) -> None:
        """Ledger and notes must name each other."""
        if not self.state.saves:
            raise PrivacyError(
                f"{self._folder} has a ledger but has lost its memory, the file {NOTES!r}", hint=START_ANEW
            )
        if self.state.ledger is None and not stat.S_IMODE(self._ledger.stat().st_mode) & 0o022:
            # Made, and not yet closed to those who could not enter the folder either, when this client was killed.
            self._ledger.chmod(PRIVATE)
        require_private(self._ledger, "600")
        ledger = LedgerFile.read(self._ledger, expected_head=self.state.ledger)
        paid = all(
            SELF in entry.charges and entry.charges[SELF].grid_delta is not None for entry in ledger.entries
        )
        if not paid or any("notes" not in entry.basis for entry in ledger.entries):
            raise PrivacyError(
                f"{self._ledger} has charges that this version of niss did not write", hint=START_ANEW
            )
        if self.state.saves < max((int(entry.basis["notes"]) for entry in ledger.entries), default=0):
            raise PrivacyError(
                f"the file {NOTES!r} in {self._folder} is older than the last charge of its ledger",
                hint=START_ANEW,
            )

    def save(self) -> None:
        self.state.saves += 1
        path = self._folder / NOTES
        write_atomically(path, self.state.to_bytes(), temporary=self._folder / f".{NOTES}.new")

    def spent(self, budget: Budget) -> Spent:
        self._note_limits(budget)
        if not self._ledger.exists():
            return Spent(Slots() if budget.unit == "record" else 0.0, self.state.failures, budget)
        return self.spent_by(LedgerFile.read(self._ledger))

    def spent_by(self, ledger: LedgerFile) -> Spent:
        """`spent`, of a ledger that is open."""
        header, most = ledger.header, ledger.budget(SELF)
        first = Budget(
            math.inf if most is None else most,
            header.delta,
            header.delta_failure,
            unit=header.unit,
            dataset=header.dataset,
        )
        grids = math.fsum(entry.charges[SELF].grid_delta or 0.0 for entry in ledger.entries)
        return Spent(ledger.spent(SELF), grids + self.state.failures, first)

    def ledger(self, run: str, relation: str, budget: Budget) -> ChargeableLedger:
        self._note_limits(budget)
        return _FolderLedger(self, self._ledger, run, relation, budget)

    def _note_limits(self, budget: Budget) -> None:
        limits = {} if budget.ceiling is None else {**asdict(budget.ceiling), "failures": self.state.failures}
        path, text = self._folder / LIMITS, (json.dumps(limits) + "\n").encode()
        if not path.exists() or path.read_bytes() != text:
            write_atomically(path, text)


@dataclass(frozen=True)
class _FolderLedger:
    """One ledger file for all runs: rounds are numbered as they come, and the basis says which run they were of."""

    store: FolderStore
    path: Path
    run: str
    relation: str
    budget: Budget

    def charge(
        self, round: int, attempt: int, charges: Mapping[str, Charge], basis: Mapping[str, Any]
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
            if self.budget.promises and ledger.budget(SELF) is None:
                raise PrivacyError(
                    f"{self.path} was started without a budget, so it can promise nothing",
                    hint="use a new niss-state folder, with a new identity; what left before stays uncovered",
                )
            charge = self.store.spent_by(ledger).require_room(self.budget, charges[SELF])
            basis = {**basis, **this, "notes": state.saves}
            ledger.charge(len(ledger.entries), 0, {SELF: charge}, basis)
            state.ledger = ledger.head
        self.store.save()

    def _open(self) -> LedgerFile:
        """The node's ledger; the first run that charges it fixes budget and relation for all that follow."""
        if self.path.exists():
            return LedgerFile.open(self.path)
        most = self.budget.most.rounds if isinstance(self.budget.most, Slots) else self.budget.most
        ledger = LedgerFile.create(
            self.path,
            LedgerHeader(
                run="all runs of this node",
                budgets={SELF: most if self.budget.promises else None},
                delta=self.budget.delta,
                unit=self.budget.unit,
                dataset=self.budget.dataset,
                relation=self.relation,
                delta_failure=self.budget.delta_failure,
            ),
        )
        self.path.chmod(PRIVATE)  # Until now nobody else could reach it: the folder is private.
        return ledger


def require_private(path: Path, wanted: str) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    if os.name == "posix" and mode & 0o077:
        raise PrivacyError(
            f"others on this machine have rights to {path} (mode {mode:04o})", hint=f"chmod {wanted} {path}"
        )


def make_folder(folder: Path, field: str) -> None:
    """Make a folder that does not exist, for its owner alone."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(folder, os.O_RDONLY))  # As it is opened when it is locked.
    except OSError as error:
        raise ConfigError(f"cannot use {folder}: {error.strerror}", field=field) from None
