"""The shared store: one Redis server, for several tracker processes.

Whatever hangs together is a single Lua script, which Redis runs in one piece between other requests. So two processes
cannot hand out one prekey or let out one link for two commitments. Redis must write its log before it answers
(`appendfsync always`) and must not evict; `connect` refuses one that does otherwise.
"""

from __future__ import annotations

import contextlib
import secrets
import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from niss.errors import ConfigError
from niss.tracker.store import Batch, Counts, Release, Run, Seating, SeatRequest, Stock, TrackerStore

# Seat an attempt with those candidates who are live and have a prekey left, and take the first prekey of each.
# KEYS: run, seatings, live, number of prekeys, public keys in stock.
# ARGV: link, hash of the request, now, at least, at most, prefix of stocks, candidates...
# Answers 'seated' and the record, 'few' and how many there are, or 'over' and the highest link (none: no such run).
_SEAT = """
local before = redis.call('HGET', KEYS[2], ARGV[1])
if before then return {'seated', before} end
local highest = redis.call('HGET', KEYS[1], 'highest')
if not highest or tonumber(ARGV[1]) <= tonumber(highest) then return {'over', highest} end
local chosen = {}
for place = 7, #ARGV do
    if #chosen >= tonumber(ARGV[5]) then break end
    local one = ARGV[place]
    local expires = redis.call('ZSCORE', KEYS[3], one)
    if expires and tonumber(expires) > tonumber(ARGV[3])
            and redis.call('EXISTS', ARGV[6] .. one) == 1 then
        chosen[#chosen + 1] = one
    end
end
if #chosen < tonumber(ARGV[4]) then return {'few', tostring(#chosen)} end
local parts = {ARGV[2]}
for _, one in ipairs(chosen) do
    local key = redis.call('LPOP', ARGV[6] .. one)
    redis.call('SREM', KEYS[5], string.sub(key, 9, 40))
    parts[#parts + 1] = one
    parts[#parts + 1] = key
end
redis.call('DECRBY', KEYS[4], #chosen)
local record = table.concat(parts)
redis.call('HSET', KEYS[2], ARGV[1], record)
return {'seated', record}
"""

# Let out a link and erase the seatings that are too old to be kept.
# KEYS: run, releases, seatings. ARGV: link, record, oldest seating that is kept.
# Answers 'out' and the record under which the link is out, or 'over' as above.
_RELEASE = """
local before = redis.call('HGET', KEYS[2], ARGV[1])
if before then return {'out', before} end
local highest = redis.call('HGET', KEYS[1], 'highest')
if not highest or tonumber(ARGV[1]) <= tonumber(highest) then return {'over', highest} end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
redis.call('HSET', KEYS[1], 'highest', ARGV[1])
for _, link in ipairs(redis.call('HKEYS', KEYS[3])) do
    if tonumber(link) < tonumber(ARGV[3]) then redis.call('HDEL', KEYS[3], link) end
end
return {'out', ARGV[2]}
"""

# Begin a run, unless it has begun. KEYS: run, number of runs. ARGV: rounds, salt, anchor, signature.
_START = """
if redis.call('EXISTS', KEYS[1]) == 0 then
    redis.call('HSET', KEYS[1], 'rounds', ARGV[1], 'salt', ARGV[2], 'anchor', ARGV[3],
               'signature', ARGV[4], 'highest', '0')
    redis.call('INCR', KEYS[2])
end
return 1
"""

# Put new prekeys into a stock and make their owner live.
# KEYS: live, stock, highest, number of prekeys, public keys in stock.
# ARGV: identity, expires, whether it may be new ('1'), the highest number that the new ones were sorted by, new ones...
# Answers 'added' and how many are held, 'gone' for one who is not registered, 'copied' where another client has such a
# key, 'again' where the highest number is another by now.
_ADD = """
if ARGV[3] ~= '1' and not redis.call('ZSCORE', KEYS[1], ARGV[1]) then return {'gone'} end
if (redis.call('GET', KEYS[3]) or '') ~= ARGV[4] then return {'again'} end
for place = 5, #ARGV do
    if redis.call('SISMEMBER', KEYS[5], string.sub(ARGV[place], 9, 40)) == 1 then return {'copied'} end
end
for place = 5, #ARGV do
    redis.call('RPUSH', KEYS[2], ARGV[place])
    redis.call('SADD', KEYS[5], string.sub(ARGV[place], 9, 40))
    redis.call('SET', KEYS[3], string.sub(ARGV[place], 1, 8))
    redis.call('INCR', KEYS[4])
end
redis.call('ZADD', KEYS[1], ARGV[2], ARGV[1])
return {'added', redis.call('LLEN', KEYS[2])}
"""

# Put a registered client into one coalition, or with an empty name into none; 0 where it is not registered.
# KEYS: live, coalition of the client. ARGV: identity, coalition, prefix of coalitions.
_JOIN = """
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) then return 0 end
local before = redis.call('GET', KEYS[2])
if before then redis.call('SREM', ARGV[3] .. before, ARGV[1]) end
redis.call('DEL', KEYS[2])
if ARGV[2] ~= '' then
    redis.call('SET', KEYS[2], ARGV[2])
    redis.call('SADD', ARGV[3] .. ARGV[2], ARGV[1])
end
return 1
"""

# Erase a client's stock and coalition; its highest number is kept for a while, so that used prekeys do not come back.
# KEYS: live, number of prekeys, public keys in stock, stock, coalition of the client, highest.
# ARGV: identity, prefix of coalitions, seconds for which the highest number is kept. 0 where it is not registered.
_LEAVE = """
for _, key in ipairs(redis.call('LRANGE', KEYS[4], 0, -1)) do
    redis.call('SREM', KEYS[3], string.sub(key, 9, 40))
    redis.call('DECR', KEYS[2])
end
local before = redis.call('GET', KEYS[5])
if before then redis.call('SREM', ARGV[2] .. before, ARGV[1]) end
redis.call('DEL', KEYS[4], KEYS[5])
redis.call('EXPIRE', KEYS[6], ARGV[3])
return redis.call('ZREM', KEYS[1], ARGV[1])
"""

# One hash tag: all keys of a tracker lie in one slot, so that scripts and transactions may touch several.
_PREFIX = b"niss:{tracker}:"
_TIMEOUT_SECONDS = 5.0
_VERSION = b"1"
_SAFE_SETTINGS = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}


class RedisStore(TrackerStore):
    """A store in Redis, shared by any number of tracker processes with one identity.

    Keys, all below one prefix:

    live            a sorted set of the registered clients, by the time they expire
    stock           a list for each client: its packed prekeys, the oldest first
    highest         for each client: the highest prekey number ever taken
    coalition-of    for each client: its coalition; `coalition` is the set of the clients of each
    run             a hash for each run: its chain and the highest link let out
    seatings        a hash for each run: by link, the hash of the request and the packed list
    releases        a hash for each run: by link, what `_release_record` makes of it
    nonce           for each identity and nonce that was used; they expire by themselves
    about           facts about the tracker, by name
    prekeys, runs   how many there are
    publics         the public keys of all prekeys in stock
    """

    def __init__(self, redis: Any, *, trouble: tuple[type[Exception], ...], prefix: bytes = _PREFIX) -> None:
        """`redis` is a connected `redis.Redis`; `prefix` keeps several stores on one server apart."""
        self._redis, self.trouble = redis, trouble
        self._prefix = prefix
        self._run_seat, self._run_release, self._run_start = map(
            redis.register_script, (_SEAT, _RELEASE, _START)
        )
        self._run_add, self._run_join, self._run_leave = map(redis.register_script, (_ADD, _JOIN, _LEAVE))

    @classmethod
    def connect(cls, url: str) -> RedisStore:
        """The store behind redis://HOST:PORT/NUMBER, or rediss:// with TLS.

        Raises `ConfigError` where the package redis is missing, nothing answers at the address, or the server's
        settings allow it to forget what it answered.
        """
        try:
            import redis
        except ImportError:
            raise ConfigError(
                "the Redis store needs the package redis",
                field="--store",
                hint="pip install 'niss[tracker]' redis",
            ) from None
        try:
            client = redis.Redis.from_url(url, socket_timeout=_TIMEOUT_SECONDS)
            client.ping()
        except (redis.RedisError, ValueError) as error:
            raise ConfigError(
                f"cannot reach Redis: {error}", field="--store", hint="is redis-server running there?"
            ) from None
        # A hosted Redis may not tell its settings; the guide says what they must be.
        with contextlib.suppress(redis.ResponseError):
            _check_settings(client.config_get(*_SAFE_SETTINGS))
        store = cls(client, trouble=(redis.RedisError, OSError))
        store._check_version()
        return store

    def _check_version(self) -> None:
        """Refuse what another version of niss has used; a new store is marked as this one's."""
        used, version = self._redis.mget(self._key("about", b"identity"), self._key("about", b"version"))
        if used is not None and version != _VERSION:
            raise ConfigError(
                "this Redis was written to by another version of niss",
                field="--store",
                hint="name another server or database number",
            )
        self.bind("version", _VERSION)

    def _key(self, kind: str, name: bytes = b"") -> bytes:
        return self._prefix + kind.encode() + b":" + name

    def bind(self, name: str, value: bytes) -> bytes:
        key = self._key("about", name.encode())
        self._redis.set(key, value, nx=True)
        bound: bytes = self._redis.get(key)
        return bound

    def first_use(self, identity: bytes, nonce: bytes, *, now: float, expires: float) -> bool:
        left = max(1, int(1000 * (expires - now)))
        return bool(self._redis.set(self._key("nonce", identity + nonce), b"1", nx=True, px=left))

    def _add(
        self, identity: bytes, prekeys: Batch, expires: float, largest: int, *, newcomer: bool
    ) -> Stock | None:
        live, stock_key, highest_key = (
            self._key(*name) for name in (("live",), ("stock", identity), ("highest", identity))
        )
        keys = [live, stock_key, highest_key, self._key("prekeys"), self._key("publics")]
        outcome = b"again"
        while outcome == b"again":
            with self._redis.pipeline() as pipe:
                pipe.zscore(live, identity).lrange(stock_key, 0, -1)
                known, held, highest = pipe.get(highest_key).execute()
            if not newcomer and known is None:
                return None
            new, stock = self._sort_batch(prekeys, frozenset(held), highest, largest)
            # Rising numbers, so that the last one is the highest.
            settings = [identity, repr(expires), int(newcomer), highest or b""]
            outcome, *count = self._run_add(keys=keys, args=[*settings, *new.values()])
        if outcome == b"copied":
            raise self._copied()
        return None if outcome == b"gone" else replace(stock, held=count[0])

    def beat(self, identity: bytes, *, expires: float) -> Stock | None:
        live = self._key("live")
        # "xx": only those who are there already; one who left stays away.
        self._redis.zadd(live, {identity: expires}, xx=True)
        with self._redis.pipeline() as pipe:
            known, held = pipe.zscore(live, identity).llen(self._key("stock", identity)).execute()
        return None if known is None else Stock(held)

    def leave(self, identity: bytes, *, now: float) -> bool:  # noqa: ARG002
        own = (self._key(kind, identity) for kind in ("stock", "coalition-of", "highest"))
        keys = [self._key("live"), self._key("prekeys"), self._key("publics"), *own]
        settings = [identity, self._key("coalition"), int(self.REMEMBER_LEFT)]
        return bool(self._run_leave(keys=keys, args=settings))

    def set_coalition(self, identity: bytes, coalition: str | None) -> bool:
        keys = [self._key("live"), self._key("coalition-of", identity)]
        return bool(self._run_join(keys=keys, args=[identity, coalition or "", self._key("coalition")]))

    def start_run(self, run: bytes, wanted: Run) -> Run:
        self._run_start(
            keys=[self._key("run", run), self._key("runs")],
            args=[wanted.rounds, wanted.salt, wanted.anchor, wanted.signature],
        )
        started = self.run(run)
        assert started is not None
        return started

    def run(self, run: bytes) -> Run | None:
        names = ("rounds", "salt", "anchor", "signature", "highest")
        rounds, salt, anchor, signature, highest = self._redis.hmget(self._key("run", run), names)
        return None if rounds is None else Run(int(rounds), salt, anchor, signature, int(highest))

    def _seat(self, run: bytes, link: int, request: SeatRequest, now: float) -> Seating:
        candidates = [] if self.seating(run, link) is not None else self._candidates(request, now)
        names = (("run", run), ("seatings", run), ("live",), ("prekeys",), ("publics",))
        keys = [self._key(*name) for name in names]
        most = len(candidates) if request.members is not None else request.count
        settings = [link, request.hash, repr(now), request.at_least, most, self._key("stock")]
        outcome, result = self._run_seat(keys=keys, args=[*settings, *candidates])
        if outcome == b"seated":
            return _as_seating(result)
        if outcome == b"few":
            raise self._too_few(int(result), request)
        raise self._over(None if result is None else int(result))

    def _candidates(self, request: SeatRequest, now: float) -> list[bytes]:
        """Those named, or all that may be live, shuffled; the script checks each, for some may leave meanwhile."""
        if request.members is not None:
            return list(request.members)
        pool: list[bytes]
        if request.coalition is not None:
            pool = list(self._redis.smembers(self._key("coalition", request.coalition.encode())))
        else:
            pool = self._redis.zrangebyscore(self._key("live"), f"({now!r}", "+inf")
        secrets.SystemRandom().shuffle(pool)
        # Spare ones for those without prekeys; a script takes only so many arguments.
        return pool[: 2 * request.count + 1000]

    def seating(self, run: bytes, link: int) -> Seating | None:
        record: bytes | None = self._redis.hget(self._key("seatings", run), link)
        return None if record is None else _as_seating(record)

    def release(self, run: bytes, link: int, wanted: Release) -> Release:
        keys = [self._key("run", run), self._key("releases", run), self._key("seatings", run)]
        record = _release_record(wanted)
        outcome, result = self._run_release(keys=keys, args=[link, record, link - self.KEPT_LINKS])
        if outcome == b"out":
            return _as_release(result)
        raise self._over(None if result is None else int(result))

    def released(self, run: bytes, link: int) -> Release | None:
        record: bytes | None = self._redis.hget(self._key("releases", run), link)
        return None if record is None else _as_release(record)

    def counts(self, *, now: float) -> Counts:
        with self._redis.pipeline() as pipe:
            pipe.zcard(self._key("live")).zcount(self._key("live"), f"({now!r}", "+inf")
            registered, live, prekeys, runs = pipe.get(self._key("prekeys")).get(self._key("runs")).execute()
        return Counts(registered, live, int(prekeys or 0), int(runs or 0))

    def forget(self, *, before: float) -> int:
        old = self._redis.zrangebyscore(self._key("live"), "-inf", f"({before!r}")
        for identity in old:
            self.leave(identity, now=before)
            self._redis.delete(self._key("highest", identity))
        return len(old)

    def ping(self) -> None:
        self._redis.ping()

    def close(self) -> None:
        self._redis.close()


_HASH_BYTES = 32


def _as_seating(record: bytes) -> Seating:
    """From the hash of the request and the packed list."""
    return Seating(record[:_HASH_BYTES], record[_HASH_BYTES:])


def _release_record(release: Release) -> bytes:
    """The number of neighbours as a float of 8 bytes, 0 for none, then the commitment."""
    return struct.pack(">d", release.neighbours or 0.0) + release.commitment


def _as_release(record: bytes) -> Release:
    """What `_release_record` made."""
    (neighbours,) = struct.unpack_from(">d", record)
    return Release(record[8:], neighbours or None)


def _check_settings(settings: Mapping[Any, Any]) -> None:
    """Refuse settings under which Redis could lose an answer it gave; one that it does not tell passes."""
    for name, safe in _SAFE_SETTINGS.items():
        if settings.get(name, safe) != safe:
            raise ConfigError(
                f"this Redis has {name} {settings[name]}: it could forget that a link was let out",
                field="--store",
                hint=f"redis-cli config set {name} {safe}, and write it into redis.conf",
            )
