"""What the tracker keeps, as plain frozen values, and what every store must guarantee.

All methods of a `Store` are atomic, also against other processes on the same store. What `seat` and `release` answer
was written durably before: after a crash the same question has the same answer. A prekey leaves the store once, in one
seating. A link is let out once, for one commitment, and never after a later one. No store holds a secret: not the seed
of a beacon chain, and of keys only public halves.

A participant list is packed as identity and prekey of each seat, 136 bytes a seat; see `pack_participants`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from niss.errors import ConfigError
from niss.protocol.beacon import LINKS_PER_ROUND
from niss.protocol.keys import PUBLIC_BYTES, SIGNATURE_BYTES, SignedPrekey, fingerprint
from niss.protocol.messages import Participant, Prekey
from niss.tracker.auth import Refusal

NUMBER_BYTES = 8
PREKEY_BYTES = NUMBER_BYTES + PUBLIC_BYTES + SIGNATURE_BYTES
SEAT_BYTES = PUBLIC_BYTES + PREKEY_BYTES


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
    """A run and its chain: what was committed to when it began, and the highest link let out so far."""

    rounds: int
    salt: bytes
    anchor: bytes
    signature: bytes
    highest: int = 0


@dataclass(frozen=True)
class Seating:
    """Who sits in an attempt, in order, for good; `asked` is a hash of the request that made it."""

    asked: bytes
    packed: bytes

    def participants(self) -> tuple[Participant, ...]:
        return unpack_participants(self.packed)


@dataclass(frozen=True)
class Release:
    """A link that was let out: for this commitment and no other."""

    commitment: bytes
    neighbours: float | None


@dataclass(frozen=True)
class SeatRequest:
    """Whom the server wants: those named, or `count` of the live clients, all or those of one coalition."""

    asked: bytes
    members: tuple[bytes, ...] | None
    count: int
    coalition: str | None
    at_least: int


@dataclass(frozen=True)
class Counts:
    """For the metrics."""

    registered: int
    live: int
    prekeys: int
    runs: int


@dataclass(frozen=True)
class SortedBatch:
    """A batch of prekeys, held against what is known of their owner."""

    new: tuple[bytes, ...]
    known: int
    stale: int


def sort_batch(batch: Iterable[SignedPrekey], stock: frozenset[bytes], highest: int) -> SortedBatch:
    """Numbers above the highest ever taken are new; the rest are known, or stale. `highest` is -1 at first."""
    new: dict[int, bytes] = {}
    known = stale = 0
    for prekey in batch:
        packed = prekey.encode()
        if prekey.id > highest:
            new[prekey.id] = packed
        elif packed in stock:
            known += 1
        else:
            stale += 1
    return SortedBatch(tuple(new[number] for number in sorted(new)), known, stale)


def pack_participants(seats: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Identity and packed prekey of each seat, 136 bytes a seat."""
    return b"".join(part for seat in seats for part in seat)


def unpack_participants(packed: bytes) -> tuple[Participant, ...]:
    """The list that `pack_participants` packed."""
    return tuple(
        Participant(
            packed[at : at + PUBLIC_BYTES], unpack_prekey(packed[at + PUBLIC_BYTES : at + SEAT_BYTES])
        )
        for at in range(0, len(packed), SEAT_BYTES)
    )


def unpack_prekey(packed: bytes) -> Prekey:
    one = SignedPrekey.decode(packed)
    return Prekey(one.id, one.public, one.signature)


KEPT_LINKS = 16 * LINKS_PER_ROUND
"""Participant lists are kept for that many links after the last one let out; then they are erased."""
REMEMBER_LEFT = 30 * 86_400.0
"""Seconds for which the highest prekey number of a client that left is remembered."""


class Store(ABC):
    """Everything a tracker must not forget. `trouble` are the errors its methods raise when it is out of order."""

    trouble: tuple[type[Exception], ...] = ()

    @abstractmethod
    def bind(self, name: str, value: bytes) -> bytes:
        """Set a fact about the tracker unless it is set already; the value it then has."""

    @abstractmethod
    def first_use(self, identity: bytes, nonce: bytes, *, now: float, expires: float) -> bool:
        """Remember a nonce until it expires; False if it was used before."""

    @abstractmethod
    def register(
        self, identity: bytes, prekeys: Sequence[SignedPrekey], *, expires: float, largest: int
    ) -> Stock:
        """Put new prekeys into stock, never one twice, and make the client live; at most `largest` in stock.

        A batch of used ones only is refused, and nothing changes.
        """

    @abstractmethod
    def deposit(
        self, identity: bytes, prekeys: Sequence[SignedPrekey], *, expires: float, largest: int
    ) -> Stock | None:
        """As `register`, for a client that is registered already; None if it is not."""

    @abstractmethod
    def beat(self, identity: bytes, *, expires: float) -> Stock | None:
        """Make a registered client live again; None if it is not registered."""

    @abstractmethod
    def leave(self, identity: bytes, *, now: float) -> bool:
        """Erase a client's stock and coalition; False if it was not registered."""

    @abstractmethod
    def set_coalition(self, identity: bytes, coalition: str | None) -> bool:
        """A client belongs to one coalition or none; False if it is not registered."""

    @abstractmethod
    def start_run(self, run: bytes, wanted: Run) -> Run:
        """Begin a run unless it has begun; the run as it then is."""

    @abstractmethod
    def run(self, run: bytes) -> Run | None:
        """A run, or None."""

    @abstractmethod
    def seat(self, run: bytes, link: int, request: SeatRequest, *, now: float) -> Seating:
        """Take one prekey of each client that is seated. Asked again in the same way, the same seating.

        Refused, with nothing taken, if too few are live, or if this link or a later one was let out.
        """

    @abstractmethod
    def seating(self, run: bytes, link: int) -> Seating | None:
        """The seating of an attempt, or None."""

    @abstractmethod
    def release(self, run: bytes, link: int, wanted: Release) -> Release:
        """Let out a link for a commitment. If it was let out before, what it was let out for."""

    @abstractmethod
    def released(self, run: bytes, link: int) -> Release | None:
        """What a link was let out for, or None."""

    @abstractmethod
    def counts(self, *, now: float) -> Counts:
        """How much of everything there is."""

    @abstractmethod
    def forget(self, *, before: float) -> int:
        """Erase clients whose time ran out before that moment; how many."""

    @abstractmethod
    def ping(self) -> None:
        """Raises if the store cannot be used."""

    @abstractmethod
    def close(self) -> None:
        """Let go of files and connections."""


def sqlite_path(url: str) -> str | None:
    """The file in sqlite:///FILE; None for the address of a Redis server, an error for anything else."""
    scheme, separator, rest = url.partition("://")
    if separator and scheme in ("redis", "rediss"):
        return None
    if not separator or scheme != "sqlite":
        raise ConfigError(
            f"{scheme!r} is no kind of store",
            field="--store",
            hint="give sqlite:///FILE, or redis://HOST:PORT/0 for several tracker processes",
        )
    path = rest.removeprefix("/")
    if not rest.startswith("/") or not path or path.endswith("/"):
        raise ConfigError(
            f"{url!r} names no file",
            field="--store",
            hint="sqlite:///tracker.db is a file here, sqlite:////var/lib/niss/tracker.db one elsewhere",
        )
    return path


def open_store(url: str) -> Store:
    """The store behind sqlite:///FILE or redis://HOST:PORT/NUMBER (rediss:// with TLS)."""
    path = sqlite_path(url)
    if path is not None:
        from niss.tracker.store_sqlite import SqliteStore

        return SqliteStore(path)
    from niss.tracker.store_redis import RedisStore

    return RedisStore.connect(url)


def bind_identity(store: Store, public: bytes) -> None:
    """A store belongs to the identity that first used it: with another, its chains would lead elsewhere."""
    bound = store.bind("identity", public)
    if bound != public:
        raise ConfigError(
            f"this store belongs to the tracker {fingerprint(bound)}, not to {fingerprint(public)}",
            field="--identity",
            hint="give the key file this tracker was started with, or a new store",
        )


def too_few(found: int, wanted: int) -> Refusal:
    """The refusal of a seating for which too few clients are live; nothing was used up."""
    return Refusal(
        409,
        f"{found} of the clients asked for are live and have a prekey left, at least {wanted} are needed",
        field="at_least",
        hint="wait until more have registered, or let those with an empty stock replenish it",
    )


def seated_otherwise() -> Refusal:
    """The refusal of a second, different request for the seats of an attempt."""
    return Refusal(
        409,
        "this attempt was seated before, by another request",
        field="attempt",
        hint="ask as before to get the same list, or open the next attempt",
    )


def let_out_before(highest: int) -> Refusal:
    """The refusal of an attempt whose turn is over: a later link is out."""
    return Refusal(
        409,
        f"link {highest} was let out: this attempt is over",
        field="attempt",
        hint="open a later attempt or round",
    )


def stock_full(largest: int) -> Refusal:
    return Refusal(
        409, f"a client has at most {largest} prekeys in stock", field="prekeys", hint="send fewer"
    )


def check_stale(batch: SortedBatch, sent: int) -> None:
    """Refuse a batch of which no key can be used; its sender has lost count."""
    if sent and batch.stale == sent:
        raise Refusal(
            409,
            "all these prekeys carry numbers that were used before",
            field="prekeys",
            hint="numbers only rise: go on with the key store this identity used before, or make a new identity",
        )


def unknown_run() -> Refusal:
    return Refusal(404, "no run of that name has begun", field="run", hint="the server starts it")
