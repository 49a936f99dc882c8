"""The embedded store: one SQLite file, for one machine.

Write-ahead log; seatings, releases, runs and stocks are synced to disk before they are answered. Heartbeats and nonces
are written but not synced: a power failure can lose the last of them, which costs a client one heartbeat. The
functions on a connection run inside a transaction of the store.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from niss.errors import ConfigError
from niss.protocol.keys import SignedPrekey
from niss.tracker.store import (
    KEPT_LINKS,
    NUMBER_BYTES,
    REMEMBER_LEFT,
    Counts,
    Release,
    Run,
    Seating,
    SeatRequest,
    Stock,
    Store,
    check_stale,
    let_out_before,
    pack_participants,
    seated_otherwise,
    sort_batch,
    stock_full,
    too_few,
    unknown_run,
)

LAYOUT = """
CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS clients (
    identity BLOB PRIMARY KEY, expires REAL NOT NULL, highest BLOB, coalition TEXT) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS clients_live ON clients (expires);
CREATE TABLE IF NOT EXISTS prekeys (
    identity BLOB, number BLOB, packed BLOB NOT NULL, PRIMARY KEY (identity, number)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS nonces (
    identity BLOB, nonce BLOB, expires REAL NOT NULL, PRIMARY KEY (identity, nonce)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS nonces_old ON nonces (expires);
CREATE TABLE IF NOT EXISTS runs (
    run BLOB PRIMARY KEY, rounds INTEGER NOT NULL, salt BLOB NOT NULL, anchor BLOB NOT NULL,
    signature BLOB NOT NULL, highest INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS seatings (
    run BLOB, link INTEGER, asked BLOB NOT NULL, packed BLOB NOT NULL, PRIMARY KEY (run, link));
CREATE TABLE IF NOT EXISTS releases (
    run BLOB, link INTEGER, commitment BLOB NOT NULL, neighbours REAL, PRIMARY KEY (run, link)) WITHOUT ROWID;
"""


def is_registered(db: sqlite3.Connection, identity: bytes) -> bool:
    """Whether a client is registered; one that left has a negative expiry."""
    found = db.execute("SELECT 1 FROM clients WHERE identity = ? AND expires > 0", (identity,)).fetchone()
    return found is not None


def held(db: sqlite3.Connection, identity: bytes) -> int:
    """How many prekeys of a client are in stock."""
    count: int = db.execute("SELECT count(*) FROM prekeys WHERE identity = ?", (identity,)).fetchone()[0]
    return count


def put(
    db: sqlite3.Connection, identity: bytes, prekeys: Sequence[SignedPrekey], expires: float, largest: int
) -> Stock:
    """Add prekeys to a registered client's stock and make it live; what became of each is in the answer."""
    row = db.execute("SELECT highest FROM clients WHERE identity = ?", (identity,)).fetchone()
    highest = -1 if row[0] is None else int.from_bytes(row[0], "big")
    stock = frozenset(
        packed for (packed,) in db.execute("SELECT packed FROM prekeys WHERE identity = ?", (identity,))
    )
    batch = sort_batch(prekeys, stock, highest)
    check_stale(batch, len(prekeys))
    if len(stock) + len(batch.new) > largest:
        raise stock_full(largest)
    db.executemany(
        "INSERT INTO prekeys VALUES (?, ?, ?)", [(identity, one[:NUMBER_BYTES], one) for one in batch.new]
    )
    top = batch.new[-1][:NUMBER_BYTES] if batch.new else row[0]
    db.execute("UPDATE clients SET expires = ?, highest = ? WHERE identity = ?", (expires, top, identity))
    return Stock(len(stock) + len(batch.new), len(batch.new), batch.known, batch.stale)


def choose(db: sqlite3.Connection, request: SeatRequest, now: float) -> list[bytes]:
    """The live clients to be seated that have a prekey left: those named, in that order, or a random sample."""
    able = "expires > ? AND EXISTS (SELECT 1 FROM prekeys WHERE prekeys.identity = clients.identity)"
    if request.members is not None:
        query = f"SELECT 1 FROM clients WHERE identity = ? AND {able}"
        return [one for one in request.members if db.execute(query, (one, now)).fetchone() is not None]
    query, values = f"SELECT identity FROM clients WHERE {able}", [now]
    if request.coalition is not None:
        found = db.execute(f"{query} AND coalition = ?", (now, request.coalition)).fetchall()
    else:
        found = db.execute(query, values).fetchall()
    pool = [identity for (identity,) in found]
    return secrets.SystemRandom().sample(pool, min(request.count, len(pool)))


def take(db: sqlite3.Connection, identity: bytes) -> bytes:
    """The oldest prekey of a client, which leaves the stock for good."""
    number, packed = db.execute(
        "SELECT number, packed FROM prekeys WHERE identity = ? ORDER BY number LIMIT 1", (identity,)
    ).fetchone()
    db.execute("DELETE FROM prekeys WHERE identity = ? AND number = ?", (identity, number))
    taken: bytes = packed
    return taken


def find_run(db: sqlite3.Connection, run: bytes) -> Run | None:
    """A run by name, or None."""
    row = db.execute(
        "SELECT rounds, salt, anchor, signature, highest FROM runs WHERE run = ?", (run,)
    ).fetchone()
    return None if row is None else Run(*row)


def find_seating(db: sqlite3.Connection, run: bytes, link: int) -> Seating | None:
    row = db.execute("SELECT asked, packed FROM seatings WHERE run = ? AND link = ?", (run, link)).fetchone()
    return None if row is None else Seating(*row)


def find_release(db: sqlite3.Connection, run: bytes, link: int) -> Release | None:
    """The release of a link, or None while it is not out."""
    row = db.execute(
        "SELECT commitment, neighbours FROM releases WHERE run = ? AND link = ?", (run, link)
    ).fetchone()
    return None if row is None else Release(*row)


_VERSION = 1
_NONCES_BETWEEN_SWEEPS = 1000
_BUSY_SECONDS = 10.0


class SqliteStore(Store):
    """A store in one file, which only its owner can read.

    One connection, used by one thread at a time. Every change is one transaction; `BEGIN IMMEDIATE` keeps other
    processes on the same file from reading what is about to change.
    """

    trouble = (sqlite3.Error, OSError)

    def __init__(self, path: str | Path, *, durable: bool = True) -> None:
        """`durable=False` syncs nothing: for filling a store that can be thrown away."""
        self._path = Path(path)
        self._full = "FULL" if durable else "OFF"
        self._lock = threading.Lock()
        self._since_sweep = 0
        try:
            # Created by us, so that it never exists with wider rights than these.
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600))
            self._db = sqlite3.connect(
                self._path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, _VERSION):
                raise ConfigError(
                    f"{self._path} was written by another version of niss",
                    field="--store",
                    hint="name a new file",
                )
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.executescript(f"BEGIN IMMEDIATE; {LAYOUT} PRAGMA user_version = {_VERSION}; COMMIT;")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"cannot use {self._path} as a store: {error}",
                field="--store",
                hint="name a file of yours, or a new one in a folder that is there",
            ) from None

    @contextmanager
    def _changing(self, *, synced: bool = True) -> Iterator[sqlite3.Connection]:
        """One transaction: all of it or nothing, on disk when this ends if `synced`."""
        with self._lock:
            self._db.execute(f"PRAGMA synchronous = {self._full if synced else 'NORMAL'}")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def _one(self, query: str, *values: object) -> tuple[object, ...] | None:
        with self._lock:
            found: tuple[object, ...] | None = self._db.execute(query, values).fetchone()
        return found

    def bind(self, name: str, value: bytes) -> bytes:
        with self._changing() as db:
            db.execute("INSERT OR IGNORE INTO about VALUES (?, ?)", (name, value))
            bound: bytes = db.execute("SELECT value FROM about WHERE name = ?", (name,)).fetchone()[0]
        return bound

    def first_use(self, identity: bytes, nonce: bytes, *, now: float, expires: float) -> bool:
        with self._changing(synced=False) as db:
            self._since_sweep += 1
            if self._since_sweep >= _NONCES_BETWEEN_SWEEPS:
                self._since_sweep = 0
                db.execute("DELETE FROM nonces WHERE expires < ?", (now,))
            added = db.execute("INSERT OR IGNORE INTO nonces VALUES (?, ?, ?)", (identity, nonce, expires))
            return added.rowcount == 1

    def register(
        self, identity: bytes, prekeys: Sequence[SignedPrekey], *, expires: float, largest: int
    ) -> Stock:
        with self._changing() as db:
            db.execute("INSERT OR IGNORE INTO clients VALUES (?, 0, NULL, NULL)", (identity,))
            return put(db, identity, prekeys, expires, largest)

    def deposit(
        self, identity: bytes, prekeys: Sequence[SignedPrekey], *, expires: float, largest: int
    ) -> Stock | None:
        with self._changing() as db:
            if not is_registered(db, identity):
                return None
            return put(db, identity, prekeys, expires, largest)

    def beat(self, identity: bytes, *, expires: float) -> Stock | None:
        with self._changing(synced=False) as db:
            if not is_registered(db, identity):
                return None
            db.execute("UPDATE clients SET expires = ? WHERE identity = ?", (expires, identity))
            return Stock(held(db, identity))

    def leave(self, identity: bytes, *, now: float) -> bool:
        with self._changing() as db:
            if not is_registered(db, identity):
                return False
            # The row stays a while: its highest number keeps used prekeys from coming back. Below zero: left then.
            db.execute(
                "UPDATE clients SET expires = ?, coalition = NULL WHERE identity = ?", (-now, identity)
            )
            db.execute("DELETE FROM prekeys WHERE identity = ?", (identity,))
            return True

    def set_coalition(self, identity: bytes, coalition: str | None) -> bool:
        with self._changing() as db:
            if not is_registered(db, identity):
                return False
            db.execute("UPDATE clients SET coalition = ? WHERE identity = ?", (coalition, identity))
            return True

    def start_run(self, run: bytes, wanted: Run) -> Run:
        with self._changing() as db:
            db.execute(
                "INSERT OR IGNORE INTO runs VALUES (?, ?, ?, ?, ?, 0)",
                (run, wanted.rounds, wanted.salt, wanted.anchor, wanted.signature),
            )
            begun = find_run(db, run)
            assert begun is not None
            return begun

    def run(self, run: bytes) -> Run | None:
        with self._lock:
            return find_run(self._db, run)

    def seat(self, run: bytes, link: int, request: SeatRequest, *, now: float) -> Seating:
        with self._changing() as db:
            begun, seated = find_run(db, run), find_seating(db, run, link)
            if begun is None:
                raise unknown_run()
            if seated is not None:
                if seated.asked != request.asked:
                    raise seated_otherwise()
                return seated
            if link <= begun.highest:
                raise let_out_before(begun.highest)
            chosen = choose(db, request, now)
            if len(chosen) < request.at_least:
                raise too_few(len(chosen), request.at_least)
            packed = pack_participants([(identity, take(db, identity)) for identity in chosen])
            db.execute("INSERT INTO seatings VALUES (?, ?, ?, ?)", (run, link, request.asked, packed))
            return Seating(request.asked, packed)

    def seating(self, run: bytes, link: int) -> Seating | None:
        with self._lock:
            return find_seating(self._db, run, link)

    def release(self, run: bytes, link: int, wanted: Release) -> Release:
        with self._changing() as db:
            begun, before = find_run(db, run), find_release(db, run, link)
            if begun is None:
                raise unknown_run()
            if before is not None:
                return before
            if link <= begun.highest:
                raise let_out_before(begun.highest)
            db.execute(
                "INSERT INTO releases VALUES (?, ?, ?, ?)", (run, link, wanted.commitment, wanted.neighbours)
            )
            db.execute("UPDATE runs SET highest = ? WHERE run = ?", (link, run))
            db.execute("DELETE FROM seatings WHERE run = ? AND link < ?", (run, link - KEPT_LINKS))
            return wanted

    def released(self, run: bytes, link: int) -> Release | None:
        with self._lock:
            return find_release(self._db, run, link)

    def counts(self, *, now: float) -> Counts:
        row = self._one(
            "SELECT (SELECT count(*) FROM clients WHERE expires > 0), "
            "(SELECT count(*) FROM clients WHERE expires > ?), "
            "(SELECT count(*) FROM prekeys), (SELECT count(*) FROM runs)",
            now,
        )
        assert row is not None
        return Counts(*(int(str(value)) for value in row))

    def forget(self, *, before: float) -> int:
        with self._changing() as db:
            old = "SELECT identity FROM clients WHERE expires > 0 AND expires < ?"
            db.execute(f"DELETE FROM prekeys WHERE identity IN ({old})", (before,))
            db.execute("DELETE FROM clients WHERE expires < 0 AND -expires < ?", (before - REMEMBER_LEFT,))
            return db.execute("DELETE FROM clients WHERE expires > 0 AND expires < ?", (before,)).rowcount

    def ping(self) -> None:
        self._one("SELECT 1 FROM about LIMIT 1")

    def close(self) -> None:
        with self._lock:
            self._db.close()
