"""How values become bytes: the kinds of fields that a message is made of, each with its bounds.

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

A length is checked against its bound and against the bytes that are left before memory is taken for it: `decode`
takes about as much memory as a vector it is given, and some 35 times as much as a message that is all tiny items
(Python's objects are larger than one-byte pieces). What is refused is a `Fault`, named by the `path` to its field and
never quoted.
"""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

UINT64 = (1 << 64) - 1


# The most that a message may hold; checked before memory is taken for it.
MAX_PARTICIPANTS = 10_000
"""Seats of a round, survivors, members of a committee."""
MAX_COORDINATES = 1 << 28
"""Length of an update; a vector takes up to 8 bytes for each."""
MAX_MESSAGE_BYTES = (1 << 31) + (1 << 23)
"""A whole message: the longest vector, and 8 MiB."""
MAX_PREKEYS = 256
"""Fresh prekeys in an upload."""
MAX_REASON_BYTES = 500
"""The text of a refusal."""


def length_prefixed(*fields: bytes) -> bytes:
    """Each field after its length (4 bytes, big-endian): no two lists of fields encode alike.

    Whatever is hashed or signed goes through here, so that no field can borrow bytes from its neighbour.
    """
    return b"".join(part for field in fields for part in (len(field).to_bytes(4, "big"), field))


def uint64(number: int) -> bytes:
    """8 bytes, big-endian."""
    return number.to_bytes(8, "big")


def is_uint64(number: object) -> bool:
    """Whether it is an int (no bool) from 0 to 2^64 - 1."""
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number <= UINT64


class Fault(Exception):
    """A value that may not be on the wire: our own fault when writing, that of whoever sent it when reading."""


class _Place:
    """Where a reader or writer is: the fields and items, from the outside in, that lead to the value at hand."""

    def __init__(self) -> None:
        self.path: list[str | int] = []

    def __str__(self) -> str:
        return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.path)


class Writer(_Place):
    """Collects the bytes of a message: `parts`."""

    def __init__(self) -> None:
        super().__init__()
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

    def __init__(self, data: bytes, at: int = 0) -> None:
        super().__init__()
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

    def __init__(self, high: int = UINT64, low: int = 0) -> None:
        self.low, self.high = low, high

    def _checked(self, value: int) -> int:
        if not self.low <= value <= self.high:
            raise Fault(f"must lie between {self.low} and {self.high}")
        return value

    def write(self, out: Writer, value: Any) -> None:
        if type(value) is not int:
            raise Fault("must be a whole number (int)")
        out.varint(self._checked(value))

    def read(self, source: Reader) -> int:
        return self._checked(source.varint())


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

    def __init__(self, high: int, low: int = 0, step: int = 1) -> None:
        self.low, self.high, self.step = low, high, step

    def _checked(self, length: int) -> int:
        low, high, step = self.low, self.high, self.step
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
        out.varint(self._checked(len(value)))
        out.raw(value)

    def read(self, source: Reader) -> Any:
        return source.raw(self._checked(source.varint()))


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

    high: int
    rising: Callable[[Any], Any] | None = None
    unique: Callable[[Any], Any] | None = None


class Sequence(Field):
    """A tuple, after its length; its `Items` see to it that a set has one encoding, and no seat can be named twice."""

    def __init__(self, item: Field, items: Items) -> None:
        self.item, self.items = item, items

    def write(self, out: Writer, value: Any) -> None:
        if type(value) is not tuple:
            raise Fault("must be a tuple")
        out.varint(self._count(len(value)))

        def written(item: Any) -> Any:
            self.item.write(out, item)
            return item

        self._gather(map(written, value), out.path)

    def read(self, source: Reader) -> tuple[Any, ...]:
        count = self._count(source.varint())
        if count * self.item.smallest > source.left:
            raise Fault("the message ends too early")
        return self._gather((self.item.read(source) for _ in range(count)), source.path)

    def _count(self, count: int) -> int:
        if count > self.items.high:
            raise Fault(f"must hold at most {self.items.high} items")
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
