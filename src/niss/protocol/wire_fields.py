"""The kinds of fields on the wire: each knows how to write itself, how to read itself, and what to refuse.

Both directions run the same checks, so nothing is written that would not be read, and each value has one form:
numbers are varints in their shortest form (seven bits a byte, lowest first), bytes of a fixed length stand bare,
other bytes and all sequences follow their length, floats are IEEE float64, lowest byte first.
"""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from niss.errors import ConfigError

UINT64 = (1 << 64) - 1
_SHORT = tuple(
    bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80, value >> 7]) for value in range(1 << 14)
)
"""The varints of one and two bytes: nearly all there are."""


@dataclass(frozen=True)
class Limits:
    """The most that a message may hold; checked before memory is taken for it."""

    max_participants: int = 10_000
    max_coordinates: int = 1 << 24
    max_message_bytes: int = (1 << 27) + (1 << 23)
    max_prekeys: int = 256
    max_pieces: int = 10_000
    max_piece_bytes: int = 256
    max_reason_bytes: int = 500

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or not 0 < value <= UINT64:
                raise ConfigError("must be a whole number above zero", field=field.name)


Bound = Callable[[Limits], int]


class Fault(Exception):
    """A value that may not be on the wire; gathers the path to its field on the way out."""

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
    """Collects the bytes of a message, and on demand how many of them belong to which group of fields."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.parts: list[bytes] = []
        self.size = 0
        self.groups: dict[str, int] = {}
        self._group: str | None = None

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

    def grouped(self, group: str, write: Callable[[], None]) -> None:
        """Counts what `write` appends under `group`, unless it is already being counted under another."""
        if self._group is not None:
            write()
            return
        self._group, start = group, self.size
        write()
        self._group = None
        self.groups[group] = self.groups.get(group, 0) + self.size - start


class Reader:
    """Takes a message apart from front to back, and never reaches beyond its end."""

    def __init__(self, data: bytes, limits: Limits, at: int = 0) -> None:
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
        """The next number: shortest form, below 2^64."""
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
                raise Fault("a number too long to be read")
        if value > UINT64:
            raise Fault("a number too large to be read")
        if not byte and shift:
            raise Fault("a number not in its shortest form")
        return value


class Field(ABC):
    """One kind of field; `smallest` is the fewest bytes it can take."""

    smallest = 1

    @abstractmethod
    def write(self, out: Writer, value: Any) -> None:
        """Appends the value, or raises a `Fault`."""

    @abstractmethod
    def read(self, source: Reader) -> Any:
        """Takes the next value, or raises a `Fault`."""


class Uint(Field):
    """A whole number from `low` up to a bound."""

    def __init__(self, high: Bound = lambda _: UINT64, low: int = 0) -> None:
        self.low, self.high = low, high

    def _check(self, value: int, limits: Limits) -> None:
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
    """A float64 that is finite and not negative; minus zero is refused, for it equals zero."""

    smallest = 8

    @staticmethod
    def _check(value: float) -> None:
        if not math.isfinite(value) or math.copysign(1.0, value) < 0:
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
    """One of a few words, as its place in the list, in one byte."""

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
