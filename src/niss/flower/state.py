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
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context

from niss.accounting import ChargeableLedger, Ledger, LedgerFile
from niss.errors import ConfigError, LocalProtocolError, PrivacyError
from niss.files import LEDGER, LIMITS, PRIVATE, locked_folder, read_private, write_atomically
from niss.protocol import Identity, SecretBytes, create_keyfile, load_identity
from niss.session.limits import Budget, Ceiling
from niss.session.store import SELF, ClientState, MemoryStore, Store, require_room

RECORD = "niss"
OWN_KEY, NOTES = "identity.key", "notes"
_START_ANEW = (
    "it could answer a round twice, or overspend; a new folder and identity are a new budget on the same data"
)
_CONTEXT = {"identity", "notes", "joint", "marginal", "charges", "failures", "budget"}


class ContextStore(MemoryStore):
    """Keeps everything in the Context of a run: all there is in a simulation, and gone with the run."""

    def __init__(self, context: Context) -> None:
        super().__init__(os.urandom)
        self._context = context
        record: Any = context.state.config_records.get(RECORD)
        if record is None:
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
        super().save()
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


class FolderStore(Store):
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
            spent = self.store.spent_by(ledger)
            grid = require_room(spent, self.budget, self.ceiling, mus[SELF][0], basis)
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


def _require_private(path: Path, wanted: str) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    if os.name == "posix" and mode & 0o077:
        raise PrivacyError(
            f"others on this machine have rights to {path} (mode {mode:04o})", hint=f"chmod {wanted} {path}"
        )


@contextmanager
def open_store(context: Context, folder: Path | None) -> Iterator[Store]:
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
