"""What a tracker keeps, when it may change, and what every store must guarantee.

All methods of a `TrackerStore` are atomic, also against other processes on the same store. What `seat` and `release`
answer was written durably before: after a crash the same question has the same answer. A prekey leaves the store once,
in one seating. A link is let out once, for one commitment, and never after a later one. No store holds a secret: not
the seed of a beacon chain, and of keys only public halves.
"""

from __future__ import annotations

import json
import math
import secrets
import struct
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from typing import Self, TypeVar

from niss.errors import ConfigError
from niss.protocol.keys import (
    LINKS_PER_ROUND,
    PUBLIC_BYTES,
    SIGNATURE_BYTES,
    decode_prekey,
    encode_prekey,
    fingerprint,
)
from niss.protocol.messages import Participant, Prekey
from niss.protocol.wire import uint64
from niss.tracker.api import HASH_BYTES, CommitmentBody, Counts, SeatsWanted, Stock
from niss.tracker.auth import Refused

_FORGOTTEN_AT_ONCE = 500
_SEAT_BYTES = PUBLIC_BYTES + 8 + PUBLIC_BYTES + SIGNATURE_BYTES
_RUN = struct.Struct(">Q32s32s64sQ")
T = TypeVar("T")
Batch = Sequence[Prekey]


@dataclass(frozen=True)
class KnownClient:
    """What is kept of a client.

    highest      the highest prekey number ever taken, -1 at first
    held         the numbers of the prekeys in stock, rising
    coalition    the one it belongs to
    registered   False for one that left, of which only `highest` is remembered
    """

    highest: int = -1
    held: tuple[int, ...] = ()
    coalition: str | None = None
    registered: bool = False

    def pack(self) -> bytes:
        return json.dumps(astuple(self)).encode()

    @classmethod
    def unpack(cls, record: bytes | None) -> Self:
        """The client in a record; one that is not known has nothing and is not registered."""
        if record is None:
            return cls()
        highest, held, coalition, registered = json.loads(record)
        return cls(highest, tuple(held), coalition, registered)


@dataclass(frozen=True)
class Run:
    """A run and its chain of links.

    rounds      how many rounds the chain is for
    salt        random, not secret; with the tracker's identity it fixes the chain (see `OwnChains`)
    anchor      the end of the chain, to which every link leads by hashing
    signature   the holder's, under run, rounds and anchor
    highest     the highest link let out so far, 0 at first
    """

    rounds: int
    salt: bytes
    anchor: bytes
    signature: bytes
    highest: int = 0

    def pack(self) -> bytes:
        return _RUN.pack(*astuple(self))

    @classmethod
    def unpack(cls, record: bytes) -> Self:
        return cls(*_RUN.unpack(record))


@dataclass(frozen=True)
class Seating:
    """Who sits in an attempt, in order, for good.

    request_hash   `SeatsWanted.hash` of the request that made it
    packed         identity and packed prekey of each seat, 136 bytes a seat
    """

    request_hash: bytes
    packed: bytes

    def participants(self) -> tuple[Participant, ...]:
        seats = [self.packed[at : at + _SEAT_BYTES] for at in range(0, len(self.packed), _SEAT_BYTES)]
        return tuple(Participant(seat[:PUBLIC_BYTES], decode_prekey(seat[PUBLIC_BYTES:])) for seat in seats)

    def pack(self) -> bytes:
        return self.request_hash + self.packed

    @classmethod
    def unpack(cls, record: bytes) -> Self:
        return cls(record[:HASH_BYTES], record[HASH_BYTES:])


R = TypeVar("R", Run, Seating, CommitmentBody)


@dataclass(frozen=True)
class Change:
    """What one atomic change reads and writes; it need not see what it wrote itself.

    read       the records of a kind under these names, None where there is none
    records    what to write, by kind and name; None erases
    ranks      numbers to write, by kind and name; None erases
    totals     what to add to the counts, by name
    """

    read: Callable[[str, Sequence[bytes]], list[bytes | None]]
    records: dict[tuple[str, bytes], bytes | None] = field(default_factory=dict)
    ranks: dict[tuple[str, bytes], float | None] = field(default_factory=dict)
    totals: Counter[str] = field(default_factory=Counter)

    def clients(self, identities: Sequence[bytes]) -> list[KnownClient]:
        return [KnownClient.unpack(record) for record in self.read("clients", identities)]

    def keep(self, identity: bytes, client: KnownClient) -> None:
        self.records["clients", identity] = client.pack()

    def set_once(self, kind: str, name: bytes, value: bytes) -> bytes:
        """Write a record unless there is one; returns the one there is then."""
        (record,) = self.read(kind, [name])
        if record is None:
            self.records[kind, name] = value
        return value if record is None else record

    def take(self, prekeys: Sequence[tuple[bytes, int]]) -> list[bytes]:
        """Prekeys in stock by owner and number, packed, which leave it for good; their owners' records stay."""
        names = [identity + uint64(number) for identity, number in prekeys]
        taken = [packed for packed in self.read("prekeys", names) if packed is not None]
        for name, packed in zip(names, taken, strict=True):
            self.records["prekeys", name] = self.records["publics", decode_prekey(packed).public] = None
        self.totals["prekeys"] -= len(taken)
        return taken


class TrackerStore(ABC):
    """Everything a tracker must not forget; what all stores guarantee is said at the top of this module.

    identity        a client's public key, 32 bytes
    run, link       a run's name, and the number of an attempt in it (`niss.protocol.keys.link_of`)
    now, expires    wall time in seconds; a client is live, and can be seated, until it expires
    trouble         the errors that any method may raise when the store is out of order

    What is refused is a `Refused`, and then nothing has changed. A kind of store adds where records are and how a
    change is made at once (`_change`); what is kept and when it may change is said here, once for all kinds:

    about       facts about the tracker, by name
    clients     by identity, a `KnownClient`; `prekeys` by identity and number, packed; `publics` the owner of each
                public key in stock
    runs        by name; `seatings` and `releases` by run and link
    nonces      by identity and nonce

    Ranks are numbers by which names are found: `live` (when a registered client expires), `left` (when one left),
    `nonces` (when they expire), and those in a coalition, which is a kind of its own.
    """

    trouble: tuple[type[Exception], ...] = ()

    KEPT_LINKS = 16 * LINKS_PER_ROUND
    """Participant lists are kept for that many links after the last one let out; then they are erased."""
    REMEMBER_LEFT = 30 * 86_400.0
    """Seconds for which the highest prekey number of a client that left is remembered."""
    _NONCES_BETWEEN_SWEEPS = 1000
    _since_sweep = 0

    @abstractmethod
    def _change(self, work: Callable[[Change], T], *, synced: bool = True) -> T:
        """Make a change at once, or none of it where `work` raises; returns what `work` does.

        Nothing that `work` reads changes before its change is made: where it could have, `work` is called again. With
        `synced`, the change is on disk when this returns.
        """

    @abstractmethod
    def _read(self, kind: str, names: Sequence[bytes]) -> list[bytes | None]:
        """Records, as `Change.read`, outside of any change."""

    @abstractmethod
    def _ranks(self, kind: str, names: Sequence[bytes]) -> list[float | None]:
        """The numbers under these names."""

    @abstractmethod
    def _ranked(self, kind: str, *, above: float = -math.inf, below: float = math.inf) -> list[bytes]:
        """The names whose numbers are above the one and below the other."""

    @abstractmethod
    def counts(self, *, now: float) -> Counts:
        """How much of everything there is."""

    @abstractmethod
    def ping(self) -> None:
        """Raises one of `trouble` if the store cannot be used."""

    @abstractmethod
    def close(self) -> None:
        """Let go of files and connections."""

    def bind(self, name: str, value: bytes) -> bytes:
        """Set a fact about the tracker unless it is set already; returns the value it then has."""
        return self._change(lambda change: change.set_once("about", name.encode(), value))

    def bind_identity(self, public: bytes) -> None:
        """Tie the store to the identity that first used it; `ConfigError` where that was another one.

        With another identity the chains of its runs would be others, and no link would lead to its anchor.
        """
        bound = self.bind("identity", public)
        if bound != public:
            words = f"this store belongs to the tracker {fingerprint(bound)}, not to {fingerprint(public)}"
            hint = "give the key file this tracker was started with, or a new store"
            raise ConfigError(words, field="--identity", hint=hint)

    def first_use(self, identity: bytes, nonce: bytes, *, now: float, expires: float) -> bool:
        """Remember a nonce until it expires; False if it was used before."""
        self._since_sweep += 1
        old: list[bytes] = []
        if self._since_sweep >= self._NONCES_BETWEEN_SWEEPS:
            self._since_sweep, old = 0, self._ranked("nonces", below=now)

        def use(change: Change) -> bool:
            key = ("nonces", identity + nonce)
            if change.read(key[0], [key[1]]) != [None]:
                return False
            for name in old:
                change.records["nonces", name] = change.ranks["nonces", name] = None
            change.records[key], change.ranks[key] = b"", expires
            return True

        return self._change(use, synced=False)

    def register(self, identity: bytes, prekeys: Batch, *, expires: float, largest: int) -> Stock:
        """Put new prekeys into stock, never one twice, and make the client live.

        Refused (409): more than `largest` in stock, a batch of used ones only, or one with a public key that another
        client has in stock: its owner would have to decline any round in which it sat beside a copy of its own.
        """
        return self._change(lambda change: self._add(change, identity, prekeys, expires, largest))

    def deposit(self, identity: bytes, prekeys: Batch, *, expires: float, largest: int) -> Stock | None:
        """As `register`, for a client that is registered already; None if it is not."""

        def add(change: Change) -> Stock | None:
            (client,) = change.clients([identity])
            return self._add(change, identity, prekeys, expires, largest) if client.registered else None

        return self._change(add)

    @staticmethod
    def _add(change: Change, identity: bytes, batch: Batch, expires: float, largest: int) -> Stock:
        """A number above the highest ever taken is new; of the others, those still in stock are known and the rest
        stale, since numbers only rise.
        """
        (client,) = change.clients([identity])
        rising = sorted(batch, key=lambda prekey: prekey.number)
        new = {prekey.number: prekey for prekey in rising if prekey.number > client.highest}
        old = [prekey for prekey in batch if prekey.number <= client.highest]
        in_stock = change.read("prekeys", [identity + uint64(prekey.number) for prekey in old])
        known = sum(packed == encode_prekey(prekey) for packed, prekey in zip(in_stock, old, strict=True))
        stale = len(old) - known
        if stale and stale == len(batch):
            hint = "numbers only rise: go on with the key store used before, or make a new identity"
            raise Refused(409, "prekeys", "all these prekeys carry numbers that were used before", hint)
        held = (*client.held, *new)
        if len(held) > largest:
            raise Refused(409, "prekeys", f"a client has at most {largest} prekeys in stock", "send fewer")
        publics = [prekey.public for prekey in new.values()]
        if any(change.read("publics", publics)) or len(set(publics)) < len(publics):
            twice = "another client has a prekey with this public key, or this one has two"
            raise Refused(409, "prekeys", twice, "make new ones")
        for number, prekey in new.items():
            change.records["prekeys", identity + uint64(number)] = encode_prekey(prekey)
            change.records["publics", prekey.public] = identity
        change.totals["prekeys"] += len(new)
        highest = max(new, default=client.highest)
        change.keep(identity, replace(client, highest=highest, held=held, registered=True))
        change.ranks["live", identity], change.ranks["left", identity] = expires, None
        return Stock(len(held), len(new), known, stale)

    def beat(self, identity: bytes, *, expires: float) -> Stock | None:
        """Make a registered client live again; None if it is not registered."""

        def live_on(change: Change) -> Stock | None:
            (client,) = change.clients([identity])
            if not client.registered:
                return None
            change.ranks["live", identity] = expires
            return Stock(len(client.held))

        return self._change(live_on, synced=False)

    def leave(self, identity: bytes, *, now: float) -> bool:
        """Erase a client's stock and coalition; False if it was not registered.

        Its highest prekey number is remembered for `REMEMBER_LEFT`, so that used prekeys do not come back with it.
        """

        def go(change: Change) -> bool:
            (client,) = change.clients([identity])
            if client.registered:
                self._erase(change, identity, client)
                change.keep(identity, KnownClient(client.highest))
                change.ranks["left", identity] = now
            return client.registered

        return self._change(go)

    @staticmethod
    def _erase(change: Change, identity: bytes, client: KnownClient) -> None:
        """Erase all that is known of a client."""
        change.take([(identity, number) for number in client.held])
        change.records["clients", identity] = None
        for kind in ("live", "left", _coalition(client.coalition)):
            change.ranks[kind, identity] = None

    def set_coalition(self, identity: bytes, coalition: str | None) -> bool:
        """Put a client into one coalition and no other, or into none; False if it is not registered."""

        def join(change: Change) -> bool:
            (client,) = change.clients([identity])
            if client.registered:
                change.ranks[_coalition(client.coalition), identity] = None
                if coalition is not None:
                    change.ranks[_coalition(coalition), identity] = 0.0
                change.keep(identity, replace(client, coalition=coalition))
            return client.registered

        return self._change(join)

    def forget(self, *, before: float) -> int:
        """Erase clients that expired before that moment, with all that is known of them; returns how many.

        Those who left are erased too, once their highest prekey number need not be remembered any more.
        """
        expired = self._ranked("live", below=before)
        left = self._ranked("left", below=before - self.REMEMBER_LEFT)
        for identities, registered in ((expired, True), (left, False)):
            for start in range(0, len(identities), _FORGOTTEN_AT_ONCE):
                self._change(
                    partial(self._forget, identities[start : start + _FORGOTTEN_AT_ONCE], registered)
                )
        return len(expired)

    def _forget(self, identities: Sequence[bytes], registered: bool, change: Change) -> None:
        """Erase those who are still registered, or are still not."""
        for identity, client in zip(identities, change.clients(identities), strict=True):
            if client.registered == registered:
                self._erase(change, identity, client)

    def start_run(self, run: bytes, wanted: Run) -> Run:
        """Begin a run unless it has begun; returns the run as it then is."""

        def start(change: Change) -> Run:
            started = Run.unpack(change.set_once("runs", run, wanted.pack()))
            change.totals["runs"] += ("runs", run) in change.records
            return started

        return self._change(start)

    def run(self, run: bytes) -> Run | None:
        """The run of that name, None where none has begun."""
        return _unpacked(Run, self._read("runs", [run]))

    def seat(self, run: bytes, link: int, request: SeatsWanted, *, now: float) -> Seating:
        """Seat an attempt and take one prekey, the oldest, of each client in it. The same request has the same answer.

        Refused: an unknown run (404); too few live clients, another request than the one that seated this attempt, or
        one after this link or a later one was let out (409).
        """
        # Whoever registered and has not left expires after 0.
        seating = self._change(partial(self._seat, run, link, request, 0.0 if request.absent else now))
        if seating.request_hash != request.hash():
            hint = "ask as before to get the same list, or open the next attempt"
            raise Refused(409, "attempt", "this attempt was seated before, by another request", hint)
        return seating

    def _seat(self, run: bytes, link: int, request: SeatsWanted, now: float, change: Change) -> Seating:
        """The seating there is, whatever request made it, or else a new one."""
        name = run + uint64(link)
        if (seated := _unpacked(Seating, change.read("seatings", [name]))) is not None:
            return seated
        self._check_turn(change, run, link)
        chosen = self._choose(change, request, now)
        if len(chosen) < request.at_least:
            few = f"{len(chosen)} of the clients asked for are live and have a prekey left, not {request.at_least}"
            raise Refused(409, "at_least", few, "wait until more have registered or replenished their stock")
        taken = change.take([(identity, client.held[0]) for identity, client in chosen])
        for identity, client in chosen:
            change.keep(identity, replace(client, held=client.held[1:]))
        seats = [identity + prekey for (identity, _), prekey in zip(chosen, taken, strict=True)]
        seating = Seating(request.hash(), b"".join(seats))
        change.records["seatings", name] = seating.pack()
        return seating

    def _choose(self, change: Change, request: SeatsWanted, now: float) -> list[tuple[bytes, KnownClient]]:
        """The live clients to be seated that have a prekey left: those named, in that order, or a random sample."""
        if request.members is not None:
            pool, most = list(dict.fromkeys(request.members)), len(request.members)
        else:
            kind, most = (
                "live" if request.coalition is None else _coalition(request.coalition),
                request.count or 0,
            )
            pool = self._ranked(kind, above=now if kind == "live" else -math.inf)
            secrets.SystemRandom().shuffle(pool)
        chosen: list[tuple[bytes, KnownClient]] = []
        # No more are read than are needed: there may be a million.
        for start in range(0, len(pool), most):
            names = pool[start : start + most]
            expiry = self._ranks("live", names)
            chosen += [
                (identity, client)
                for identity, client, expires in zip(names, change.clients(names), expiry, strict=True)
                if client.held and expires is not None and expires > now
            ]
            if len(chosen) >= most:
                break
        return chosen[:most]

    @staticmethod
    def _check_turn(change: Change, run: bytes, link: int) -> Run:
        """Refuse a run that has not started, and a link that is not above all that were let out."""
        started = known_run(_unpacked(Run, change.read("runs", [run])))
        if link <= started.highest:
            over = f"link {started.highest} was let out: this attempt is over"
            raise Refused(409, "attempt", over, "open a later attempt or round")
        return started

    def seating(self, run: bytes, link: int) -> Seating | None:
        """The seating of an attempt; None where there is none, or where it was erased (see `KEPT_LINKS`)."""
        return _unpacked(Seating, self._read("seatings", [run + uint64(link)]))

    def release(self, run: bytes, link: int, wanted: CommitmentBody) -> CommitmentBody:
        """Let out a link for a commitment; returns what it was let out for, which may be an earlier commitment.

        Refused: an unknown run (404), a link below one that was let out (409).
        """

        def let_out(change: Change) -> CommitmentBody:
            name = run + uint64(link)
            if (before := _unpacked(CommitmentBody, change.read("releases", [name]))) is not None:
                return before
            started = self._check_turn(change, run, link)
            change.records["releases", name] = wanted.pack()
            change.records["runs", run] = replace(started, highest=link).pack()
            for old in range(max(0, started.highest - self.KEPT_LINKS), link - self.KEPT_LINKS):
                change.records["seatings", run + uint64(old)] = None
            return wanted

        return self._change(let_out)

    def released(self, run: bytes, link: int) -> CommitmentBody | None:
        """What a link was let out for; None while it is not out."""
        return _unpacked(CommitmentBody, self._read("releases", [run + uint64(link)]))


def _coalition(name: str | None) -> str:
    """The kind of rank that those in a coalition have."""
    return f"coalition:{name or ''}"


def known_run(run: Run | None) -> Run:
    """A run that has begun; refused (404) where it has not."""
    if run is None:
        raise Refused(404, "run", "no run of that name has begun", "the server starts it")
    return run


def _unpacked(kind: type[R], records: Sequence[bytes | None]) -> R | None:
    """The value in the one record that was read, None where there is none."""
    (record,) = records
    return None if record is None else kind.unpack(record)
