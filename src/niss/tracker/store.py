"""What the tracker keeps, as plain frozen values, and what every store must guarantee.

All methods of a `TrackerStore` are atomic, also against other processes on the same store. What `seat` and `release`
answer was written durably before: after a crash the same question has the same answer. A prekey leaves the store once,
in one seating. A link is let out once, for one commitment, and never after a later one. No store holds a secret: not
the seed of a beacon chain, and of keys only public halves.

A participant list is packed as identity and prekey of each seat, 136 bytes a seat; see `pack_participants`.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from niss.errors import ConfigError
from niss.protocol.agreement import LINKS_PER_ROUND, link_of
from niss.protocol.keys import (
    PUBLIC_BYTES,
    SIGNATURE_BYTES,
    decode_prekey,
    encode_prekey,
    fingerprint,
    length_prefixed,
    uint64,
)
from niss.protocol.messages import Participant, Prekey
from niss.tracker.auth import Refused

NUMBER_BYTES = 8
PREKEY_BYTES = NUMBER_BYTES + PUBLIC_BYTES + SIGNATURE_BYTES
SEAT_BYTES = PUBLIC_BYTES + PREKEY_BYTES
COMMITMENT_BYTES = 64
Batch = Sequence[Prekey]


@dataclass(frozen=True)
class Stock:
    """A client's one-time keys after a request: how many are held, and what became of those it sent.

    accepted    new ones, put into stock
    known       sent before and still in stock
    stale       with a number that was used up before: never handed out again
    """

    held: int
    accepted: int = 0
    known: int = 0
    stale: int = 0


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


class Attempt(NamedTuple):
    """One try at a round of a run; `round` and `number` count from 0."""

    run: bytes
    round: int
    number: int

    @property
    def link(self) -> int:
        """The link of the run's chain that belongs to it; `RemoteProtocolError` where no round has so many tries."""
        return link_of(self.round, self.number)


@dataclass(frozen=True)
class Seating:
    """Who sits in an attempt, in order, for good.

    request_hash   `SeatRequest.hash` of the request that made it
    packed         the list, as `pack_participants` packs it
    """

    request_hash: bytes
    packed: bytes

    def participants(self) -> tuple[Participant, ...]:
        return unpack_participants(self.packed)


@dataclass(frozen=True)
class Release:
    """What a link was let out for.

    commitment   hash of the participants, then hash of the terms, 64 bytes; where noise is carried to the next round,
                 then the hash of its participants, 96 bytes
    neighbours   the mean degree of the graph, with which the tracker can tell clients their neighbours; None: it cannot
    """

    commitment: bytes
    neighbours: float | None

    @property
    def following(self) -> bytes | None:
        """Hash of the next round's participants; None where nothing is carried to them."""
        return self.commitment[COMMITMENT_BYTES:] or None


@dataclass(frozen=True)
class SeatRequest:
    """Whom the server wants in an attempt: either `members`, or a `count` of live clients.

    members     their identities, in the order of the seats
    count       how many to draw at random, uniformly; 0 where members are named
    coalition   draw from this coalition only
    at_least    with fewer the attempt is not seated
    absent      seat members that are not live too, as long as they have a prekey: for rounds of a fixed size
    """

    members: tuple[bytes, ...] | None = None
    count: int = 0
    coalition: str | None = None
    at_least: int = 2
    absent: bool = False

    @cached_property
    def hash(self) -> bytes:
        """SHA-256 of the request, by which a repetition is told from another request for the same attempt."""
        coalition = (self.coalition or "").encode()
        request = length_prefixed(uint64(self.count), coalition, uint64(self.at_least), *(self.members or ()))
        return hashlib.sha256((b"absent" if self.absent else b"") + request).digest()

    def check(self) -> None:
        """Refuse (422) a request that contradicts itself."""
        if (self.members is None) == (self.count == 0):
            raise Refused(
                422, "give either members or a count", field="members", hint="leave one of them out"
            )
        if self.members is not None and self.coalition is not None:
            raise Refused(
                422,
                "applies to a count only, not to members",
                field="coalition",
                hint="name its members, or give a count",
            )
        if self.members is None and self.absent:
            raise Refused(
                422, "applies to members only, not to a count", field="absent", hint="name the members"
            )
        if self.members is not None and len(set(self.members)) != len(self.members):
            raise Refused(422, "names a client twice", field="members", hint="name each client once")


@dataclass(frozen=True)
class Counts:
    """How much a store holds: clients registered, those of them that are live, prekeys in stock, runs."""

    registered: int
    live: int
    prekeys: int
    runs: int


def pack_participants(seats: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Identity and packed prekey of each seat, 136 bytes a seat."""
    return b"".join(part for seat in seats for part in seat)


def unpack_participants(packed: bytes) -> tuple[Participant, ...]:
    """The list that `pack_participants` packed."""
    return tuple(
        Participant(
            packed[at : at + PUBLIC_BYTES], decode_prekey(packed[at + PUBLIC_BYTES : at + SEAT_BYTES])
        )
        for at in range(0, len(packed), SEAT_BYTES)
    )


class TrackerStore(ABC):
    """Everything a tracker must not forget; what all stores guarantee is said at the top of this module.

    identity        a client's public key, 32 bytes
    run, link       a run's name, and the number of an attempt in it (`niss.protocol.agreement.link_of`)
    now, expires    wall time in seconds; a client is live, and can be seated, until it expires
    trouble         the errors that any method may raise when the store is out of order

    What is refused is a `Refused`, and then nothing has changed.
    """

    trouble: tuple[type[Exception], ...] = ()

    KEPT_LINKS = 16 * LINKS_PER_ROUND
    """Participant lists are kept for that many links after the last one let out; then they are erased."""
    REMEMBER_LEFT = 30 * 86_400.0
    """Seconds for which the highest prekey number of a client that left is remembered."""

    @abstractmethod
    def bind(self, name: str, value: bytes) -> bytes:
        """Set a fact about the tracker unless it is set already; returns the value it then has."""

    @abstractmethod
    def first_use(self, identity: bytes, nonce: bytes, *, now: float, expires: float) -> bool:
        """Remember a nonce until it expires; False if it was used before."""

    def register(self, identity: bytes, prekeys: Batch, *, expires: float, largest: int) -> Stock:
        """Put new prekeys into stock, never one twice, and make the client live.

        Refused (409): more than `largest` in stock, a batch of used ones only, or one with a public key that another
        client has in stock: its owner would have to decline any round in which it sat beside a copy of its own.
        """
        stock = self._add(identity, prekeys, expires, largest, newcomer=True)
        assert stock is not None
        return stock

    def deposit(self, identity: bytes, prekeys: Batch, *, expires: float, largest: int) -> Stock | None:
        """As `register`, for a client that is registered already; None if it is not."""
        return self._add(identity, prekeys, expires, largest, newcomer=False)

    @abstractmethod
    def _add(
        self, identity: bytes, prekeys: Batch, expires: float, largest: int, *, newcomer: bool
    ) -> Stock | None:
        """Write what `_sort_batch` finds new; None for one who is not registered, unless it may be a newcomer."""

    @staticmethod
    def _sort_batch(
        batch: Batch, stock: Collection[bytes], highest: bytes | None, largest: int
    ) -> tuple[dict[bytes, bytes], Stock]:
        """The new prekeys of a batch, packed, by number, in rising order; and what the client's stock is with them.

        batch     as the client sent it, signatures verified
        stock     the packed prekeys that are held
        highest   the highest number ever taken, as 8 bytes; None at first
        largest   most prekeys in stock

        A number above `highest` is new; of the others, those still in stock are known and the rest stale, since
        numbers only rise. Refused (409): a batch of stale ones alone, whose sender has lost count, and one that does
        not fit.
        """
        packed = [encode_prekey(prekey) for prekey in batch]
        new = {one[:NUMBER_BYTES]: one for one in packed if highest is None or one[:NUMBER_BYTES] > highest}
        old = [one for one in packed if one[:NUMBER_BYTES] not in new]
        stale = sum(one not in stock for one in old)
        if stale and stale == len(batch):
            raise Refused(
                409,
                "all these prekeys carry numbers that were used before",
                field="prekeys",
                hint="numbers only rise: go on with the key store this identity used before, or make a new identity",
            )
        held = len(stock) + len(new)
        if held > largest:
            raise Refused(
                409, f"a client has at most {largest} prekeys in stock", field="prekeys", hint="send fewer"
            )
        return dict(sorted(new.items())), Stock(held, len(new), len(old) - stale, stale)

    @abstractmethod
    def beat(self, identity: bytes, *, expires: float) -> Stock | None:
        """Make a registered client live again; None if it is not registered."""

    @abstractmethod
    def leave(self, identity: bytes, *, now: float) -> bool:
        """Erase a client's stock and coalition; False if it was not registered.

        Its highest prekey number is remembered for `REMEMBER_LEFT`, so that used prekeys do not come back with it.
        """

    @abstractmethod
    def set_coalition(self, identity: bytes, coalition: str | None) -> bool:
        """Put a client into one coalition and no other, or into none; False if it is not registered."""

    @abstractmethod
    def start_run(self, run: bytes, wanted: Run) -> Run:
        """Begin a run unless it has begun; returns the run as it then is."""

    @abstractmethod
    def run(self, run: bytes) -> Run | None:
        """The run of that name, None where none has begun."""

    def seat(self, run: bytes, link: int, request: SeatRequest, *, now: float) -> Seating:
        """Seat an attempt and take one prekey, the oldest, of each client in it. The same request has the same answer.

        Refused: an unknown run (404); too few live clients, another request than the one that seated this attempt, or
        one after this link or a later one was let out (409).
        """
        # Whoever registered and has not left expires after 0.
        seating = self._seat(run, link, request, 0.0 if request.absent else now)
        if seating.request_hash != request.hash:
            raise Refused(
                409,
                "this attempt was seated before, by another request",
                field="attempt",
                hint="ask as before to get the same list, or open the next attempt",
            )
        return seating

    @abstractmethod
    def _seat(self, run: bytes, link: int, request: SeatRequest, now: float) -> Seating:
        """The seating there is, whatever request made it, or else a new one."""

    @staticmethod
    def _copied() -> Refused:
        """The refusal of a batch with a key that another client has in stock."""
        return Refused(
            409, "another client has a prekey with this public key", field="prekeys", hint="make new ones"
        )

    @staticmethod
    def _too_few(able: int, request: SeatRequest) -> Refused:
        """The refusal of a seating for which only so many clients are able."""
        return Refused(
            409,
            f"{able} of the clients asked for are live and have a prekey left, at least {request.at_least} are needed",
            field="at_least",
            hint="wait until more have registered, or let those with an empty stock replenish it",
        )

    @staticmethod
    def _over(highest: int | None) -> Refused:
        """The refusal of an attempt after this or a later link was let out; with None, that of an unknown run."""
        if highest is None:
            return unknown_run()
        return Refused(
            409,
            f"link {highest} was let out: this attempt is over",
            field="attempt",
            hint="open a later attempt or round",
        )

    @abstractmethod
    def seating(self, run: bytes, link: int) -> Seating | None:
        """The seating of an attempt; None where there is none, or where it was erased (see `KEPT_LINKS`)."""

    @abstractmethod
    def release(self, run: bytes, link: int, wanted: Release) -> Release:
        """Let out a link for a commitment; returns what it was let out for, which may be an earlier commitment.

        Refused: an unknown run (404), a link below one that was let out (409).
        """

    @abstractmethod
    def released(self, run: bytes, link: int) -> Release | None:
        """What a link was let out for; None while it is not out."""

    @abstractmethod
    def counts(self, *, now: float) -> Counts:
        """How much of everything there is."""

    @abstractmethod
    def forget(self, *, before: float) -> int:
        """Erase clients that expired before that moment, with all that is known of them; returns how many."""

    @abstractmethod
    def ping(self) -> None:
        """Raises one of `trouble` if the store cannot be used."""

    @abstractmethod
    def close(self) -> None:
        """Let go of files and connections."""


def sqlite_path(url: str) -> str | None:
    """The file in sqlite:///FILE; None for the address of a Redis server, `ConfigError` for anything else."""
    scheme, separator, rest = url.partition("://")
    if separator and scheme in ("redis", "rediss"):
        return None
    if not separator or scheme != "sqlite":
        raise ConfigError(
            f"{scheme!r} is not a kind of store",
            field="--store",
            hint="give sqlite:///FILE, or redis://HOST:PORT/0 for several tracker processes",
        )
    path = rest.removeprefix("/")
    if not rest.startswith("/") or not path or path.endswith("/"):
        raise ConfigError(
            f"{url!r} does not name a file",
            field="--store",
            hint="sqlite:///tracker.db is a file here, sqlite:////var/lib/niss/tracker.db one elsewhere",
        )
    return path


def open_store(url: str) -> TrackerStore:
    """The store behind sqlite:///FILE or redis://HOST:PORT/NUMBER (rediss:// with TLS).

    Raises `ConfigError` where the address is wrong or the store behind it cannot be used. The packages of either kind
    are imported only here.
    """
    path = sqlite_path(url)
    if path is not None:
        from niss.tracker.store_sqlite import SqliteStore

        return SqliteStore(path)
    from niss.tracker.store_redis import RedisStore

    return RedisStore.connect(url)


def bind_identity(store: TrackerStore, public: bytes) -> None:
    """Tie a store to the identity that first used it; `ConfigError` where that was another one.

    With another identity the chains of its runs would be others, and no link would lead to its anchor.
    """
    bound = store.bind("identity", public)
    if bound != public:
        raise ConfigError(
            f"this store belongs to the tracker {fingerprint(bound)}, not to {fingerprint(public)}",
            field="--identity",
            hint="give the key file this tracker was started with, or a new store",
        )


def unknown_run() -> Refused:
    return Refused(404, "no run of that name has begun", field="run", hint="the server starts it")
