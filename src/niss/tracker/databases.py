"""Where a tracker keeps its records: one SQLite file, for one machine, or one Redis server, for several processes.

SQLite: every change is one transaction that begins with `BEGIN IMMEDIATE`. It takes the write lock before it reads, so
another process on the same file waits and then sees all of the change or, after a crash, nothing of it. With the
write-ahead log, seatings, releases, runs and stocks are synced to disk before they are answered. Heartbeats and nonces
are written but not synced: a power failure can lose the last of them, which costs a client one heartbeat.

Redis: a change holds a lock, which is a key there, while it reads, and is written in one transaction together with
the end of that lock, if the lock is still its own; else it is made again. So two processes cannot hand out one prekey
or let out one link for two commitments, also where one of them slept for longer than a lock lives. Redis must write its
log before it answers (`appendfsync always`) and must not evict; `open_redis` refuses one that does otherwise.
"""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from niss.errors import ConfigError
from niss.tracker.api import Counts
from niss.tracker.store import Change, TrackerStore

T = TypeVar("T")

# Seatings are large, so records are an ordinary table with an index.
_LAYOUT = """
CREATE TABLE IF NOT EXISTS records (kind TEXT, name BLOB, value BLOB NOT NULL, PRIMARY KEY (kind, name));
CREATE TABLE IF NOT EXISTS ranks (kind TEXT, name BLOB, value REAL NOT NULL, PRIMARY KEY (kind, name)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS ranks_value ON ranks (kind, value);
"""
_VERSION = 2
_BUSY_SECONDS = 10.0


class SqliteStore(TrackerStore):
    """A store in one file, which only its owner can read.

    One connection, used by one thread at a time: the lock is held for a whole transaction, and is reentrant so that
    records can be read inside one. Counting and `ping` have a connection and a lock of their own: they may take long,
    or be asked often, and nothing else waits for them.
    """

    trouble = (sqlite3.Error, OSError)

    def __init__(self, path: str | Path, *, durable: bool = True) -> None:
        """Open the file, or make it with its tables; `ConfigError` where it cannot be used or is of another version.

        `durable=False` syncs nothing: for filling a store that can be thrown away.
        """
        self._full = "FULL" if durable else "OFF"
        self._lock, self._counting = threading.RLock(), threading.Lock()
        try:
            # Created by us, so that it never exists with wider rights than these.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600))
            self._db, self._reader = (
                sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
                for _ in range(2)
            )
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, _VERSION):
                older = f"{path} was written by another version of niss"
                raise ConfigError(older, field="--store", hint="name a new file")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.executescript(f"BEGIN IMMEDIATE; {_LAYOUT} PRAGMA user_version = {_VERSION}; COMMIT;")
            self._reader.execute("PRAGMA query_only = ON")
        except (OSError, sqlite3.Error) as error:
            hint = "name a file of yours, or a new one in an existing folder"
            raise ConfigError(f"cannot use {path} as a store: {error}", field="--store", hint=hint) from None

    def _change(self, work: Callable[[Change], T], *, synced: bool = True) -> T:
        with self._lock:
            self._db.execute(f"PRAGMA synchronous = {self._full if synced else 'NORMAL'}")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                change = Change(self._read)
                result = work(change)
                self._write("records", change.records)
                self._write("ranks", change.ranks)
                self._db.executemany(
                    "INSERT INTO ranks VALUES ('total', ?, ?) ON CONFLICT DO UPDATE SET value = value + excluded.value",
                    change.totals.items(),
                )
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")
            return result

    def _write(self, table: str, values: Mapping[tuple[str, bytes], object]) -> None:
        """Write and erase rows, inside a transaction."""
        gone = [key for key, value in values.items() if value is None]
        there = [(*key, value) for key, value in values.items() if value is not None]
        self._db.executemany(f"DELETE FROM {table} WHERE kind = ? AND name = ?", gone)
        self._db.executemany(f"INSERT OR REPLACE INTO {table} VALUES (?, ?, ?)", there)

    def _values(self, table: str, kind: str, names: Sequence[bytes]) -> list[Any]:
        query = f"SELECT value FROM {table} WHERE kind = ? AND name = ?"
        with self._lock:
            rows = [self._db.execute(query, (kind, name)).fetchone() for name in names]
        return [None if row is None else row[0] for row in rows]

    def _read(self, kind: str, names: Sequence[bytes]) -> list[bytes | None]:
        return self._values("records", kind, names)

    def _ranks(self, kind: str, names: Sequence[bytes]) -> list[float | None]:
        return self._values("ranks", kind, names)

    def _ranked(self, kind: str, *, above: float = -math.inf, below: float = math.inf) -> list[bytes]:
        query = "SELECT name FROM ranks WHERE kind = ? AND value > ? AND value < ?"
        with self._lock:
            return [name for (name,) in self._db.execute(query, (kind, above, below))]

    def counts(self, *, now: float) -> Counts:
        # With the write-ahead log a reader neither waits for a writer nor keeps one waiting.
        live = "SELECT count(*) FROM ranks WHERE kind = 'live'"
        total = "SELECT CAST(value AS INTEGER) FROM ranks WHERE kind = 'total' AND name ="
        numbers = f"({live}), ({live} AND value > ?), ({total} 'prekeys'), ({total} 'runs')"
        with self._counting:
            row = self._reader.execute(f"SELECT {numbers}", (now,)).fetchone()
        return Counts(*(number or 0 for number in row))

    def ping(self) -> None:
        with self._counting:
            self._reader.execute("SELECT 1 FROM records LIMIT 1").fetchone()

    def close(self) -> None:
        with self._lock, self._counting:
            self._reader.close()
            self._db.close()


# One hash tag: all keys of a tracker lie in one slot, so that transactions may touch several.
_PREFIX = b"niss:{tracker}:"
_TIMEOUT_SECONDS = 5.0
# How long a lock lives whose owner is gone, and how long the others wait before they look again.
_LOCK_SECONDS, _PAUSE_SECONDS = 10, 0.002
_SAFE_SETTINGS = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}


class RedisStore(TrackerStore):
    """A store in Redis, shared by any number of tracker processes with one identity.

    A record is a string under its kind and name, the ranks of a kind are a sorted set; all keys have one prefix.
    """

    def __init__(self, redis: Any, trouble: tuple[type[Exception], ...]) -> None:
        """`redis` is a connected `redis.Redis`. `ConfigError` where another version of niss has used it."""
        self._redis, self.trouble = redis, trouble
        self._turn = threading.Lock()
        used, version = self._read("about", [b"identity", b"version"])
        if used is not None and version != b"%d" % _VERSION:
            hint = "name another server or database number"
            raise ConfigError("this Redis was used by another version of niss", field="--store", hint=hint)
        self.bind("version", b"%d" % _VERSION)

    @staticmethod
    def _key(kind: str, name: bytes = b"") -> bytes:
        return _PREFIX + kind.encode() + b":" + name

    def _change(self, work: Callable[[Change], T], *, synced: bool = True) -> T:
        del synced  # The server's settings say when it writes to disk.
        mine = os.urandom(16)
        with self._turn:  # Of the threads of this process, one at a time asks for the lock.
            while True:
                while not self._redis.set(self._key("lock"), mine, nx=True, ex=_LOCK_SECONDS):
                    time.sleep(_PAUSE_SECONDS)
                change = Change(self._read)
                try:
                    result = work(change)
                except Exception:
                    if self._written(Change(self._read), mine):
                        raise
                    continue  # Others changed what it was refused for.
                if self._written(change, mine):
                    return result

    def _written(self, change: Change, mine: bytes) -> bool:
        """Write a change and end its lock at once; False, and nothing is written, where the lock is lost by now."""
        from redis import WatchError

        lock = self._key("lock")
        with self._redis.pipeline() as pipe:
            pipe.watch(lock)
            if pipe.get(lock) != mine:
                return False
            pipe.multi()
            kept = {self._key(*name): value for name, value in change.records.items() if value is not None}
            gone = [self._key(*name) for name, value in change.records.items() if value is None]
            if kept:
                pipe.mset(kept)
            pipe.delete(lock, *gone)
            for (kind, name), rank in change.ranks.items():
                key = self._key("ranks", kind.encode())
                pipe.zrem(key, name) if rank is None else pipe.zadd(key, {name: rank})
            for total, more in change.totals.items():
                pipe.incrby(self._key("total", total.encode()), more)
            try:
                pipe.execute()
            except WatchError:
                return False
        return True

    def _read(self, kind: str, names: Sequence[bytes]) -> list[bytes | None]:
        return self._redis.mget([self._key(kind, name) for name in names]) if names else []

    def _ranks(self, kind: str, names: Sequence[bytes]) -> list[float | None]:
        return self._redis.zmscore(self._key("ranks", kind.encode()), names) if names else []

    def _ranked(self, kind: str, *, above: float = -math.inf, below: float = math.inf) -> list[bytes]:
        kept = self._key("ranks", kind.encode())
        names: list[bytes] = self._redis.zrangebyscore(kept, f"({above!r}", f"({below!r}")
        return names

    def counts(self, *, now: float) -> Counts:
        live = self._key("ranks", b"live")
        with self._redis.pipeline() as pipe:
            pipe.zcard(live).zcount(live, f"({now!r}", "+inf")
            pipe.mget(self._key("total", b"prekeys"), self._key("total", b"runs"))
            registered, able, totals = pipe.execute()
        return Counts(registered, able, *(int(total or 0) for total in totals))

    def ping(self) -> None:
        self._redis.ping()

    def close(self) -> None:
        self._redis.close()


def open_redis(url: str) -> RedisStore:
    """The store behind redis://HOST:PORT/NUMBER, or rediss:// with TLS.

    Raises `ConfigError` where the package redis is missing, nothing answers at the address, or the server's settings
    allow it to forget what it answered.
    """
    try:
        import redis
    except ImportError:
        missing = "the Redis store needs the package redis"
        raise ConfigError(missing, field="--store", hint="pip install 'niss[tracker]' redis") from None
    settings = {}
    try:
        client = redis.Redis.from_url(url, socket_timeout=_TIMEOUT_SECONDS)
        client.ping()
        # A hosted Redis may not tell its settings; the guide says what they must be.
        with contextlib.suppress(redis.ResponseError):
            settings = client.config_get(*_SAFE_SETTINGS)
    except (redis.RedisError, ValueError) as error:
        away = f"cannot reach Redis: {error}"
        raise ConfigError(away, field="--store", hint="is redis-server running there?") from None
    for name, safe in _SAFE_SETTINGS.items():
        if settings.get(name, safe) != safe:
            unsafe = f"this Redis has {name} {settings[name]}: it could forget that a link was let out"
            hint = f"redis-cli config set {name} {safe}, and write it into redis.conf"
            raise ConfigError(unsafe, field="--store", hint=hint)
    return RedisStore(client, (redis.RedisError, OSError))


def sqlite_path(url: str) -> str | None:
    """The file in sqlite:///FILE; None for the address of a Redis server, `ConfigError` for anything else."""
    scheme, _, rest = url.partition("://")
    if scheme in ("redis", "rediss") and rest:
        return None
    path = rest.removeprefix("/")
    if scheme != "sqlite" or not rest.startswith("/") or not path or path.endswith("/"):
        kinds = "must be sqlite:///FILE, or redis://HOST:PORT/0 for several tracker processes"
        hint = "sqlite:///tracker.db is a file here, sqlite:////var/lib/niss/tracker.db one elsewhere"
        raise ConfigError(kinds, field="--store", hint=hint)
    return path


def open_store(url: str) -> TrackerStore:
    """The store behind sqlite:///FILE or redis://HOST:PORT/NUMBER (rediss:// with TLS).

    Raises `ConfigError` where the address is wrong or the store behind it cannot be used.
    """
    path = sqlite_path(url)
    return open_redis(url) if path is None else SqliteStore(path)
