"""The embedded store: one SQLite file, for one machine.

Write-ahead log; seatings, releases, runs and stocks are synced to disk before they are answered. Heartbeats and nonces
are written but not synced: a power failure can lose the last of them, which costs a client one heartbeat.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from niss.errors import ConfigError
from niss.protocol.prekeys import SignedPrekey
from niss.tracker.records import (
    Counts,
    Release,
    Run,
    Seating,
    SeatRequest,
    Stock,
    pack_participants,
)
from niss.tracker.sqlite_tables import (
    LAYOUT,
    choose,
    find_release,
    find_run,
    find_seating,
    held,
    is_registered,
    put,
    take,
)
from niss.tracker.store import (
    KEPT_LINKS,
    REMEMBER_LEFT,
    Store,
    let_out_before,
    seated_otherwise,
    too_few,
    unknown_run,
)

_VERSION = 1
_NONCES_BETWEEN_SWEEPS = 1000
_BUSY_SECONDS = 10.0


class SqliteStore(Store):
    """A store in one file, which only its owner can read."""

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
