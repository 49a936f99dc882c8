"""What the parties of a round say to each other: frozen, without behaviour.

A round, in order (`tolerate` ends after the uploads, `repair` goes on):

    server -> client   RoundOpen      who takes part, on which terms, with which beacon
    client -> server   Upload         the noisy update; in repair also a secret in pieces, and what it seals
    server -> member   RevealRequest  whose uploads arrived, and the pieces meant for this member of the committee
    member -> server   Reveal         what takes out the masks of the survivors and their shares with the dropped

Every message of a client is signed by its identity, every message of the server by the server's; `signature` is empty
until it is. `context` is the digest of the round's context, `seat` a place in the list of participants.

The types of the fields are the wire format: each says its kind and its bounds. Whatever changes there changes
the encodings, and needs a new `VERSION`. The machines check what a message means.

    tag  message         bytes, with its signature, for seats below 128
    1    RoundOpen       about 250, and 130 for each participant, of three rounds where noise is carried over
    2    Upload          109, the vector, 98 for each fresh prekey; in `repair` 97 more, 64 for each member of the
                         committee, or 32 for one whose piece follows, and 32 for each edge
    3    RevealRequest   107, and for each survivor 97, or 65 where the piece follows; with the verdict of a round next
                         to it 133 more, 1 for each survivor, 65 for each vote
    4    Reveal          106, for each survivor 51, and 32 for its mask and each neighbour that it lost; 64 for a vote
    5    Refusal         104, and its text

Each message is one string of bytes, compact, versioned and canonical, so that a signature over an encoding is safe:

    magic "NISS" | version, 1 byte | tag of the message, 1 byte | its fields, as their types say

`record_of` makes the layout of a message from the annotations of its fields. Both directions run the same checks, so
each value has one form, nothing is written that would not be read, and each accepted encoding is that of the message it
decodes to:

    number              varint in its shortest form: seven bits a byte, lowest first, below 2^64
    float               IEEE float64, lowest byte first
    one of a few words  its place in the list, one byte
    what may be None    after a byte that says whether it is there
    key, hash, seed     bytes of a fixed length, bare
    other bytes, text   after their length, a varint
    sequence            after the number of its items, a varint
    record              its fields, one after another

A length is checked against `WireLimits` and against the bytes that are left before memory is taken for it: `decode`
takes about as much memory as a vector it is given, and some 35 times as much as a message that is all tiny items
(Python's objects are larger than one-byte pieces). What is refused is a `Fault`, named by the `path` to its field and
never quoted.
"""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args, get_origin, get_type_hints

from niss.errors import ConfigError, LocalProtocolError, RemoteProtocolError

if TYPE_CHECKING:
    from niss.mechanism.noise import Noise

UINT64 = (1 << 64) - 1


@dataclass(frozen=True)
class WireLimits:
    """The most that a message may hold; checked before memory is taken for it.

    max_participants    seats of a round, survivors, members of a committee
    max_coordinates     length of an update; a vector takes up to 8 bytes for each
    max_message_bytes   a whole message: by default a vector of 2^28 coordinates and 8 MiB
    max_prekeys         fresh prekeys in an upload
    max_reason_bytes    the text of a refusal
    """

    max_participants: int = 10_000
    max_coordinates: int = 1 << 28
    max_message_bytes: int = (1 << 31) + (1 << 23)
    max_prekeys: int = 256
    max_reason_bytes: int = 500

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or not 0 < value <= UINT64:
                raise ConfigError("must be a whole number above zero", field=field.name)


# The largest value, length or count of a field under given limits, or under any.
Bound = Callable[[WireLimits], int]


def _bound(high: Bound | int) -> Bound:
    return high if callable(high) else lambda _: high


class Fault(Exception):
    """A value that may not be on the wire: our own fault when writing, that of whoever sent it when reading."""


class _Place:
    """Where a reader or writer is: the fields and items, from the outside in, that lead to the value at hand."""

    def __init__(self, limits: WireLimits) -> None:
        self.limits = limits
        self.path: list[str | int] = []

    def __str__(self) -> str:
        return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.path)


class Writer(_Place):
    """Collects the bytes of a message: `parts`."""

    def __init__(self, limits: WireLimits) -> None:
        super().__init__(limits)
        self.parts = list[bytes]()

    def raw(self, data: bytes) -> None:
        """Appends bytes as they are."""
        self.parts.append(data)

    def varint(self, value: int) -> None:
        """Appends a number below 2^64 in its shortest form."""
        out = bytearray()
        while value > 0x7F:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)
        self.raw(bytes(out))


class Reader(_Place):
    """Takes a message apart from front to back, and never reaches beyond its end.

    A slice of the message is the only memory it takes; `at` is the place of the next byte.
    """

    def __init__(self, data: bytes, limits: WireLimits, at: int = 0) -> None:
        super().__init__(limits)
        self.data, self.at = data, at

    @property
    def left(self) -> int:
        """How many bytes are still to be read."""
        return len(self.data) - self.at

    def raw(self, count: int) -> bytes:
        """The next `count` bytes."""
        if count > self.left:
            raise Fault("the message ends too early")
        start, self.at = self.at, self.at + count
        return self.data[start : self.at]

    def varint(self) -> int:
        """The next number: at most ten bytes, in its shortest form, below 2^64; anything else is a `Fault`."""
        value = shift = 0
        while True:
            if not self.left:
                raise Fault("the message ends too early")
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            if shift > 63:
                raise Fault("the number is too long")
        if value > UINT64:
            raise Fault("the number is too large")
        if not byte and shift:
            raise Fault("the number is not in its shortest form")
        return value


class Field(ABC):
    """One kind of field; `smallest` is the fewest bytes it can take.

    `read` takes from any bytes whatever exactly the values that `write` accepts.
    """

    smallest = 1

    @abstractmethod
    def write(self, out: Writer, value: Any) -> None:
        """Appends the value, or raises a `Fault`."""

    @abstractmethod
    def read(self, source: Reader) -> Any:
        """Takes the next value, or raises a `Fault`."""


class Uint(Field):
    """A whole number from `low` up to a bound; a bool or a numpy number is not one."""

    def __init__(self, high: Bound | int = UINT64, low: int = 0) -> None:
        self.low, self.high = low, _bound(high)

    def _checked(self, value: int, limits: WireLimits) -> int:
        if not self.low <= value <= self.high(limits):
            raise Fault(f"must lie between {self.low} and {self.high(limits)}")
        return value

    def write(self, out: Writer, value: Any) -> None:
        if type(value) is not int:
            raise Fault("must be a whole number (int)")
        out.varint(self._checked(value, out.limits))

    def read(self, source: Reader) -> int:
        return self._checked(source.varint(), source.limits)


class Real(Field):
    """A float64 that is finite and not negative; minus zero is refused: it equals zero."""

    smallest = 8

    def _checked(self, value: float) -> float:
        if not math.isfinite(value) or math.copysign(1.0, value) < 0:
            raise Fault("must be finite and not negative")
        return value

    def write(self, out: Writer, value: Any) -> None:
        if not isinstance(value, float):  # an int would come back as a float, and hash differently
            raise Fault("must be a float")
        out.raw(struct.pack("<d", self._checked(value)))

    def read(self, source: Reader) -> float:
        return self._checked(struct.unpack("<d", source.raw(8))[0])


class Choice(Field):
    """One of a few words, as its place in the list, in one byte. A word's place never changes."""

    def __init__(self, words: tuple[str, ...]) -> None:
        self.words = words

    def write(self, out: Writer, value: Any) -> None:
        if type(value) is not str or value not in self.words:
            raise Fault(f"must be one of {', '.join(self.words)}")
        out.raw(bytes([self.words.index(value)]))

    def read(self, source: Reader) -> str:
        place = source.raw(1)[0]
        if place >= len(self.words):
            raise Fault(f"must be one of {', '.join(self.words)}")
        return self.words[place]


class Exact(Field):
    """Bytes of one fixed length, such as a key or a hash."""

    def __init__(self, length: int) -> None:
        self.smallest = length

    def write(self, out: Writer, value: Any) -> None:
        if type(value) is not bytes or len(value) != self.smallest:
            raise Fault(f"must be {self.smallest} bytes")
        out.raw(value)

    def read(self, source: Reader) -> bytes:
        return source.raw(self.smallest)


class Blob(Field):
    """Bytes of any length between `low` and a bound, after their length. Only `bytes`: nothing that could change.

    With `step`, a whole number of pieces of that length: `Blob(64, step=64)` is a signature, or empty until it is made.
    """

    def __init__(self, high: Bound | int, low: int = 0, step: int = 1) -> None:
        self.low, self.high, self.step = low, _bound(high), step

    def _checked(self, length: int, limits: WireLimits) -> int:
        low, high, step = self.low, self.high(limits), self.step
        if high == step and length not in (low, high):
            raise Fault(f"must be {step} bytes, or empty")
        if not low <= length <= high:
            raise Fault(f"must hold between {low} and {high} bytes")
        if length % step:
            raise Fault(f"must hold whole pieces of {step} bytes")
        return length

    def write(self, out: Writer, value: Any) -> None:
        if type(value) is not bytes:
            raise Fault("must be bytes")
        out.varint(self._checked(len(value), out.limits))
        out.raw(value)

    def read(self, source: Reader) -> Any:
        return source.raw(self._checked(source.varint(), source.limits))


class Text(Blob):
    """Text in UTF-8, after its length in bytes."""

    def write(self, out: Writer, value: Any) -> None:
        if type(value) is not str:
            raise Fault("must be text (str)")
        try:
            data = value.encode()
        except UnicodeEncodeError:
            raise Fault("must be text that UTF-8 can hold") from None
        super().write(out, data)

    def read(self, source: Reader) -> str:
        data: bytes = super().read(source)
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise Fault("must be text in UTF-8") from None


class Optional(Field):
    """A field after a byte that says whether it is there: 1, or 0 for None."""

    def __init__(self, item: Field) -> None:
        self.item = item

    def write(self, out: Writer, value: Any) -> None:
        out.raw(bytes([value is not None]))
        if value is not None:
            self.item.write(out, value)

    def read(self, source: Reader) -> Any:
        there = source.raw(1)[0]
        if there > 1:
            raise Fault("must be there or not: 1 or 0")
        return self.item.read(source) if there else None


@dataclass(frozen=True)
class Items:
    """The most items of a tuple; with `rising` or `unique`, the key of an item that must grow, or may not recur."""

    high: Bound
    rising: Callable[[Any], Any] | None = None
    unique: Callable[[Any], Any] | None = None


class Sequence(Field):
    """A tuple, after its length; its `Items` see to it that a set has one encoding, and no seat can be named twice."""

    def __init__(self, item: Field, items: Items) -> None:
        self.item, self.items = item, items

    def write(self, out: Writer, value: Any) -> None:
        if type(value) is not tuple:
            raise Fault("must be a tuple")
        out.varint(self._count(len(value), out.limits))

        def written(item: Any) -> Any:
            self.item.write(out, item)
            return item

        self._gather(map(written, value), out.path)

    def read(self, source: Reader) -> tuple[Any, ...]:
        count = self._count(source.varint(), source.limits)
        if count * self.item.smallest > source.left:
            raise Fault("the message ends too early")
        return self._gather((self.item.read(source) for _ in range(count)), source.path)

    def _count(self, count: int, limits: WireLimits) -> int:
        if count > self.items.high(limits):
            raise Fault(f"must hold at most {self.items.high(limits)} items")
        return count

    def _gather(self, items: Iterable[Any], path: list[str | int]) -> tuple[Any, ...]:
        """All items. Order is checked as they come: a long list in the wrong order is refused at its first fault."""
        rising, unique = self.items.rising, self.items.unique
        gathered: list[Any] = []
        path.append(0)
        for item in items:
            if gathered and rising is not None and rising(gathered[-1]) >= rising(item):
                path.pop()
                raise Fault("must be in rising order, none of them twice")
            gathered.append(item)
            path[-1] = len(gathered)
        path.pop()
        if unique is not None and len({unique(item) for item in gathered}) != len(gathered):
            raise Fault("must all differ")
        return tuple(gathered)


class Record(Field):
    """A frozen dataclass, field by field in its own order, each of the kind that its type says."""

    def __init__(self, kind: type[Any]) -> None:
        hints = get_type_hints(kind, include_extras=True)
        self.kind, self.layout = kind, {field.name: _kind_of(hints[field.name]) for field in fields(kind)}
        self.smallest = sum(field.smallest for field in self.layout.values())

    def write(self, out: Writer, value: Any) -> None:
        if type(value) is not self.kind:
            raise Fault(f"must be a {self.kind.__name__}")
        for name, field in self.layout.items():
            out.path.append(name)
            field.write(out, getattr(value, name))
            out.path.pop()

    def read(self, source: Reader) -> Any:
        values: dict[str, Any] = {}
        for name, field in self.layout.items():
            source.path.append(name)
            values[name] = field.read(source)
            source.path.pop()
        return self.kind(**values)


_RECORDS: dict[type[Any], Record] = {}


def record_of(kind: type[Any]) -> Record:
    """The layout of a dataclass, made once."""
    return _RECORDS.get(kind) or _RECORDS.setdefault(kind, Record(kind))


def _kind_of(hint: Any) -> Field:
    """The kind that a type stands for: what it is annotated with, or what follows from it."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        for note in arguments[1:]:
            if isinstance(note, Field):
                return note
            if isinstance(note, Items):
                return Sequence(_kind_of(get_args(arguments[0])[0]), note)
    if type(None) in arguments:
        return Optional(_kind_of(next(one for one in arguments if one is not type(None))))
    if hint is float:
        return Real()
    if is_dataclass(hint) and isinstance(hint, type):
        return record_of(hint)
    raise TypeError(f"{hint} does not say what it is on the wire")


# What happens to the shares of clients that drop out: they stay as noise, or are taken out again.
MODES = ("tolerate", "repair")

RUN_BYTES = 64
POINT_BYTES, PROOF_BYTES = 32, 48
NARROWEST, WIDEST = 16, 64
"""Bits of a modulus."""

_everyone: Bound = attrgetter("max_participants")


def _points(count: int) -> Bound:
    """So many points or scalars of 32 bytes for each participant, and three more."""
    return lambda limits: POINT_BYTES * (3 + count * limits.max_participants)


Key = Annotated[bytes, Exact(32)]
Hash = Annotated[bytes, Exact(32)]
Signature = Annotated[bytes, Blob(64, step=64)]
Seat = Annotated[int, Uint(lambda limits: limits.max_participants - 1)]
Headcount = Annotated[int, Uint(_everyone)]
Vector = Annotated[bytes, Blob(lambda limits: limits.max_coordinates * (WIDEST // 8))]
Count32 = Annotated[int, Uint((1 << 32) - 1)]
# Seats and prekeys lie in rising order and identities differ, so that a set has one encoding and no one counts twice.
Seats = Annotated[tuple[Seat, ...], Items(_everyone, rising=lambda seat: seat)]


@dataclass(frozen=True)
class Prekey:
    """A one-time X25519 key, signed by the identity it belongs to and by itself."""

    number: Annotated[int, Uint()]
    public: Key
    signature: Signature


@dataclass(frozen=True)
class Participant:
    """A seat in the round: an identity and the prekey it will use up."""

    identity: Key
    prekey: Prekey


Participants = Annotated[tuple[Participant, ...], Items(_everyone, unique=attrgetter("identity"))]


@dataclass(frozen=True)
class CarryTerms:
    """How noise is carried from every round of a run to the next; the same in all its rounds.

    plan            hash of the schedule that was committed to before the first round (`niss.protocol.schedule`)
    unit_variance   variance of the share that each client carries to each client of the next round, an entry
    """

    plan: Hash
    unit_variance: float


@dataclass(frozen=True)
class Terms:
    """What all participants of a round must agree on; bound into every seed.

    run                     name of the run
    round, attempt          counted from 0
    mode                    one of `MODES`
    coordinates             length of an update
    grid_bits               updates and noise are multiples of 2^-grid_bits
    modulus_bits            and are added modulo 2^modulus_bits
    clip                    largest L2 norm of an update
    neighbours              unit shares that each client sends
    unit_variance           variance of a unit share, an entry
    residual_variance       of the noise that stays in the sum, a client
    self_variance           of a self-mask, which a repair takes out
    revealed, dropped       most edges of a client that may be revealed, most clients that may drop out
    committee, threshold    how many members repair the round, and how many of them it takes; 0 in mode `tolerate`
    carrying                how noise is carried from round to round; None: it is not

    Variances are those of an upload `p_k x_k` with `p_k = 1 / participants`, in its own units.
    """

    run: Annotated[bytes, Blob(RUN_BYTES, low=1)]
    round: Count32
    attempt: Count32
    mode: Annotated[str, Choice(MODES)]
    coordinates: Annotated[int, Uint(attrgetter("max_coordinates"), low=1)]
    grid_bits: Annotated[int, Uint(WIDEST)]
    modulus_bits: Annotated[int, Uint(WIDEST, low=NARROWEST)]
    clip: float
    neighbours: float
    unit_variance: float
    residual_variance: float
    self_variance: float
    revealed: Headcount
    dropped: Headcount
    committee: Headcount
    threshold: Headcount
    carrying: CarryTerms | None = None

    @classmethod
    def of_noise(cls, noise: Noise, **others: Any) -> Terms:
        """Terms of rounds with that noise, its variances those of uploads; `others` are all fields beside it."""
        return cls(
            mode="repair" if noise.committee else "tolerate",
            neighbours=noise.neighbours,
            unit_variance=noise.unit,
            residual_variance=noise.residual,
            self_variance=noise.self_mask,
            revealed=noise.revealed,
            dropped=noise.dropped,
            committee=noise.committee,
            threshold=noise.threshold,
            **others,
        )


@dataclass(frozen=True)
class Beacon:
    """One link of a hash chain: `value` hashed `index` times gives the anchor committed to at the start.

    The tracker signs it together with the participants, so it has seen the list before it released the value.
    """

    index: Count32
    value: Hash
    signature: Signature


@dataclass(frozen=True)
class PreviousRound:
    """The round before, as far as its beacon was let out for it: what shows who carried noise to this round.

    terms   the hash of its terms
    """

    participants: Participants
    terms: Hash
    beacon: Beacon


@dataclass(frozen=True)
class RoundCohorts:
    """Who takes part around a round of a run with carried shares.

    following   the participants of the next round, with the prekeys they will use up there; none in the last round
    previous    the round before; None in the first
    """

    following: Participants
    previous: PreviousRound | None


@dataclass(frozen=True)
class RoundOpen:
    """The server opens a round: who takes part, on which terms, with which beacon.

    `cohorts` is there exactly if the terms say how noise is carried from round to round.
    """

    terms: Terms
    participants: Participants
    beacon: Beacon
    signature: Signature = b""
    cohorts: RoundCohorts | None = None


@dataclass(frozen=True)
class Upload:
    """One client's contribution.

    vector          grid steps modulo 2^modulus_bits, packed; that it fits the terms is for the server to check
    fresh_prekeys   to be used in later rounds
    commitment      to the seed of its self-mask; empty in mode `tolerate`
    pieces          of a secret, and the edge keys that it seals (`niss.protocol.committee.deal`); empty likewise
    """

    context: Hash
    seat: Seat
    vector: Vector
    fresh_prekeys: Annotated[
        tuple[Prekey, ...], Items(attrgetter("max_prekeys"), rising=attrgetter("number"))
    ]
    commitment: Annotated[bytes, Blob(32, step=32)]
    pieces: Annotated[bytes, Blob(_points(5))]
    signature: Signature = b""


@dataclass(frozen=True)
class Vote:
    """A member's signature under the survivor set for which it gave its part of a repair (`vote`)."""

    seat: Seat
    signature: Annotated[bytes, Exact(64)]


@dataclass(frozen=True)
class Verdict:
    """Who survived a round with carried shares, by the votes of its committee: binding for the rounds next to it.

    beacon      of that round
    following   hash of the participants of the round after it, for which the beacon was let out too
    """

    beacon: Beacon
    following: Hash
    survivors: Seats
    votes: Annotated[tuple[Vote, ...], Items(_everyone, rising=attrgetter("seat"))]


@dataclass(frozen=True)
class RevealRequest:
    """The server tells a member of the committee whose uploads arrived; everyone else counts as dropped.

    pieces    what this member needs of each survivor's pieces, in order of seats
    verdict   of the round before, whose dropped clients carried nothing to this one; None: nothing is asked about them

    Where `context` is that of the shares carried on to the next round (`carried_context`), the member is asked once
    more after that round: `verdict` is that round's, and the shares carried to its dropped clients are to come out.
    """

    context: Hash
    survivors: Seats
    pieces: Annotated[bytes, Blob(_points(3))]
    signature: Signature = b""
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Partials:
    """What a member makes of its piece of the client in `seat`, who survived.

    points   32 bytes each: for its self-mask, then for its shares with each dropped neighbour, in order of seats, those
             of its own round first; no mask where a member is asked once more
    proof    that they were made with the piece that the client committed to
    """

    seat: Seat
    points: Annotated[bytes, Blob(_points(2), low=POINT_BYTES, step=POINT_BYTES)]
    proof: Annotated[bytes, Exact(PROOF_BYTES)]


@dataclass(frozen=True)
class Reveal:
    """The answer of the committee's member in `seat`: for each client its mask, or its shares, never both.

    `vote` is that of a `Vote`, in rounds that carry noise over; None in others, and where a member is asked once more.
    """

    context: Hash
    seat: Seat
    partials: Annotated[tuple[Partials, ...], Items(_everyone, rising=attrgetter("seat"))]
    signature: Signature = b""
    vote: Annotated[bytes, Exact(64)] | None = None


@dataclass(frozen=True)
class Refusal:
    """A client will not go on, and says why in words that hold no secret."""

    context: Hash
    reason: Annotated[str, Text(attrgetter("max_reason_bytes"))]
    signature: Signature = b""


Message = RoundOpen | Upload | RevealRequest | Reveal | Refusal

# A tag is never used for anything else.
MESSAGES: dict[int, type[Any]] = {1: RoundOpen, 2: Upload, 3: RevealRequest, 4: Reveal, 5: Refusal}
TAGS = {kind: tag for tag, kind in MESSAGES.items()}

MAGIC = b"NISS"
VERSION = 1
HEADER_BYTES = len(MAGIC) + 2
SIGNING_DOMAIN = b"niss signed message v1\x00"

_DEFAULT = WireLimits()


def encode(message: Message, *, limits: WireLimits = _DEFAULT) -> bytes:
    """The one encoding of the message.

    What `decode` would refuse under the same `limits` is refused here as our own fault: `LocalProtocolError`.
    """
    return b"".join(_written(message, limits))


def decode(data: bytes, *, limits: WireLimits = _DEFAULT) -> Message:
    """The message whose encoding this is; everything else is refused, as a fault of whoever sent it.

    `RemoteProtocolError`, in words that name the field and quote nothing of the message. Checked are form and bounds
    alone: signatures and meaning are left to the machines.
    """
    if type(data) is not bytes:
        raise LocalProtocolError("message: must be bytes")
    if len(data) > limits.max_message_bytes:
        raise RemoteProtocolError(f"message: larger than {limits.max_message_bytes} bytes")
    if data[: len(MAGIC)] != MAGIC or len(data) < HEADER_BYTES:
        raise RemoteProtocolError("magic: this is not a niss message")
    version, tag = data[len(MAGIC) : HEADER_BYTES]
    if version != VERSION:
        upgrade = "the side that sent it" if version < VERSION else "this side"
        raise RemoteProtocolError(
            f"version: the message has wire version {version}, this side speaks version {VERSION}: "
            f"upgrade niss on {upgrade}"
        )
    if tag not in MESSAGES:
        raise RemoteProtocolError(f"type: wire version {VERSION} has no message of type {tag}")
    reader = Reader(data, limits, HEADER_BYTES)
    name = MESSAGES[tag].__name__
    try:
        message = record_of(MESSAGES[tag]).read(reader)
    except Fault as fault:
        raise RemoteProtocolError(f"{name}{reader}: {fault}") from None
    if reader.left:
        raise RemoteProtocolError(f"{name}: {reader.left} bytes too many at the end")
    return cast("Message", message)


def signed_part(message: Message) -> bytes:
    """What is signed: a tag for this purpose alone, then the encoding with the message's own signature empty.

    Signatures inside the message (of prekeys, the beacon) stay in: the signer vouches for them too.
    """
    bare = replace(message, signature=b"") if type(message) in TAGS else message
    return b"".join([SIGNING_DOMAIN, *_written(bare, _DEFAULT)])


def _written(message: Message, limits: WireLimits) -> list[bytes]:
    """Header and fields, one after another."""
    if type(message) not in TAGS:
        raise LocalProtocolError("message: must be one of the messages of the protocol")
    writer = Writer(limits)
    writer.raw(MAGIC + bytes([VERSION, TAGS[type(message)]]))
    try:
        record_of(type(message)).write(writer, message)
    except Fault as fault:
        raise LocalProtocolError(f"{type(message).__name__}{writer}: {fault}") from None
    if sum(map(len, writer.parts)) > limits.max_message_bytes:
        raise LocalProtocolError(f"message: larger than {limits.max_message_bytes} bytes")
    return writer.parts
