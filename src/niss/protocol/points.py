"""Sums of multiples of public points, `sum_j n_j P_j`: what the repair of a round is made of.

libsodium makes them term by term, in constant time, and checks the order of every point: 60 microseconds each. Where
numba is installed (`pip install 'niss[fast]'`) they are compiled instead, **for public points and numbers only**, on
which their time depends (`niss.protocol.compiled_points`): 6 to 10 microseconds a term, and 24 more if its order is
checked by itself. What a client does with a secret goes through `keys.times`.

Many points are checked together (`of_prime_order`): each is put into 128 sums or not, as fresh coins fall, and the
orders of the sums are checked. A point with a part of small order makes each sum wrong with a probability of at least
one half, whatever the others are: all of them come out right with 2^-128 at most.

A compiled sum is used only if it agrees with libsodium, on what is no point, and on points of other orders, too. To
load it takes some seconds, and nothing is kept on disk: a process does so once it has made `WORTH_LOADING` terms.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import nacl.bindings as sodium

from niss.errors import RemoteProtocolError
from niss.protocol.keys import FIELD, ORDER, POINT_BYTES, times, times_base, to_scalar, total
from niss.protocol.wire import length_prefixed, uint64
from niss.randomness.normal_table import Demand

if TYPE_CHECKING:
    from niss.protocol.compiled_points import CompiledPoints

WORTH_LOADING = 2**16
# Twice as many as the sums that are made of them, each of whose orders is checked too.
_MANY = 256
BASE = times_base(to_scalar(1))
# The neutral element, as it is encoded: no partial, and no sum of some.
ZERO = b"\x01" + bytes(31)


def cut(points: bytes) -> list[bytes]:
    """Points that stand one after another."""
    return [points[start : start + POINT_BYTES] for start in range(0, len(points), POINT_BYTES)]


def hash_to_point(*fields: bytes) -> bytes:
    """A point of prime order whose logarithm nobody knows (Elligator 2 of a hash of the fields)."""
    uniform = hashlib.sha512(length_prefixed(*fields)).digest()[:POINT_BYTES]
    point: bytes = sodium.crypto_core_ed25519_from_uniform(uniform)
    return point


def sums(numbers: Sequence[int], points: bytes, *, known: bool = False) -> list[bytes]:
    """`sum_j n_j P_j` for each row of points, one after another, with as many in a row as there are numbers.

    numbers  between -2^255 and 2^255, and no multiples of the order
    known    the points are known to be of prime order, or their sums are checked otherwise

    A point that is none or, unless they are known, not of prime order is a `RemoteProtocolError`.
    """
    if any(number % ORDER == 0 for number in numbers):
        raise RemoteProtocolError("a scalar is zero")
    compiled = demand.compiled(len(points) // POINT_BYTES)
    return _reference(numbers, points) if compiled is None else compiled.sums(numbers, points, known=known)


def of_prime_order(points: bytes) -> bool:
    """Whether all of them are, found out together; False: only `sums` says so of each, or is as quick."""
    count = len(points) // POINT_BYTES
    compiled = demand.compiled(count)
    return compiled is not None and count >= _MANY and compiled.of_prime_order(points, os.urandom)


def _reference(numbers: Sequence[int], points: bytes) -> list[bytes]:
    scalars, made = [to_scalar(number) for number in numbers], cut(points)
    rows = (made[start : start + len(scalars)] for start in range(0, len(made), len(scalars)))
    return [total(map(times, scalars, row)) for row in rows]


@cache
def load_points() -> CompiledPoints | None:
    """The compiled sums; None without a numba that compiles them here, or if they do not agree with libsodium."""
    try:
        from niss.protocol.compiled_points import CompiledPoints

        compiled = CompiledPoints()
        return compiled if _agrees(compiled) else None
    except Exception:  # numba absent, too old, or at odds with numpy or the processor: libsodium does without
        return None


demand: Demand[CompiledPoints] = Demand(WORTH_LOADING, load_points)


def _agrees(compiled: CompiledPoints) -> bool:
    """On sums of few terms and many, with short numbers and long ones of both signs; and on what is not of prime order.

    y = 0 is of order 4, -1 of order 2, 1 of order 1; 2 is no point, and p + 1 another spelling of 1.
    """
    good = [hash_to_point(b"niss.points.v1", uint64(number)) for number in range(24)]
    numbers = [(-1) ** place * ((ORDER - 1) >> 10 * place) for place in range(24)]
    for count in (1, 2, 3, 24):
        rows = b"".join(good[:count] + good[::-1][:count])
        for known in (False, True):
            if compiled.sums(numbers[:count], rows, known=known) != _reference(numbers[:count], rows):
                return False
    small = [y.to_bytes(32, "little") for y in (0, FIELD - 1, 1, 2, FIELD + 1)]
    wrong = [*small, *(total((good[0], one)) for one in small[:2])]
    for point in wrong:
        try:
            compiled.sums(numbers[:2], good[1] + point)
        except RemoteProtocolError:
            continue
        return False
    return compiled.of_prime_order(b"".join(good), os.urandom) and not any(
        compiled.of_prime_order(b"".join((*good, point, good[0])), os.urandom) for point in wrong
    )
