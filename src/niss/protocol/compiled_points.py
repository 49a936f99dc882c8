"""Arithmetic of public points, compiled by numba: imported by `niss.protocol.points` alone, which says when it is used.

A field element is five limbs of 51 bits, lowest first. Limbs up to 2^54 may be multiplied; those of a product are just
above 2^51. Points are extended coordinates (X, Y, Z, T) with `x = X / Z`, `y = Y / Z`, `T = XY / Z` (Hisil, Wong,
Carter and Dawson, 2008; their formula for a sum holds for all points). What is added often is kept as
(Y + X, Y - X, 2 Z, 2 d T). A sum is made from the top bit down, its doublings shared by all terms (Straus, 1964). Of a
number only odd digits from -15 to 15 count, in one of six places on average: eight multiples of each point are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from niss.errors import RemoteProtocolError
from niss.protocol.keys import FIELD, ORDER, POINT_BYTES

Function = TypeVar("Function", bound=Callable[..., Any])
# Of a field element, of a point.
Element = Any
Point = Any

BITS, DIGITS, MULTIPLES = 51, 257, 8
_CHECKS, _TOGETHER = 128, 4
_WORD, _WIDE = ir.IntType(64), ir.IntType(128)
_ELEMENT = numba.types.UniTuple(numba.uint64, 5)


def _element(number: int) -> Element:
    return tuple(np.uint64(number % FIELD >> BITS * place & (1 << BITS) - 1) for place in range(5))


D = -121665 * pow(121666, -1, FIELD) % FIELD
ROOT, CURVE, TWICE_CURVE = _element(pow(2, (FIELD - 1) // 4, FIELD)), _element(D), _element(2 * D)
NONE, ONE = _element(0), _element(1)
# Four times the prime, so that nothing becomes negative.
ABOVE = tuple(np.uint64(4 * (2**BITS - (19 if place == 0 else 1))) for place in range(5))
LOW, SHIFT, NINETEEN = np.uint64((1 << BITS) - 1), np.uint64(BITS), np.uint64(19)
BIT, BYTE, TOP = np.uint64(1), np.uint64(255), np.uint64(63)
U12, U13, U25, U26, U38, U39 = (np.uint64(bits) for bits in (12, 13, 25, 26, 38, 39))


def compiled(function: Function) -> Function:
    """Compiled when it is first called, from other compiled functions."""
    made: Function = numba.njit(nogil=True)(function)
    return made


def entrance(*arguments: str) -> Callable[[Function], Function]:
    """Compiled at once, for arguments of these types."""

    def decorate(function: Function) -> Function:
        made: Function = numba.njit(f"boolean({', '.join(arguments)})", nogil=True)(function)
        return made

    return decorate


def _product(builder: Any, one: Any, other: Any) -> Any:
    """Five sums of products of 128 bits; limbs beyond the last come back nineteenfold, as 2^255 = 19."""

    def constant(value: int, kind: Any = _WORD) -> Any:
        return ir.Constant(kind, value)

    left = [builder.zext(builder.extract_value(one, place), _WIDE) for place in range(5)]
    limbs = [builder.extract_value(other, place) for place in range(5)]
    right = [builder.zext(limb, _WIDE) for limb in limbs]
    folded = [builder.zext(builder.mul(limb, constant(19)), _WIDE) for limb in limbs]
    carry, found = None, []
    for place in range(5):
        total = carry
        for number in range(5):
            factor = right[place - number] if number <= place else folded[place - number + 5]
            term = builder.mul(left[number], factor)
            total = term if total is None else builder.add(total, term)
        found.append(builder.and_(builder.trunc(total, _WORD), constant(int(LOW))))
        carry = builder.lshr(total, constant(BITS, _WIDE))
    first = builder.add(found[0], builder.mul(builder.trunc(carry, _WORD), constant(19)))
    found[0] = builder.and_(first, constant(int(LOW)))
    found[1] = builder.add(found[1], builder.lshr(first, constant(BITS)))
    return cgutils.pack_array(builder, found)


def _typed(_typing: Any, _one: Any, _other: Any) -> Any:
    return _ELEMENT(_ELEMENT, _ELEMENT), lambda _context, builder, _signature, both: _product(builder, *both)


mul: Callable[[Element, Element], Element] = intrinsic(_typed)


@compiled
def add(a: Element, b: Element) -> Element:
    return (a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4] + b[4])


@compiled
def sub(a: Element, b: Element) -> Element:
    return (
        a[0] + ABOVE[0] - b[0],
        a[1] + ABOVE[1] - b[1],
        a[2] + ABOVE[2] - b[2],
        a[3] + ABOVE[3] - b[3],
        a[4] + ABOVE[4] - b[4],
    )


@compiled
def squared(a: Element, times: int) -> Element:
    for _ in range(times):
        a = mul(a, a)
    return a


@compiled
def power(a: Element) -> Element:
    """`a^(2^252 - 3)`, from which square roots and inverses follow."""
    two = mul(a, a)
    nine = mul(squared(two, 2), a)
    five_ones = mul(squared(mul(nine, two), 1), nine)  # a^(2^5 - 1)
    ten = mul(squared(five_ones, 5), five_ones)
    twenty = mul(squared(ten, 10), ten)
    fifty = mul(squared(mul(squared(twenty, 20), twenty), 10), ten)
    hundred = mul(squared(fifty, 50), fifty)
    return mul(squared(mul(squared(mul(squared(hundred, 100), hundred), 50), fifty), 2), a)


@compiled
def inverse(a: Element) -> Element:
    """`a^(p - 2)`, and `p - 2 = 8 (2^252 - 3) + 3`."""
    return mul(squared(power(a), 3), mul(mul(a, a), a))


@compiled
def carried(a: Element, more: Any) -> Element:
    """Limbs below 2^51, and what goes beyond the last of them; `more` is added to the first."""
    b = a[0] + more
    c = a[1] + (b >> SHIFT)
    d = a[2] + (c >> SHIFT)
    e = a[3] + (d >> SHIFT)
    f = a[4] + (e >> SHIFT)
    return (b & LOW, c & LOW, d & LOW, e & LOW, f & LOW), f >> SHIFT


@compiled
def reduced(a: Element) -> Element:
    """The one form below the prime."""
    for _ in range(2):
        a, beyond = carried(a, np.uint64(0))
        a = (a[0] + NINETEEN * beyond, a[1], a[2], a[3], a[4])
    # It reaches the prime just if 19 more would reach 2^255.
    _, reaches = carried(a, NINETEEN)
    found, _ = carried(a, NINETEEN * reaches)
    return found


@compiled
def is_none(a: Element) -> bool:
    a = reduced(a)
    found: bool = (a[0] | a[1] | a[2] | a[3] | a[4]) == np.uint64(0)
    return found


@compiled
def doubled(p: Point) -> Point:
    a, b, z, both = mul(p[0], p[0]), mul(p[1], p[1]), mul(p[2], p[2]), add(p[0], p[1])
    h, g = add(a, b), sub(a, b)
    e, f = sub(h, mul(both, both)), add(add(z, z), g)
    return (mul(e, f), mul(g, h), mul(f, g), mul(e, h))


@compiled
def ready(p: Point) -> Point:
    """As it is added: (Y + X, Y - X, 2 Z, 2 d T)."""
    return (add(p[1], p[0]), sub(p[1], p[0]), add(p[2], p[2]), mul(p[3], TWICE_CURVE))


@compiled
def plus(p: Point, q: Point, minus: bool) -> Point:
    """The sum with what is `ready`, or the difference."""
    above, below = (q[1], q[0]) if minus else (q[0], q[1])
    a, b = mul(sub(p[1], p[0]), below), mul(add(p[1], p[0]), above)
    c, d = mul(p[3], q[3]), mul(p[2], q[2])
    e, h = sub(b, a), add(b, a)
    f, g = (add(d, c), sub(d, c)) if minus else (sub(d, c), add(d, c))
    return (mul(e, f), mul(g, h), mul(f, g), mul(e, h))


@compiled
def keep(p: Point, at: Any) -> None:
    for part in range(4):
        for limb in range(5):
            at[part, limb] = p[part][limb]


@compiled
def kept(at: Any) -> Point:
    x, y, z, t = at[0], at[1], at[2], at[3]
    return (
        (x[0], x[1], x[2], x[3], x[4]),
        (y[0], y[1], y[2], y[3], y[4]),
        (z[0], z[1], z[2], z[3], z[4]),
        (t[0], t[1], t[2], t[3], t[4]),
    )


@compiled
def decoded(data: Any) -> Any:
    """Whether it is a point as RFC 8032 spells it, and not of order 1 or 2; and the point."""
    w = np.zeros(4, dtype=np.uint64)
    for place in range(32):
        w[place >> 3] |= np.uint64(data[place]) << np.uint64(8 * (place & 7))
    y = (
        w[0] & LOW,
        (w[0] >> SHIFT | w[1] << U13) & LOW,
        (w[1] >> U38 | w[2] << U26) & LOW,
        (w[2] >> U25 | w[3] << U39) & LOW,
        (w[3] >> U12) & LOW,
    )
    whole = reduced(y)
    fine = whole[0] == y[0] and whole[1] == y[1] and whole[4] == y[4]
    square = mul(y, y)
    above, below = sub(square, ONE), add(mul(square, CURVE), ONE)
    third = mul(mul(below, below), below)
    x = mul(mul(above, third), power(mul(above, mul(mul(third, third), below))))
    check = mul(mul(x, x), below)
    if not is_none(sub(check, above)):
        x = mul(x, ROOT)
        fine = fine and is_none(add(check, above))
    x = reduced(x)
    if x[0] & BIT != w[3] >> TOP:
        x = reduced(sub(NONE, x))
    return fine and not is_none(x), (x, y, ONE, mul(x, y))


@compiled
def encode(p: Point, out: Any) -> None:
    z = inverse(p[2])
    x, y = reduced(mul(p[0], z)), reduced(mul(p[1], z))
    w = (
        y[0] | y[1] << SHIFT,
        y[1] >> U13 | y[2] << U38,
        y[2] >> U26 | y[3] << U25,
        y[3] >> U39 | y[4] << U12 | (x[0] & BIT) << TOP,
    )
    for place in range(32):
        out[place] = np.uint8(w[place >> 3] >> np.uint64(8 * (place & 7)) & BYTE)


@compiled
def to_digits(number: Any, out: Any) -> None:
    """Of a number of 255 bits, of which bit 255 is the sign."""
    for place in range(256):
        out[place] = number[place >> 3] >> (place & 7) & 1
    negative = out[255] == 1
    out[255] = out[256] = 0
    for place in range(256):
        if out[place] == 0:
            continue
        for ahead in range(1, min(6, DIGITS - place)):
            if out[place + ahead] == 0:
                continue
            more = out[place + ahead] << ahead
            if out[place] + more <= 15:
                out[place] += more
                out[place + ahead] = 0
            elif out[place] - more >= -15:
                out[place] -= more
                carry = place + ahead
                while out[carry] != 0:
                    out[carry] = 0
                    carry += 1
                out[carry] = 1
            else:
                break
    if negative:
        for place in range(DIGITS):
            out[place] = -out[place]


@compiled
def multiples(p: Point, table: Any) -> None:
    """P, 3 P, ..., 15 P, ready to be added."""
    twice = ready(doubled(p))
    for number in range(MULTIPLES):
        keep(ready(p), table[number])
        p = plus(p, twice, False)


@compiled
def summed(digits: Any, tables: Any) -> Point:
    """The sum of numbers, by their digits, times points, by their multiples."""
    found, count, top = (NONE, ONE, ONE, NONE), len(digits), DIGITS - 1
    while top > 0 and not digits[:, top].any():
        top -= 1
    for place in range(top, -1, -1):
        found = doubled(found)
        for number in range(count):
            digit = digits[number, place]
            if digit != 0:
                found = plus(found, kept(tables[number, abs(digit) >> 1]), digit < 0)
    return found


@compiled
def has_order(p: Point, order: Any, table: Any) -> bool:
    multiples(p, table[0])
    zero = summed(order, table)
    return is_none(zero[0]) and is_none(sub(zero[1], zero[2]))


@entrance("uint8[:, ::1]", "uint8[:, :, ::1]", "int8[:, ::1]", "boolean", "uint8[:, ::1]")
def sum_rows(numbers: Any, points: Any, order: Any, known: bool, out: Any) -> bool:
    """The sum of each row of points times the numbers; False at the first point that is none."""
    count = len(numbers)
    digits = np.empty((count, DIGITS), dtype=np.int8)
    for number in range(count):
        to_digits(numbers[number], digits[number])
    tables = np.empty((count, MULTIPLES, 4, 5), dtype=np.uint64)
    for row in range(len(points)):
        for number in range(count):
            fine, point = decoded(points[row, number])
            if not fine or not (known or has_order(point, order, tables[number : number + 1])):
                return False
            multiples(point, tables[number])
        encode(summed(digits, tables), out[row])
    return True


@entrance("uint8[:, ::1]", "uint8[:, ::1]", "int8[:, ::1]")
def check_orders(points: Any, coins: Any, order: Any) -> bool:
    """Whether sums in which each of the points is or is not, as its coins say, are of prime order.

    Of four points the 16 sums that there are of some of them are made first: a half-byte of coins chooses one.
    """
    sums = np.zeros((_CHECKS, 4, 5), dtype=np.uint64)
    some = np.empty((1 << _TOGETHER, 4, 5), dtype=np.uint64)
    for check in range(_CHECKS):
        keep((NONE, ONE, ONE, NONE), sums[check])
    for first in range(0, len(points), _TOGETHER):
        keep((NONE, ONE, ONE, NONE), some[0])
        for number in range(_TOGETHER):
            if first + number == len(points):
                break
            fine, point = decoded(points[first + number])
            if not fine:
                return False
            one = ready(point)
            for others in range(1 << number):
                keep(plus(kept(some[others]), one, False), some[others | 1 << number])
        have = 1 << min(_TOGETHER, len(points) - first)
        for chosen in range(have):
            keep(ready(kept(some[chosen])), some[chosen])
        for check in range(_CHECKS):
            chosen = (coins[first // _TOGETHER, check >> 1] >> 4 * (check & 1)) & (have - 1)
            if chosen != 0:
                keep(plus(kept(sums[check]), kept(some[chosen]), False), sums[check])
    table = np.empty((1, MULTIPLES, 4, 5), dtype=np.uint64)
    for check in range(_CHECKS):  # noqa: SIM110 - numba knows no generator that is passed on
        if not has_order(kept(sums[check]), order, table):
            return False
    return True


class CompiledPoints:
    """The two entrances, with bytes and numbers for arrays; both let other threads run."""

    def __init__(self) -> None:
        self._order = np.empty((1, DIGITS), dtype=np.int8)
        to_digits(_bytes(ORDER.to_bytes(POINT_BYTES, "little"), POINT_BYTES), self._order[0])

    def sums(self, numbers: Sequence[int], points: bytes, *, known: bool = False) -> list[bytes]:
        """As `points.sums`."""
        signed = (abs(number) | (number < 0) << 255 for number in numbers)
        scalars = _bytes(
            b"".join(number.to_bytes(POINT_BYTES, "little") for number in signed), len(numbers), POINT_BYTES
        )
        rows = _bytes(points, -1, len(numbers), POINT_BYTES)
        out = np.empty((len(rows), POINT_BYTES), dtype=np.uint8)
        if not sum_rows(scalars, rows, self._order, known, out):
            raise RemoteProtocolError("a point is not on the curve, or not of prime order")
        return [row.tobytes() for row in out]

    def of_prime_order(self, points: bytes, entropy: Callable[[int], bytes]) -> bool:
        """As `points.of_prime_order`."""
        rows = _bytes(points, -1, POINT_BYTES)
        groups, width = -(-len(rows) // _TOGETHER), _CHECKS // 2
        return bool(check_orders(rows, _bytes(entropy(groups * width), groups, width), self._order))


def _bytes(data: bytes, *shape: int) -> Any:
    return np.frombuffer(bytearray(data), dtype=np.uint8).reshape(shape)
