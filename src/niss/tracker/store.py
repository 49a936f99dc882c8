"""What the tracker keeps, and what every store must guarantee.

All methods are atomic, also against other processes on the same store. What `seat` and `release` answer was written
durably before: after a crash the same question has the same answer. A prekey leaves the store once, in one seating.
A link is let out once, for one commitment, and never after a later one. No store holds a secret: not the seed of a
beacon chain, and of keys only public halves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from niss.errors import ConfigError
from niss.protocol.beacon import LINKS_PER_ROUND
from niss.protocol.keys import fingerprint
from niss.protocol.prekeys import SignedPrekey
from niss.tracker.records import Counts, Release, Run, Seating, SeatRequest, SortedBatch, Stock
from niss.tracker.refusal import Refusal

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
    return Refusal(
        409,
        f"{found} of the clients asked for are live and have a prekey left, at least {wanted} are needed",
        field="at_least",
        hint="wait until more have registered, or let those with an empty stock replenish it",
    )


def seated_otherwise() -> Refusal:
    return Refusal(
        409,
        "this attempt was seated before, by another request",
        field="attempt",
        hint="ask as before to get the same list, or open the next attempt",
    )


def let_out_before(highest: int) -> Refusal:
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
