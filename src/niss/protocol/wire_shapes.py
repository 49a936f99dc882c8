"""Fields on the wire that hold bytes or other fields: keys, blobs, text, sequences, records."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from niss.protocol.wire_fields import Bound, Fault, Field, Limits, Reader, Writer


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


class Maybe(Field):
    """Bytes of one fixed length or none at all, after their length; a signature not yet made is empty."""

    def __init__(self, length: int) -> None:
        self.length = length

    def _check(self, length: int) -> None:
        if length not in (0, self.length):
            raise Fault(f"must be {self.length} bytes, or empty")

    def write(self, out: Writer, value: Any) -> None:
        if type(value) is not bytes:
            raise Fault("must be bytes")
        self._check(len(value))
        out.varint(len(value))
        out.raw(value)

    def read(self, source: Reader) -> bytes:
        length = source.varint()
        self._check(length)
        return source.raw(length)


class Blob(Field):
    """Bytes of any length between `low` and a bound, after their length."""

    def __init__(self, high: Bound, low: int = 0) -> None:
        self.low, self.high = low, high

    def _check(self, length: int, limits: Limits) -> None:
        if not self.low <= length <= self.high(limits):
            raise Fault(f"must hold between {self.low} and {self.high(limits)} bytes")

    def write(self, out: Writer, value: Any) -> None:
        if type(value) is not bytes:
            raise Fault("must be bytes")
        self._check(len(value), out.limits)
        out.varint(len(value))
        out.raw(value)

    def read(self, source: Reader) -> bytes:
        length = source.varint()
        self._check(length, source.limits)
        return source.raw(length)


class Text(Field):
    """Text in UTF-8, after its length in bytes."""

    def __init__(self, high: Bound) -> None:
        self.bytes = Blob(high)

    def write(self, out: Writer, value: Any) -> None:
        if type(value) is not str:
            raise Fault("must be text (str)")
        try:
            data = value.encode()
        except UnicodeEncodeError:
            raise Fault("must be text that UTF-8 can hold") from None
        self.bytes.write(out, data)

    def read(self, source: Reader) -> str:
        try:
            return self.bytes.read(source).decode()
        except UnicodeDecodeError:
            raise Fault("must be text in UTF-8") from None


class Sequence(Field):
    """A tuple, after its length. With `rising`, that key must grow from item to item; `unique` may not recur."""

    def __init__(
        self,
        item: Field,
        high: Bound,
        *,
        rising: Callable[[Any], Any] | None = None,
        unique: Callable[[Any], Any] | None = None,
    ) -> None:
        self.item, self.high, self.rising, self.unique = item, high, rising, unique

    def _check_count(self, count: int, limits: Limits) -> None:
        if count > self.high(limits):
            raise Fault(f"must hold at most {self.high(limits)} items")

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
    """A frozen dataclass, field by field in its own order.

    `rule` says what is wrong between fields, if anything; `groups` sorts fields for the size report.
    """

    def __init__(
        self,
        kind: type[Any],
        /,
        *,
        rule: Callable[[Any], str | None] | None = None,
        groups: dict[str, str] | None = None,
        **layout: Field,
    ) -> None:
        if tuple(layout) != tuple(field.name for field in dataclasses.fields(kind)):
            raise TypeError(f"the wire layout of {kind.__name__} does not have its fields in its order")
        self.kind, self.rule, self.groups = kind, rule, groups or {}
        self.layout = layout
        self.smallest = sum(field.smallest for field in layout.values())

    def _check(self, value: Any) -> None:
        broken = None if self.rule is None else self.rule(value)
        if broken is not None:
            raise Fault(broken)

    def write(self, out: Writer, value: Any) -> None:
        if type(value) is not self.kind:
            raise Fault(f"must be a {self.kind.__name__}")
        for name, field in self.layout.items():
            try:
                if name in self.groups:
                    out.grouped(self.groups[name], partial(field.write, out, getattr(value, name)))
                else:
                    field.write(out, getattr(value, name))
            except Fault as fault:
                raise fault.within(name) from None
        self._check(value)

    def read(self, source: Reader) -> Any:
        values = {}
        for name, field in self.layout.items():
            try:
                values[name] = field.read(source)
            except Fault as fault:
                raise fault.within(name) from None
        result = self.kind(**values)
        self._check(result)
        return result
