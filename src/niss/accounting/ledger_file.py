"""The durable privacy filter: what each client spent, on disk before anything is sent.

With `B_k` fixed in the header, a charge that would bring client k to `sum of mu^2 > B_k^2` is refused, so
whatever the server asks for, adaptively, the run is B_k-GDP towards k: the budget is the claim, the running
total is only "spent". Where records are hidden B_k is a multiset of slots, and a charge that no free one covers is
refused (`niss.mechanism.slots`); which slot it takes follows from the charges before it. A charge is on disk (fsync)
before `charge` returns; send afterwards, never before, and leave aborted and lost rounds charged.

A record is one line of canonical JSON (sorted keys, no spaces, ASCII): a `LedgerHeader`, then a `LedgerEntry` for each
round charged. It carries `hash`, the SHA-256 of its other fields, and, from the second record on, `previous`, the hash
of the record before. Every byte of a file is therefore checked, that of the last record too. A file of another format
is refused by its name.

What the file itself shows: a changed byte, a line lost, added or moved within it. What it cannot show: lines
cut off its end, or a file written anew from its start, since the chain has no secret. Keep `head` somewhere
else and pass it to `open` as `expected_head`; a ledger that lost that record is refused.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from niss.accounting.ledger import (
    FORMAT,
    Amount,
    Charge,
    LedgerEntry,
    LedgerHeader,
    client_order,
    epsilon_of,
    fits,
    overspent,
    slot_taken,
)
from niss.checks import require_whole
from niss.errors import ConfigError, PrivacyError
from niss.files import lock_file, sync_folder, to_json
from niss.mechanism import Slots

# A basis says in a few words what was assumed; it is no place for data.
LONGEST_BASIS = 4096
_NOTHING: tuple[Any, Any, int, Slots] = (0.0, 0.0, 0, Slots())
CSV_COLUMNS = ("round", "attempt", "client", "mu_joint", "mu_marginal")


class LedgerFile:
    """The ledger of one or more clients in one append-only file; make one with `create`, `open` or `read`."""

    def __init__(self, path: Path, header: LedgerHeader, head: str, file: io.FileIO | None) -> None:
        self.path = path
        self.header = header
        self._hashes = [head]
        self._file = file
        self._entries: list[LedgerEntry] = []
        self._charged: set[tuple[int, int]] = set()
        self._torn: bytes = b""
        # Of each that was charged: mu^2 in the joint and in the marginal view, how many uploads were, and their slots.
        self._spent: dict[str, tuple[Any, Any, int, Slots]] = {}

    @classmethod
    def create(cls, path: str | Path, header: LedgerHeader) -> LedgerFile:
        """A new ledger that promises so much, locked for charging; raises PrivacyError for a path that exists."""
        path = Path(path)
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
        if self.header.numbered is not None:
            return tuple(map(str, range(self.header.numbered)))
        return tuple(sorted({*(self.header.budgets or ()), *self._spent}, key=client_order))

    @property
    def charged(self) -> tuple[str, ...]:
        """Those that were charged: of a million clients, maybe some thousands."""
        return tuple(sorted(self._spent, key=client_order))

    @property
    def head(self) -> str:
        """The hash of the last record, which commits to all before it."""
        return self._hashes[-1]

    @property
    def torn(self) -> bytes:
        """The part of a last line that a crash left behind, cut off when the file was opened; else empty."""
        return self._torn

    def budget(self, client: str) -> Amount | None:
        """B_k, which is the claim (mu, or slots); None where nothing was promised."""
        self._require_known(client)
        return self.header.budget(client)

    def spent(self, client: str) -> Amount:
        """What all charges so far come to: mu, `sqrt(sum of mu^2)`, infinite after one without noise; or slots."""
        self._require_known(client)
        spent = self._spent.get(client, _NOTHING)
        return spent[3] if self.header.unit == "record" else math.sqrt(spent[0])

    def spent_alone(self, client: str) -> float:
        """mu of all uploads so far, each looked at alone: the marginal view."""
        self._require_known(client)
        return math.sqrt(self._spent.get(client, _NOTHING)[1])

    def participations(self, client: str) -> int:
        """How many uploads were charged to a client."""
        self._require_known(client)
        return self._spent.get(client, _NOTHING)[2]

    def epsilon(self, amount: Amount | None) -> float | None:
        """What was spent or promised here as epsilon at its delta; None stands for none, or for no finite one."""
        left = self.header.delta - self.header.delta_failure
        epsilon = math.inf if amount is None else epsilon_of(amount, left)
        return epsilon if math.isfinite(epsilon) else None

    def charge(
        self,
        round: int,
        attempt: int,
        charges: Mapping[str, Charge],
        basis: Mapping[str, Any] | None = None,
    ) -> LedgerEntry:
        """Charge one upload to each client; on disk before this returns. Send afterwards, never before.

        round, attempt  which upload this is
        charges         of each client
        basis           in a few words, which worst case was charged

        A charge is refused whole (PrivacyError), and nothing is written, if any client would overspend, is unknown,
        or if this round and attempt were charged before; so is a charge of another unit.
        """
        if self._file is None:
            raise PrivacyError(
                f"{self.path} is closed, or open for reading only", hint="open it with LedgerFile.open"
            )
        plain = {
            client: Charge(float(charge.mu2), float(charge.marginal_mu2), charge.slot, charge.grid_delta)
            for client, charge in charges.items()
        }
        entry = LedgerEntry(round, attempt, plain, dict(basis or {}))
        self._check(entry)
        line, digest = seal(entry.body(self.head))
        self._append(line)
        return self._accept(replace(entry, hash=digest))

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """One for each charge of each client, with what `CSV_COLUMNS` names."""
        for entry in self._entries:
            for client in sorted(entry.charges, key=client_order):
                charge = entry.charges[client]
                yield entry.round, entry.attempt, client, charge.joint, charge.marginal

    def to_json(self) -> dict[str, Any]:
        """Header, totals and charges as plain values; null where there is no finite number."""
        header = {name: value for name, value in self.header.body().items() if name != "budgets"}
        return {
            **header,
            "head": self.head,
            "torn_bytes": len(self.torn),
            "clients": [self._client_json(client) for client in self.clients],
            "entries": [{**entry.to_json(), "hash": entry.hash} for entry in self._entries],
        }

    def _client_json(self, client: str) -> dict[str, Any]:
        value: dict[str, Any] = {"client": client, "participations": self.participations(client)}
        amounts: dict[str, Amount | None] = {"spent": self.spent(client), "claim": self.budget(client)}
        if self.header.unit != "record":  # There the marginal view would need slots of its own.
            amounts["spent_marginal"] = self.spent_alone(client)
        for name, amount in amounts.items():
            shown = {f"slots_{name}": amount.rounds} if isinstance(amount, Slots) else {f"mu_{name}": amount}
            value |= {**to_json(shown), f"epsilon_{name}": self.epsilon(amount)}
        return value

    def close(self) -> None:
        """Give the file and its lock back; what was charged stays readable."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @classmethod
    def _verified(
        cls, path: Path, content: bytes, file: io.FileIO | None, expected_head: str | None
    ) -> LedgerFile:
        *lines, tail = content.split(b"\n")
        torn = b""
        if _unsealed(tail) is not None:
            # All of the record is there but its end of line: count it, which is the safe side.
            lines.append(tail)
        elif _starts_whole(tail):
            raise _damaged(f"{path}, line {len(lines) + 1}", "the end of the line is damaged")
        else:
            torn = tail
        if not lines:
            raise PrivacyError(
                f"{path} is not a ledger: it has no header",
                hint="if its creation was interrupted, nothing was charged: delete it and create it again",
            )
        ledger = cls(path, *_read_header(lines[0], f"{path}, line 1"), file)
        for number, line in enumerate(lines[1:], start=2):
            where = f"{path}, line {number}"
            entry = _read_entry(line, where, ledger.head)
            try:
                ledger._check(entry)
            except PrivacyError as error:
                raise _damaged(where, error.message) from None
            ledger._accept(entry)
        ledger._torn = torn
        if expected_head is not None and expected_head not in ledger._hashes:
            raise _damaged(
                str(path), f"the record {expected_head[:12]}... kept as its head is no longer in it"
            )
        return ledger

    def _check(self, entry: LedgerEntry) -> None:
        """Refuse an entry that is not allowed; the same checks for a new one and one that is read."""
        try:
            for field in ("round", "attempt"):
                require_whole(getattr(entry, field), field=field, at_least=0)
            too_long = len(_canonical(entry.basis)) > LONGEST_BASIS
        except ConfigError as error:
            raise PrivacyError(error.message) from None
        except (TypeError, ValueError) as error:
            raise PrivacyError(
                f"basis: {error}", hint="use strings, whole numbers and finite numbers"
            ) from None
        if too_long:
            raise PrivacyError(
                f"basis: longer than {LONGEST_BASIS} bytes", hint="name the worst case and leave out the data"
            )
        if (entry.round, entry.attempt) in self._charged:
            raise PrivacyError(
                f"round {entry.round}, attempt {entry.attempt}, was charged before",
                hint="a round is answered once; charge a repetition as a new attempt",
            )
        if not entry.charges:
            raise PrivacyError("charges: at least one client must be named")
        for client, charge in entry.charges.items():
            self._require_known(client, new=True)
            charge.require_unit(self.header.unit)
            grid = charge.grid_delta
            if not (charge.mu2 >= 0.0 and charge.marginal_mu2 >= 0.0 and 0.0 <= (grid or 0.0) < math.inf):
                raise PrivacyError(f"charges[{client}]: must be numbers of at least 0, not {charge!r}")
            budget, (joint, _, _, taken) = self.header.budget(client), self._spent.get(client, _NOTHING)
            if isinstance(budget, Slots):
                if slot_taken(charge, taken, budget) is None:
                    raise overspent(client, taken, charge, budget)
            elif budget is not None and not fits(joint + charge.mu2, budget):
                raise overspent(client, math.sqrt(joint), charge, budget)

    def _accept(self, entry: LedgerEntry) -> LedgerEntry:
        for client, charge in entry.charges.items():
            joint, marginal, count, taken = self._spent.get(client, _NOTHING)
            if charge.slot is not None:
                taken = taken.plus(slot_taken(charge, taken, self.header.budget(client)))
            self._spent[client] = (joint + charge.mu2, marginal + charge.marginal_mu2, count + 1, taken)
        self._entries.append(entry)
        self._charged.add((entry.round, entry.attempt))
        self._hashes.append(entry.hash)
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
        if not (client in self._spent or self.header.names(client) or (new and self.header.allows(client))):
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


def _damaged(where: str, what: str = "the record is damaged") -> PrivacyError:
    """The error for a ledger that cannot be trusted any more."""
    return PrivacyError(
        f"{where}: {what}",
        hint="restore the ledger from a copy; what was spent is no longer known, so nothing more may be sent",
    )


def _canonical(value: Mapping[str, Any]) -> bytes:
    """The one way to write a value down; numbers JSON does not know are refused."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.encode("ascii")


def seal(body: Mapping[str, Any]) -> tuple[bytes, str]:
    """A record's line, without its end, and its hash."""
    digest = hashlib.sha256(_canonical(body)).hexdigest()
    return _canonical({**body, "hash": digest}), digest


def _unsealed(line: bytes) -> dict[str, Any] | None:
    """The record in a line as `seal` wrote it, with its hash; None where it is none."""
    try:
        record = json.loads(line.decode("ascii"))
        if not isinstance(record, dict):
            return None
        body = {key: value for key, value in record.items() if key != "hash"}
        return record if seal(body) == (line, record.get("hash")) else None
    except (ValueError, RecursionError):
        return None


def _starts_whole(tail: bytes) -> bool:
    """Whether a whole record stands at the start of these bytes, with something behind it."""
    try:
        end = json.JSONDecoder().raw_decode(tail.decode("latin-1"))[1]
    except (ValueError, RecursionError):
        return False
    return end < len(tail) and _unsealed(tail[:end]) is not None


def _read_header(line: bytes, where: str) -> tuple[LedgerHeader, str]:
    """The header of a ledger, and its hash; `where` names the line in errors. Raises PrivacyError for any damage."""
    record = _unsealed(line)
    if record is None:
        raise _damaged(where)
    digest, name = str(record.pop("hash")), record.pop("format", None)
    if name != FORMAT:
        raise PrivacyError(
            f"{where}: the ledger's format is {name!r}, not {FORMAT!r}",
            hint="use the version of niss that wrote it",
        )
    try:
        header = LedgerHeader(**record)
        as_written = seal(header.body())[0] == line
    except (AttributeError, TypeError, ValueError):
        as_written = False
    if not as_written:
        raise _damaged(where)
    return header, digest


def _read_entry(line: bytes, where: str, previous: str) -> LedgerEntry:
    """One entry; refuses a record that does not follow the one with the hash `previous`."""
    record = _unsealed(line)
    if record is None:
        raise _damaged(where)
    if record.pop("previous", None) != previous:
        raise _damaged(
            where, "it does not follow the line before; lines are missing, added or in another order"
        )
    try:
        each = record.pop("each")
        charges = {
            client: Charge(
                **{
                    name: _read_value(name, value)
                    for name, value in (
                        each | (charge if isinstance(charge, dict) else {"mu2": charge})
                    ).items()
                }
            )
            for client, charge in record.pop("charges").items()
        }
        entry = LedgerEntry(charges=charges, **record)
        as_written = seal(entry.body(previous))[0] == line
    except (AttributeError, KeyError, TypeError, ValueError):
        as_written = False
    if not as_written:
        raise _damaged(where)
    return entry


def _read_value(name: str, value: Any) -> Any:
    if name == "slot":
        return tuple(value)
    return math.inf if value is None else float(value)
