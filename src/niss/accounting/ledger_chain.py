"""The records of a ledger file: their canonical form, and the hash chain that binds them.

A record is one line of canonical JSON (sorted keys, no spaces, ASCII). It carries `hash`, the SHA-256 of
its other fields, and, from the second record on, `previous`, the hash of the record before. Every byte of
a file is therefore checked, that of the last record too. The format is stable: ledgers of every version stay readable.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from niss.errors import ConfigError, PrivacyError
from niss.files import to_json

FORMAT = "niss-ledger/1"
# A basis says in a few words what was assumed; it is no place for data.
LONGEST_BASIS = 4096
CSV_COLUMNS = ("round", "attempt", "client", "mu_joint", "mu_marginal")


class Mu(NamedTuple):
    """What one client is charged for one upload: mu in the joint and in the marginal view."""

    joint: float
    marginal: float


@dataclass(frozen=True)
class Header:
    """What a ledger promises; its first record.

    run             whose charges these are, in words
    budgets         B_k of each client (None: nothing promised); None as a whole: any client may be charged
    delta           of every claim
    unit, relation  what is hidden, as in `Plan`
    delta_failure   the part of delta that pays for bounds that may fail, such as that on colluding neighbours;
                    mu becomes epsilon at the delta that is left
    """

    run: str
    budgets: Mapping[str, float | None] | None
    delta: float
    unit: str
    relation: str
    delta_failure: float = 0.0

    def __post_init__(self) -> None:
        if not (_is_number(self.delta) and 0.0 < self.delta < 1.0):
            raise ConfigError(f"must lie strictly between 0 and 1, not {self.delta!r}", field="delta")
        if not (_is_number(self.delta_failure) and 0.0 <= self.delta_failure < self.delta):
            raise ConfigError(
                f"must lie between 0 and delta, not {self.delta_failure!r}", field="delta_failure"
            )
        for field in ("run", "unit", "relation"):
            if not isinstance(getattr(self, field), str):
                raise ConfigError(f"must be a string, not {getattr(self, field)!r}", field=field)
        for client, budget in (self.budgets or {}).items():
            if not isinstance(client, str):
                raise ConfigError(f"client {client!r} must be named by a string", field="budgets")
            if budget is not None and not (_is_number(budget) and 0.0 < budget < math.inf):
                raise ConfigError(
                    f"client {client}: must be a finite mu above 0, or None, not {budget!r}", field="budgets"
                )

    def body(self) -> dict[str, Any]:
        """The record, without its hash."""
        budgets = self.budgets and {
            client: None if budget is None else float(budget) for client, budget in self.budgets.items()
        }
        return {
            "format": FORMAT,
            "run": self.run,
            "budgets": budgets,
            "delta": float(self.delta),
            "delta_failure": float(self.delta_failure),
            "unit": self.unit,
            "relation": self.relation,
        }


@dataclass(frozen=True)
class LedgerEntry:
    """One upload of each of these clients, charged before it left; infinite mu: no guarantee.

    round, attempt  which upload; no two charges of a ledger have the same
    mus             what it cost each client
    basis           in a few words, which worst case was charged
    hash            of the record, once it is written
    """

    round: int
    attempt: int
    mus: Mapping[str, Mu]
    basis: Mapping[str, Any]
    hash: str = ""

    def body(self, previous: str) -> dict[str, Any]:
        """The record, without its hash, after the record with the hash `previous`."""
        return {**self.to_json(), "previous": previous}

    def to_json(self) -> dict[str, Any]:
        """Plain values; null stands for an infinite mu."""
        mus = {client: {"mu_joint": mu.joint, "mu_marginal": mu.marginal} for client, mu in self.mus.items()}
        charge = {"round": self.round, "attempt": self.attempt, "mus": to_json(mus)}
        return {**charge, "basis": dict(self.basis)}


def client_order(client: str) -> tuple[int, int, str]:
    """Numbers in their own order, then names: a key for `sorted`."""
    return (0, int(client), client) if client.isdecimal() else (1, 0, client)


def charges_csv(charges: Iterable[LedgerEntry]) -> str:
    """One line per charge and client, for spreadsheets; infinite mu is written as inf."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for charge in charges:
        for client in sorted(charge.mus, key=client_order):
            mu = charge.mus[client]
            writer.writerow((charge.round, charge.attempt, client, mu.joint, mu.marginal))
    return text.getvalue()


def canonical(value: Mapping[str, Any]) -> bytes:
    """The one way to write a value down; numbers JSON does not know are refused."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.encode("ascii")


def seal(body: Mapping[str, Any]) -> tuple[bytes, str]:
    """A record's line, without its end, and its hash."""
    digest = hashlib.sha256(canonical(body)).hexdigest()
    return canonical({**body, "hash": digest}), digest


def is_whole(line: bytes) -> bool:
    """Whether these bytes are a record as `seal` wrote it."""
    return _unsealed(line) is not None


def starts_whole(tail: bytes) -> bool:
    """Whether a whole record stands at the start of these bytes, with something behind it."""
    try:
        end = json.JSONDecoder().raw_decode(tail.decode("latin-1"))[1]
    except (ValueError, RecursionError):
        return False
    return end < len(tail) and is_whole(tail[:end])


def read_header(line: bytes, where: str) -> tuple[Header, str]:
    """The header of a ledger, and its hash; `where` names the line in errors. Raises PrivacyError for any damage."""
    record = _unseal(line, where)
    if record.get("format") != FORMAT:
        raise PrivacyError(
            f"{where}: the ledger's format is {record.get('format')!r}, not {FORMAT!r}",
            hint="use the version of niss that wrote it",
        )
    budgets = record.get("budgets")
    try:
        header = Header(
            run=record["run"],
            budgets=None if budgets is None else dict(budgets),
            delta=record["delta"],
            unit=record["unit"],
            relation=record["relation"],
            delta_failure=record["delta_failure"],
        )
        as_written = seal(header.body())[0] == line
    except (KeyError, TypeError, ValueError):
        as_written = False
    if not as_written:
        raise damaged(where)
    return header, str(record["hash"])


def read_charge(line: bytes, where: str, previous: str) -> LedgerEntry:
    """One charge; refuses a record that does not follow the one with the hash `previous`."""
    record = _unseal(line, where)
    if record.get("previous") != previous:
        raise damaged(
            where, "it does not follow the line before; lines are missing, added or in another order"
        )
    try:
        mus = {
            client: Mu(_infinite(mu["mu_joint"]), _infinite(mu["mu_marginal"]))
            for client, mu in record["mus"].items()
        }
        charge = LedgerEntry(record["round"], record["attempt"], mus, record["basis"], record["hash"])
        as_written = seal(charge.body(previous))[0] == line
    except (AttributeError, KeyError, TypeError, ValueError):
        as_written = False
    if not as_written:
        raise damaged(where)
    return charge


def damaged(where: str, what: str = "the record is damaged") -> PrivacyError:
    """The error for a ledger that cannot be trusted any more."""
    return PrivacyError(
        f"{where}: {what}",
        hint="restore the ledger from a copy; what was spent is no longer known, so nothing more may be sent",
    )


def _unseal(line: bytes, where: str) -> dict[str, Any]:
    record = _unsealed(line)
    if record is None:
        raise damaged(where)
    return record


def _unsealed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line.decode("ascii"))
        if not isinstance(record, dict):
            return None
        body = {key: value for key, value in record.items() if key != "hash"}
        return record if seal(body) == (line, record.get("hash")) else None
    except (ValueError, RecursionError):
        return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _infinite(mu: float | None) -> float:
    return math.inf if mu is None else float(mu)
