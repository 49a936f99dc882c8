"""A node's own folder: identity, memory and ledger on disk, for all runs of this node.

identity.key   the identity, as `niss keys new` makes it; made at first use where there is none
notes          the protocol's memory with its one-time keys, and what was agreed to; mode 0600
ledger.jsonl   what was spent, in every run, against one budget
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from niss.accounting.assess import charge_to
from niss.accounting.ledger_disk import sync_folder
from niss.accounting.ledger_file import LedgerFile
from niss.errors import ConfigError, PrivacyError
from niss.flower.keeping import SELF, Charge, Keeper, Notes, check_failures
from niss.flower.limits import Budget
from niss.protocol.keyfile import create_keyfile, load_identity
from niss.protocol.keys import Identity
from niss.protocol.secret import SecretBytes

try:
    import fcntl
except ImportError:  # Not POSIX: two messages at once are not kept apart.
    fcntl = None  # type: ignore[assignment]

IDENTITY, NOTES, LEDGER = "identity.key", "notes", "ledger.jsonl"


class FolderKeeper(Keeper):
    """Keeps everything in a folder of the node; use it through `keep_in_folder`, which locks it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        key = folder / IDENTITY
        if not key.exists():
            if (folder / NOTES).exists() or (folder / LEDGER).exists():
                raise PrivacyError(
                    f"{folder} has a past but no identity", hint="restore its key file, or use a new folder"
                )
            create_keyfile(key, Identity.generate(os.urandom))
        self.identity = load_identity(key)
        notes = _read(folder / NOTES)
        self.notes = Notes() if notes is None else Notes.from_bytes(notes)
        if self.notes.memory is None and (folder / LEDGER).exists():
            raise PrivacyError(
                f"{folder} has a ledger but has lost its memory",
                hint="use a new folder with a new identity; this one could answer a round twice",
            )

    def save(self) -> None:
        beside = self._folder / f".{NOTES}.new"
        beside.unlink(missing_ok=True)
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(self.notes.to_bytes())
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._folder / NOTES)
        sync_folder(self._folder)

    def charges(self, run: str, relation: str, budget: Budget, failure: float) -> Charge:
        ledger = _AcrossRuns(self._folder / LEDGER, run, relation, budget, failure)
        return charge_to(ledger, SELF, relation=relation)


class _AcrossRuns:
    """One ledger for all runs: rounds are numbered as they come, and the basis says whose they were."""

    def __init__(self, path: Path, run: str, relation: str, budget: Budget, failure: float) -> None:
        self._path, self._run, self._relation = path, run, relation
        self._budget, self._failure = budget, failure

    def charge(
        self, round: int, attempt: int, mus: Mapping[str, tuple[float, float]], basis: Mapping[str, Any]
    ) -> None:
        with self._open() as ledger:
            number = len(ledger.entries)
            if ledger.header.relation == "zero-out" and self._relation != "zero-out":
                # A round that hides more also hides this: its mu is for twice the distance.
                basis = {**basis, "relation": self._relation}
            elif ledger.header.relation != self._relation:
                raise PrivacyError(
                    f"this node's ledger is for {ledger.header.relation}, not {self._relation}"
                )
            if self._budget.mu is not None and ledger.budget(SELF) is None:
                raise PrivacyError(
                    f"{self._path} was begun without a budget and can promise nothing",
                    hint="use a new niss-state folder, with a new identity",
                )
            check_failures(number + 1, self._failure, ledger.header.delta_failure)
            ledger.charge(number, 0, mus, {**basis, "run": self._run, "round": round, "attempt": attempt})

    def _open(self) -> LedgerFile:
        if self._path.exists():
            return LedgerFile.open(self._path)
        return LedgerFile.create(
            self._path,
            run="all runs of this node",
            budgets={SELF: self._budget.mu},
            delta=self._budget.delta,
            unit="client",
            relation=self._relation,
            delta_failure=self._budget.delta_failure,
        )


@contextmanager
def keep_in_folder(folder: Path) -> Iterator[Keeper]:
    """The keeper of a folder, while no other process uses it; the folder is made where there is none."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"cannot use {folder}: {error.strerror}", field="niss-state") from None
    try:
        if fcntl is not None:
            with suppress(OSError):  # Some network disks lock no folders.
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield FolderKeeper(folder)
    finally:
        os.close(descriptor)


def _read(path: Path) -> SecretBytes | None:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if os.name == "posix" and mode & 0o077:
                raise PrivacyError(
                    f"{path} can be reached by others (mode {mode:04o})", hint=f"chmod 600 {path}"
                )
            return SecretBytes(file.read())
    except FileNotFoundError:
        return None
