"""The embedded store: one SQLite file, for one machine.

Every change is one transaction that begins with `BEGIN IMMEDIATE`: it takes the write lock before it reads, so another
process on the same file waits and then sees all of the change or, after a crash, nothing of it. With the write-ahead
log, seatings, releases, runs and stocks are synced to disk before they are answered. Heartbeats and nonces are written
but not synced: a power failure can lose the last of them, which costs a client one heartbeat.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from niss.errors import ConfigError
from niss.tracker.store import Batch, Counts, Release, Run, Seating, SeatRequest, Stock, TrackerStore

# Prekey numbers are blobs of 8 bytes, since SQLite's integers end at 2^63. A client that left has a negative expiry.
_LAYOUT = """
CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS clients (
    identity BLOB PRIMARY KEY, expires REAL NOT NULL, highest BLOB, coalition TEXT) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS clients_live ON clients (expires);
CREATE TABLE IF NOT EXISTS prekeys (
    identity BLOB, number BLOB, packed BLOB NOT NULL, PRIMARY KEY (identity, number)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS prekeys_public ON prekeys (substr(packed, 9, 32));
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

_VERSION = 1
_NONCES_BETWEEN_SWEEPS = 1000
_BUSY_SECONDS = 10.0


class SqliteStore(TrackerStore):
    """A store in one file, which only its owner can read.

    What each method guarantees is said in `TrackerStore`. One connection, used by one thread at a time: the lock is
    held for a whole transaction, and is reentrant so that the reading methods can be used inside one. Counting and
    `ping` have a connection and a lock of their own: they may take long, or be asked often, and nothing else waits for
    them.
    """

    trouble = (sqlite3.Error, OSError)

    def __init__(self, path: str | Path, *, durable: bool = True) -> None:
        """Open the file, or make it with its tables; `ConfigError` where it cannot be used or is of another version.

        `durable=False` syncs nothing: for filling a store that can be thrown away.
        """
        self._full = "FULL" if durable else "OFF"
        self._lock, self._counting = threading.RLock(), threading.Lock()
        self._since_sweep = 0
        try:
            # Created by us, so that it never exists with wider rights than these.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600))
            self._db, self._reader = (
                sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
                for _ in range(2)
            )
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, _VERSION):
                raise ConfigError(
                    f"{path} was written by another version of niss", field="--store", hint="name a new file"
                )
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.executescript(f"BEGIN IMMEDIATE; {_LAYOUT} PRAGMA user_version = {_VERSION}; COMMIT;")
            self._reader.execute("PRAGMA query_only = ON")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"cannot use {path} as a store: {error}",
                field="--store",
                hint="name a file of yours, or a new one in an existing folder",
            ) from None

    @contextmanager
    def _changing(self, *, synced: bool = True) -> Iterator[sqlite3.Connection]:
        """One transaction: all of it or, where an exception leaves it, nothing; on disk when this ends if `synced`."""
        with self._lock:
            self._db.execute(f"PRAGMA synchronous = {self._full if synced else 'NORMAL'}")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def _row(self, query: str, *values: object) -> Any:
        """The first row of the answer, or None."""
        with self._lock:
            return self._db.execute(query, values).fetchone()

    def _look(self, query: str, *values: object) -> Any:
        """The first row of the answer as it stood before any transaction that is under way."""
        with self._counting:
            return self._reader.execute(query, values).fetchone()

    def bind(self, name: str, value: bytes) -> bytes:
        with self._changing() as db:
            db.execute("INSERT OR IGNORE INTO about VALUES (?, ?)", (name, value))
            bound: bytes = self._row("SELECT value FROM about WHERE name = ?", name)[0]
        return bound

    def first_use(self, identity: bytes, nonce: bytes, *, now: float, expires: float) -> bool:
        with self._changing(synced=False) as db:
            self._since_sweep += 1
            if self._since_sweep >= _NONCES_BETWEEN_SWEEPS:
                self._since_sweep = 0
                db.execute("DELETE FROM nonces WHERE expires < ?", (now,))
            added = db.execute("INSERT OR IGNORE INTO nonces VALUES (?, ?, ?)", (identity, nonce, expires))
            return added.rowcount == 1

    def _add(
        self, identity: bytes, prekeys: Batch, expires: float, largest: int, *, newcomer: bool
    ) -> Stock | None:
        with self._changing() as db:
            if newcomer:
                db.execute("INSERT OR IGNORE INTO clients VALUES (?, 0, NULL, NULL)", (identity,))
            client = self._row("SELECT expires, highest FROM clients WHERE identity = ?", identity)
            if not newcomer and (client is None or client[0] <= 0):
                return None
            rows = db.execute("SELECT packed FROM prekeys WHERE identity = ?", (identity,))
            held = frozenset(packed for (packed,) in rows)
            new, stock = self._sort_batch(prekeys, held, client[1], largest)
            for packed in new.values():
                held_by = (
                    "SELECT 1 FROM prekeys WHERE substr(packed, 9, 32) = substr(?, 9, 32) AND identity != ?"
                )
                if self._row(held_by, packed, identity) is not None:
                    raise self._copied()
            db.executemany("INSERT INTO prekeys VALUES (?, ?, ?)", [(identity, *one) for one in new.items()])
            values = (expires, max(new, default=client[1]), identity)
            db.execute("UPDATE clients SET expires = ?, highest = ? WHERE identity = ?", values)
            return stock

    def beat(self, identity: bytes, *, expires: float) -> Stock | None:
        with self._changing(synced=False):
            if not self._update(identity, "expires = ?", expires):
                return None
            return Stock(self._row("SELECT count(*) FROM prekeys WHERE identity = ?", identity)[0])

    def leave(self, identity: bytes, *, now: float) -> bool:
        with self._changing() as db:
            # The row stays a while: its highest number keeps used prekeys from coming back. Below zero: left then.
            if not self._update(identity, "expires = ?, coalition = NULL", -now):
                return False
            db.execute("DELETE FROM prekeys WHERE identity = ?", (identity,))
            return True

    def set_coalition(self, identity: bytes, coalition: str | None) -> bool:
        with self._changing():
            return self._update(identity, "coalition = ?", coalition)

    def _update(self, identity: bytes, change: str, value: object) -> bool:
        """Change the row of a client inside a transaction; False if it is not registered, or has left."""
        query = f"UPDATE clients SET {change} WHERE identity = ? AND expires > 0"
        return self._db.execute(query, (value, identity)).rowcount == 1

    def start_run(self, run: bytes, wanted: Run) -> Run:
        with self._changing() as db:
            db.execute(
                "INSERT OR IGNORE INTO runs VALUES (?, ?, ?, ?, ?, 0)",
                (run, wanted.rounds, wanted.salt, wanted.anchor, wanted.signature),
            )
            started = self.run(run)
            assert started is not None
            return started

    def run(self, run: bytes) -> Run | None:
        row = self._row("SELECT rounds, salt, anchor, signature, highest FROM runs WHERE run = ?", run)
        return None if row is None else Run(*row)

    def _seat(self, run: bytes, link: int, request: SeatRequest, now: float) -> Seating:
        with self._changing() as db:
            seating = self.seating(run, link)
            if seating is not None:
                return seating
            self._check_turn(run, link)
            chosen = self._choose(request, now)
            if len(chosen) < request.at_least:
                raise self._too_few(len(chosen), request)
            packed = b"".join(identity + self._take(identity) for identity in chosen)
            db.execute("INSERT INTO seatings VALUES (?, ?, ?, ?)", (run, link, request.hash, packed))
            return Seating(request.hash, packed)

    def _check_turn(self, run: bytes, link: int) -> None:
        """Refuse a run that has not started, and a link that is not above all that were let out."""
        started = self.run(run)
        if started is None or link <= started.highest:
            raise self._over(None if started is None else started.highest)

    def _choose(self, request: SeatRequest, now: float) -> list[bytes]:
        """The live clients to be seated that have a prekey left: those named, in that order, or a random sample."""
        able = (
            "SELECT identity FROM clients WHERE expires > ?1 "
            "AND EXISTS (SELECT 1 FROM prekeys WHERE prekeys.identity = clients.identity)"
        )
        if request.members is not None:
            named = f"{able} AND identity = ?2"
            return [one for one in request.members if self._row(named, now, one) is not None]
        drawn_from = f"{able} AND (?2 IS NULL OR coalition = ?2)"
        pool = [identity for (identity,) in self._db.execute(drawn_from, (now, request.coalition))]
        return secrets.SystemRandom().sample(pool, min(request.count, len(pool)))

    def _take(self, identity: bytes) -> bytes:
        """The oldest prekey of a client, which leaves the stock for good."""
        number, packed = self._row(
            "SELECT number, packed FROM prekeys WHERE identity = ? ORDER BY number LIMIT 1", identity
        )
        self._db.execute("DELETE FROM prekeys WHERE identity = ? AND number = ?", (identity, number))
        taken: bytes = packed
        return taken

    def seating(self, run: bytes, link: int) -> Seating | None:
        row = self._row("SELECT asked, packed FROM seatings WHERE run = ? AND link = ?", run, link)
        return None if row is None else Seating(*row)

    def release(self, run: bytes, link: int, wanted: Release) -> Release:
        with self._changing() as db:
            earlier = self.released(run, link)
            if earlier is not None:
                return earlier
            self._check_turn(run, link)
            db.execute(
                "INSERT INTO releases VALUES (?, ?, ?, ?)", (run, link, wanted.commitment, wanted.neighbours)
            )
            db.execute("UPDATE runs SET highest = ? WHERE run = ?", (link, run))
            db.execute("DELETE FROM seatings WHERE run = ? AND link < ?", (run, link - self.KEPT_LINKS))
            return wanted

    def released(self, run: bytes, link: int) -> Release | None:
        row = self._row("SELECT commitment, neighbours FROM releases WHERE run = ? AND link = ?", run, link)
        return None if row is None else Release(*row)

    def counts(self, *, now: float) -> Counts:
        # With the write-ahead log a reader neither waits for a writer nor keeps one waiting.
        return Counts(
            *self._look(
                "SELECT (SELECT count(*) FROM clients WHERE expires > 0), "
                "(SELECT count(*) FROM clients WHERE expires > ?), "
                "(SELECT count(*) FROM prekeys), (SELECT count(*) FROM runs)",
                now,
            )
        )

    def forget(self, *, before: float) -> int:
        # Those who left are erased here too, once their highest prekey number need not be remembered any more.
        with self._changing() as db:
            old = "SELECT identity FROM clients WHERE expires > 0 AND expires < ?"
            db.execute(f"DELETE FROM prekeys WHERE identity IN ({old})", (before,))
            db.execute(
                "DELETE FROM clients WHERE expires < 0 AND -expires < ?", (before - self.REMEMBER_LEFT,)
            )
            return db.execute("DELETE FROM clients WHERE expires > 0 AND expires < ?", (before,)).rowcount

    def ping(self) -> None:
        self._look("SELECT 1 FROM about LIMIT 1")

    def close(self) -> None:
        with self._lock, self._counting:
            self._reader.close()
            self._db.close()
