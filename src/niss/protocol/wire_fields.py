"""The kinds of fields on the wire: each knows how to write itself, how to read itself, and what to refuse.

A message says of each of its fields which kind it is, by its type (`niss.protocol.messages`): `record_of` makes the
layout of a dataclass from its annotations. Both directions run the same checks, so nothing is written that would not be
read, and each value has one form:

    number              varint in its shortest form: seven bits a byte, lowest first, below 2^64
    float               IEEE float64, lowest byte first
    one of a few words  its place in the list, one byte
    what may be None    after a byte that says whether it is there
    key, hash, seed     bytes of a fixed length, bare
    other bytes, text   after their length, a varint
    sequence            after the number of its items, a varint
    record              its fields, one after another

A length is checked against `WireLimits` and against the bytes that are left before memory is taken for it. What is
refused is a `Fault`, which names the path to the field and never quotes the value.
"""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from niss.errors import ConfigError

UINT64 = (1 << 64) - 1
# The varints of one and two bytes: nearly all there are.
_SHORT = tuple(
    bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80, value >> 7]) for value in range(1 << 14)
)


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
    """A value that may not be on the wire; gathers the path to its field on the way out.

    `wire` turns it into a `LocalProtocolError` when writing and a `RemoteProtocolError` when reading.
    """

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what
        self.path = ""

    def within(self, name: str) -> Fault:
        """The same fault, one level further out: in field `name`, or in item `[n]` of a sequence."""
        joint = "" if not self.path or self.path.startswith("[") else "."
        self.path = f"{name}{joint}{self.path}"
        return self

    def __str__(self) -> str:
        return f"{self.path}: {self.what}" if self.path else self.what


class Writer:
    """Collects the bytes of a message: `parts`, and their `size` so far."""

    def __init__(self, limits: WireLimits) -> None:
        self.limits = limits
        self.parts: list[bytes] = []
        self.size = 0

    def raw(self, data: bytes) -> None:
        """Appends bytes as they are."""
        self.parts.append(data)
        self.size += len(data)

    def varint(self, value: int) -> None:
        """Appends a number below 2^64 in its shortest form."""
        if value < len(_SHORT):
            self.raw(_SHORT[value])
            return
        out = bytearray()
        while value > 0x7F:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)
        self.raw(bytes(out))


class Reader:
    """Takes a message apart from front to back, and never reaches beyond its end.

    A slice of the message is the only memory it takes; `at` is the place of the next byte.
    """

    def __init__(self, data: bytes, limits: WireLimits, at: int = 0) -> None:
        self.data = data
        self.limits = limits
        self.at = at

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

    def _check(self, value: int, limits: WireLimits) -> None:
        if not self.low <= value <= self.high(limits):
            raise Fault(f"must lie between {self.low} and {self.high(limits)}")

    def write(self, out: Writer, value: Any) -> None:
        if type(value) is not int:
            raise Fault("must be a whole number (int)")
        self._check(value, out.limits)
        out.varint(value)

    def read(self, source: Reader) -> int:
        value = source.varint()
        self._check(value, source.limits)
        return value


class Real(Field):
    """A float64 that is finite and not negative; minus zero is refused: it equals zero."""

    smallest = 8

    def _check(self, value: float) -> None:
        if math.isnan(value) or math.copysign(1.0, value) < 0 or math.isinf(value):
            raise Fault("must be finite and not negative")

    def write(self, out: Writer, value: Any) -> None:
        if not isinstance(value, float):  # an int would come back as a float, and hash differently
            raise Fault("must be a float")
        self._check(value)
        out.raw(struct.pack("<d", value))

    def read(self, source: Reader) -> float:
        value: float = struct.unpack("<d", source.raw(8))[0]
        self._check(value)
        return value


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

    With `step`, a whole number of pieces of that length.
    """

    def __init__(self, high: Bound | int, low: int = 0, step: int = 1) -> None:
        self.low, self.high, self.step = low, _bound(high), step

    def _check(self, length: int, limits: WireLimits) -> None:
        if not self.low <= length <= self.high(limits):
            raise Fault(f"must hold between {self.low} and {self.high(limits)} bytes")
        if length % self.step:
            raise Fault(f"must hold whole pieces of {self.step} bytes")

    def write(self, out: Writer, value: Any) -> None:
        if type(value) is not bytes:
            raise Fault("must be bytes")
        self._check(len(value), out.limits)
        out.varint(len(value))
        out.raw(value)

    def read(self, source: Reader) -> Any:
        length = source.varint()
        self._check(length, source.limits)
        return source.raw(length)


class Maybe(Blob):
    """Bytes of one fixed length or none at all, after their length; a signature not yet made is empty."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.length = length

    def _check(self, length: int, _: WireLimits) -> None:
        if length not in (0, self.length):
            raise Fault(f"must be {self.length} bytes, or empty")


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


@dataclass(frozen=True)
class Items:
    """The most items of a tuple; with `rising` or `unique`, the key of an item that must grow, or may not recur."""

    high: Bound
    rising: Callable[[Any], Any] | None = None
    unique: Callable[[Any], Any] | None = None


class Sequence(Field):
    """A tuple, after its length; its `Items` see to it that a set has one encoding, and no seat can be named twice."""

    def __init__(self, item: Field, items: Items) -> None:
        self.item, self.high, self.rising, self.unique = item, items.high, items.rising, items.unique

    def _check_count(self, count: int, limits: WireLimits) -> None:
        if count > self.high(limits):
            raise Fault(f"must hold at most {self.high(limits)} items")

    # Between neighbours, while they are read: a long list in the wrong order is refused at its first fault.
    def _check_rising(self, before: Any, item: Any) -> None:
        if self.rising is not None and self.rising(before) >= self.rising(item):
            raise Fault("must be in rising order, none of them twice")

    def _check_unique(self, items: tuple[Any, ...]) -> None:
        if self.unique is not None and len({self.unique(item) for item in items}) != len(items):
            raise Fault("must all differ")

    def write(self, out: Writer, value: Any) -> None:
        if type(value) is not tuple:
            raise Fault("must be a tuple")
        self._check_count(len(value), out.limits)
        out.varint(len(value))
        for place, item in enumerate(value):
            try:
                self.item.write(out, item)
            except Fault as fault:
                raise fault.within(f"[{place}]") from None
            if place:
                self._check_rising(value[place - 1], item)
        self._check_unique(value)

    def read(self, source: Reader) -> tuple[Any, ...]:
        count = source.varint()
        self._check_count(count, source.limits)
        if count * self.item.smallest > source.left:
            raise Fault("the message ends too early")
        items: list[Any] = []
        for place in range(count):
            try:
                items.append(self.item.read(source))
            except Fault as fault:
                raise fault.within(f"[{place}]") from None
            if place:
                self._check_rising(items[-2], items[-1])
        result = tuple(items)
        self._check_unique(result)
        return result


class Record(Field):
    """A frozen dataclass, field by field in its own order, each of the kind that its type says."""

    def __init__(self, kind: type[Any]) -> None:
        hints = get_type_hints(kind, include_extras=True)
        self.kind, self.layout = kind, {field.name: _kind_of(hints[field.name]) for field in fields(kind)}
        self.smallest = sum(field.smallest for field in self.layout.values())

    def write(self, out: Writer, value: Any) -> None:
        if type(value) is not self.kind:
            raise Fault(f"must be a {self.kind.__name__}")
        name = ""
        try:
            for name, field in self.layout.items():
                field.write(out, getattr(value, name))
        except Fault as fault:
            raise fault.within(name) from None

    def read(self, source: Reader) -> Any:
        values: dict[str, Any] = {}
        name = ""
        try:
            for name, field in self.layout.items():
                values[name] = field.read(source)
        except Fault as fault:
            raise fault.within(name) from None
        return self.kind(**values)


_RECORDS: dict[type[Any], Record] = {}


def record_of(kind: type[Any]) -> Record:
    """The layout of a dataclass, made once."""
    if kind not in _RECORDS:
        _RECORDS[kind] = Record(kind)
    return _RECORDS[kind]


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
