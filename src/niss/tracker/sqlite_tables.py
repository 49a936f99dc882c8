"""The tables of the SQLite store, and what is read from and written to them inside a transaction."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Sequence

from niss.protocol.prekeys import SignedPrekey
from niss.tracker.records import NUMBER_BYTES, Release, Run, Seating, SeatRequest, Stock, sort_batch
from niss.tracker.store import check_stale, stock_full

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
    found = db.execute("SELECT 1 FROM clients WHERE identity = ? AND expires > 0", (identity,)).fetchone()
    return found is not None


def held(db: sqlite3.Connection, identity: bytes) -> int:
    count: int = db.execute("SELECT count(*) FROM prekeys WHERE identity = ?", (identity,)).fetchone()[0]
    return count


def put(
    db: sqlite3.Connection, identity: bytes, prekeys: Sequence[SignedPrekey], expires: float, largest: int
) -> Stock:
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
    row = db.execute(
        "SELECT rounds, salt, anchor, signature, highest FROM runs WHERE run = ?", (run,)
    ).fetchone()
    return None if row is None else Run(*row)


def find_seating(db: sqlite3.Connection, run: bytes, link: int) -> Seating | None:
    row = db.execute("SELECT asked, packed FROM seatings WHERE run = ? AND link = ?", (run, link)).fetchone()
    return None if row is None else Seating(*row)


def find_release(db: sqlite3.Connection, run: bytes, link: int) -> Release | None:
    row = db.execute(
        "SELECT commitment, neighbours FROM releases WHERE run = ? AND link = ?", (run, link)
    ).fetchone()
    return None if row is None else Release(*row)
