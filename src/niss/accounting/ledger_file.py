"""The durable privacy filter: what each client spent, on disk before anything is sent.

With `B_k` fixed in the header, a charge that would bring client k to `sum of mu^2 > B_k^2` is refused, so
whatever the server asks for, adaptively, the run is B_k-GDP towards k: the budget is the claim, the running
total is only "spent". A charge is on disk (fsync) before `charge` returns; send afterwards, never before,
and leave aborted and lost rounds charged.

What the file itself shows: a changed byte, a line lost, added or moved within it. What it cannot show: lines
cut off its end, or a file written anew from its start, since the chain has no secret. Keep `head` somewhere
else and pass it to `open` as `expected_head`; a ledger that lost that record is refused.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from niss.accounting.ledger_chain import (
    LONGEST_BASIS,
    Header,
    LedgerEntry,
    Mu,
    canonical,
    charges_csv,
    client_order,
    damaged,
    is_whole,
    read_charge,
    read_header,
    seal,
    starts_whole,
)
from niss.checks import BOOKS
from niss.errors import ConfigError, PrivacyError
from niss.files import lock_file, sync_folder, to_json
from niss.mechanism import gdp_epsilon


class LedgerFile:
    """The ledger of one or more clients in one append-only file; make one with `create`, `open` or `read`."""

    def __init__(self, path: Path, header: Header, head: str, file: io.FileIO | None) -> None:
        self.path = path
        self.header = header
        self._hashes = [head]
        self._file = file
        self._entries: list[LedgerEntry] = []
        self._charged: set[tuple[int, int]] = set()
        self._squares: dict[str, tuple[float, float, int]] = {}
        self._torn: bytes = b""

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        run: str,
        budgets: Mapping[str, float | None] | None = None,
        delta: float,
        unit: str,
        relation: str,
        delta_failure: float = 0.0,
    ) -> LedgerFile:
        """A new ledger, locked for charging; raises PrivacyError for a path that exists.

        run             whose charges these are, in words
        budgets         the clients and their B_k; a budget of None promises nothing, `budgets=None` takes any client
                        and promises nothing to anyone
        delta           of every claim
        unit, relation  what is hidden, as in `Plan`
        delta_failure   the part of delta that pays for bounds that may fail
        """
        path = Path(path)
        header = Header(run, budgets, delta, unit, relation, delta_failure)
        line, head = seal(header.body())
        try:
            file = io.FileIO(path, "x+")
        except FileExistsError:
            raise PrivacyError(
                f"{path} exists already", hint="continue it with LedgerFile.open, or give another path"
            ) from None
        except OSError as error:
            raise PrivacyError(
                f"cannot create the ledger {path}: {error.strerror}", hint="give a path that can be written"
            ) from None
        _lock(file, path)
        ledger = cls(path, header, head, file)
        ledger._append(line)
        sync_folder(path.parent)
        return ledger

    @classmethod
    def open(cls, path: str | Path, *, expected_head: str | None = None) -> LedgerFile:
        """Open a ledger to charge it, verified from its first byte to its last, and locked.

        A last line torn by a crash is cut off (see `torn`): nothing was sent for it, since its charge had
        not returned. With `expected_head`, that record must be among those in the file.
        """
        path = Path(path)
        try:
            file = io.FileIO(path, "r+")
        except OSError as error:
            raise _unreadable(path, error) from None
        try:
            _lock(file, path)
            content = file.readall()
            ledger = cls._verified(path, content, file, expected_head)
            ledger._mend(content)
        except BaseException:
            file.close()
            raise
        return ledger

    @classmethod
    def read(cls, path: str | Path, *, expected_head: str | None = None) -> LedgerFile:
        """The same, verified, but for reading alone: nothing is locked or mended, even while another charges."""
        path = Path(path)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise _unreadable(path, error) from None
        return cls._verified(path, content, None, expected_head)

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        """Every charge, in the order of the file."""
        return tuple(self._entries)

    @property
    def clients(self) -> tuple[str, ...]:
        """All clients named in the header or charged."""
        return tuple(sorted({*(self.header.budgets or ()), *self._squares}, key=client_order))

    @property
    def head(self) -> str:
        """The hash of the last record, which commits to all before it."""
        return self._hashes[-1]

    @property
    def torn(self) -> bytes:
        """The part of a last line that a crash left behind, cut off when the file was opened; else empty."""
        return self._torn

    def budget(self, client: str) -> float | None:
        """B_k, which is the claim (in mu); None where nothing was promised."""
        self._require_known(client)
        return None if self.header.budgets is None else self.header.budgets[client]

    def spent(self, client: str, *, view: str = "joint") -> float:
        """mu of all charges so far, `sqrt(sum of mu^2)`; infinite after one without a guarantee."""
        if view not in ("joint", "marginal"):
            raise ConfigError(f"unknown view {view!r}", field="view", hint="use one of: joint, marginal")
        self._require_known(client)
        joint, marginal, _ = self._squares.get(client, (0.0, 0.0, 0))
        return math.sqrt(joint if view == "joint" else marginal)

    def participations(self, client: str) -> int:
        """How many uploads were charged to a client."""
        self._require_known(client)
        return self._squares.get(client, (0.0, 0.0, 0))[2]

    def epsilon(self, mu: float | None) -> float | None:
        """A mu of this ledger as epsilon at its delta; None stands for none, or for no finite one."""
        left = self.header.delta - self.header.delta_failure
        epsilon = math.inf if mu is None else gdp_epsilon(mu, left)
        return epsilon if math.isfinite(epsilon) else None

    def charge(
        self,
        round: int,
        attempt: int,
        mus: Mapping[str, tuple[float, float]],
        basis: Mapping[str, Any] | None = None,
    ) -> LedgerEntry:
        """Charge one upload to each client; on disk before this returns. Send afterwards, never before.

        round, attempt  which upload this is
        mus             (joint, marginal) mu of each client
        basis           in a few words, which worst case was charged

        A charge is refused whole (PrivacyError), and nothing is written, if any client would overspend, is unknown,
        or if this round and attempt were charged before.
        """
        if self._file is None:
            raise PrivacyError(
                f"{self.path} is closed, or open for reading only", hint="open it with LedgerFile.open"
            )
        entries = {client: Mu(float(joint), float(marginal)) for client, (joint, marginal) in mus.items()}
        entry = LedgerEntry(round, attempt, entries, dict(basis or {}))
        squares = self._checked(entry)
        line, digest = seal(entry.body(self.head))
        self._append(line)
        return self._accept(entry, digest, squares)

    def to_csv(self) -> str:
        """One line per charge and client; infinite mu is written as inf."""
        return charges_csv(self._entries)

    def to_json(self) -> dict[str, Any]:
        """Header, totals and charges as plain values; null where there is no finite number."""
        header = {name: value for name, value in self.header.body().items() if name != "budgets"}
        charges = [{**entry.to_json(), "hash": entry.hash} for entry in self._entries]
        clients = [self._client_json(client) for client in self.clients]
        return {
            **header,
            "head": self.head,
            "torn_bytes": len(self.torn),
            "clients": clients,
            "charges": charges,
        }

    def _client_json(self, client: str) -> dict[str, Any]:
        joint, marginal = self.spent(client), self.spent(client, view="marginal")
        budget = self.budget(client)
        value: dict[str, Any] = {
            "client": client,
            "participations": self.participations(client),
            "mu_spent": joint,
            "epsilon_spent": self.epsilon(joint),
            "mu_spent_marginal": marginal,
            "epsilon_spent_marginal": self.epsilon(marginal),
            "mu_claim": budget,
            "epsilon_claim": self.epsilon(budget),
        }
        return {name: to_json(number) for name, number in value.items()}

    def close(self) -> None:
        """Give the file and its lock back; what was charged stays readable."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @classmethod
    def _verified(
        cls, path: Path, content: bytes, file: io.FileIO | None, expected_head: str | None
    ) -> LedgerFile:
        *lines, tail = content.split(b"\n")
        torn = b""
        if is_whole(tail):
            # All of the record is there but its end of line: count it, which is the safe side.
            lines.append(tail)
        elif starts_whole(tail):
            raise damaged(f"{path}, line {len(lines) + 1}", "the end of the line is damaged")
        else:
            torn = tail
        if not lines:
            raise PrivacyError(
                f"{path} is not a ledger: it has no header",
                hint="if its creation was interrupted, nothing was charged: delete it and create it again",
            )
        ledger = cls(path, *read_header(lines[0], f"{path}, line 1"), file)
        for number, line in enumerate(lines[1:], start=2):
            where = f"{path}, line {number}"
            entry = read_charge(line, where, ledger.head)
            try:
                squares = ledger._checked(entry)
            except PrivacyError as error:
                raise damaged(where, error.message) from None
            ledger._accept(entry, entry.hash, squares)
        ledger._torn = torn
        if expected_head is not None and expected_head not in ledger._hashes:
            raise damaged(
                str(path), f"the record {expected_head[:12]}... kept as its head is no longer in it"
            )
        return ledger

    def _checked(self, entry: LedgerEntry) -> dict[str, tuple[float, float, int]]:
        """The clients' new totals, if this charge is allowed; the same checks for a new charge and one that is read."""
        for field, value in (("round", entry.round), ("attempt", entry.attempt)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise PrivacyError(f"{field}: must be a whole number of at least 0, not {value!r}")
        if (entry.round, entry.attempt) in self._charged:
            raise PrivacyError(
                f"round {entry.round}, attempt {entry.attempt}, was charged before",
                hint="a round is answered once; charge a repetition as a new attempt",
            )
        if not entry.mus:
            raise PrivacyError("mus: a charge names at least one client")
        try:
            too_long = len(canonical(entry.basis)) > LONGEST_BASIS
        except (TypeError, ValueError) as error:
            raise PrivacyError(
                f"basis: {error}", hint="use strings, whole numbers and finite numbers"
            ) from None
        if too_long:
            raise PrivacyError(
                f"basis: longer than {LONGEST_BASIS} bytes", hint="name the worst case and leave out the data"
            )
        return {client: self._total(client, mu) for client, mu in entry.mus.items()}

    def _total(self, client: str, mu: Mu) -> tuple[float, float, int]:
        self._require_known(client, new=True)
        if not (mu.joint >= 0.0 and mu.marginal >= 0.0):
            raise PrivacyError(f"mus[{client}]: must be numbers of at least 0, not {tuple(mu)!r}")
        joint, marginal, count = self._squares.get(client, (0.0, 0.0, 0))
        joint += mu.joint * mu.joint
        budget = None if self.header.budgets is None else self.header.budgets[client]
        if budget is not None and not joint <= budget * budget * (1.0 + BOOKS):
            raise PrivacyError(
                f"client {client} would overspend its privacy budget: mu {math.sqrt(joint):.6g} of {budget:.6g}",
                hint="fewer rounds, a larger epsilon, or a higher cap on participations",
            )
        return joint, marginal + mu.marginal * mu.marginal, count + 1

    def _accept(
        self, entry: LedgerEntry, digest: str, squares: dict[str, tuple[float, float, int]]
    ) -> LedgerEntry:
        entry = LedgerEntry(entry.round, entry.attempt, entry.mus, entry.basis, digest)
        self._entries.append(entry)
        self._charged.add((entry.round, entry.attempt))
        self._squares.update(squares)
        self._hashes.append(digest)
        return entry

    def _append(self, line: bytes) -> None:
        assert self._file is not None
        rest = line + b"\n"
        try:
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
            os.fsync(self._file.fileno())
        except OSError as error:
            # Nobody knows what reached the disk: this object charges no more, and opening it again tells.
            self.close()
            raise PrivacyError(
                f"the charge could not be made durable in {self.path}: {error.strerror}",
                hint="send nothing; make room on the disk and open the ledger again",
            ) from None

    def _mend(self, content: bytes) -> None:
        """Leave the file ending in a whole line, so that the next record starts on its own."""
        assert self._file is not None
        if self._torn:
            self._file.truncate(len(content) - len(self._torn))
            os.fsync(self._file.fileno())
        self._file.seek(0, os.SEEK_END)
        if not self._torn and not content.endswith(b"\n"):
            self._append(b"")

    def _require_known(self, client: str, *, new: bool = False) -> None:
        if not isinstance(client, str):
            raise PrivacyError(f"client {client!r}: clients are named by strings, for example '7'")
        budgets = self.header.budgets
        known = client in (self._squares if budgets is None else budgets)
        if not known and not (new and budgets is None):
            raise PrivacyError(
                f"client {client!r} is not in {self.path}", hint="see `clients` for those that are"
            )


def _lock(file: io.FileIO, path: Path) -> None:
    try:
        lock_file(file.fileno(), wait=False)
    except OSError:
        file.close()
        raise PrivacyError(
            f"{path} is in use by another process",
            hint="let it finish; only one process can charge a ledger at a time",
        ) from None


def _unreadable(path: Path, error: OSError) -> PrivacyError:
    return PrivacyError(
        f"cannot read the ledger {path}: {error.strerror}",
        hint="give the path of a ledger.jsonl; without its ledger a client does not know what it has spent",
    )
