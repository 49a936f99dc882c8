"""Vectors of residues modulo 2^bits as bytes, without a spare bit: what an upload carries.

The values lie one after another, lowest bit first, and the last byte is filled up with zeros: for 32 and 64 bits
that is a plain little-endian array. Every vector has exactly one packed form, and only that is unpacked.

Rounds use 32 or 64 bits (`Grid.check_fits`), which cost a copy. The other widths go through single bits: 64 bytes of
memory for each value.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niss.errors import LocalProtocolError, RemoteProtocolError

NARROWEST, WIDEST = 16, 64
_PLAIN = {16: "<u2", 32: "<u4", 64: "<u8"}


def packed_size(count: int, modulus_bits: int) -> int:
    """How many bytes `count` values take: `ceil(count * modulus_bits / 8)`."""
    if type(modulus_bits) is not int or not NARROWEST <= modulus_bits <= WIDEST:
        raise LocalProtocolError(f"modulus_bits: must be a whole number from {NARROWEST} to {WIDEST}")
    if type(count) is not int or count < 0:
        raise LocalProtocolError("count: must be a whole number, 0 or more")
    return (count * modulus_bits + 7) // 8


def pack(values: NDArray[np.uint64] | NDArray[np.int64], modulus_bits: int) -> bytes:
    """The values modulo 2^modulus_bits (negative ones wrap around, as in two's complement), packed.

    `values` has one axis, of uint64 or int64; `modulus_bits` is 16 to 64. Anything else is a `LocalProtocolError`.
    """
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype not in (np.uint64, np.int64):
        raise LocalProtocolError("values: must be a one-dimensional array of uint64 or int64")
    packed_size(values.size, modulus_bits)
    if modulus_bits in _PLAIN:
        return values.view(np.uint64).astype(_PLAIN[modulus_bits]).tobytes()  # keeps the low bits
    octets = values.view(np.uint64).astype("<u8").view(np.uint8).reshape(-1, 8)
    bits = np.unpackbits(octets, axis=1, bitorder="little", count=modulus_bits)
    return np.packbits(bits, bitorder="little").tobytes()


def check_packed(data: bytes, count: int, modulus_bits: int) -> None:
    """Refuse (`RemoteProtocolError`) what `pack` cannot have made of `count` values."""
    size = packed_size(count, modulus_bits)
    if len(data) != size:
        raise RemoteProtocolError(
            f"vector: has {len(data)} bytes, but {count} values of {modulus_bits} bits take {size}"
        )
    spare = 8 * size - count * modulus_bits
    if size and data[-1] >> (8 - spare):
        raise RemoteProtocolError("vector: the bits after the last value must be zero")


def unpack(data: bytes, count: int, modulus_bits: int) -> NDArray[np.uint64]:
    """The `count` values that were packed, in an array of their own.

    What `pack` cannot have made is a `RemoteProtocolError`: another length, or bits set after the last value.
    """
    check_packed(data, count, modulus_bits)
    if modulus_bits in _PLAIN:
        return _plain(data, modulus_bits).astype(np.uint64)
    flat = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little", count=count * modulus_bits)
    octets = np.zeros((count, 8), dtype=np.uint8)
    octets[:, : -(-modulus_bits // 8)] = np.packbits(
        flat.reshape(count, modulus_bits), axis=1, bitorder="little"
    )
    return octets.reshape(-1).view("<u8").astype(np.uint64)


def sum_packed(vectors: Iterable[bytes], count: int, modulus_bits: int) -> NDArray[np.uint64]:
    """The sum of packed vectors of `count` values; only its residue modulo 2^modulus_bits means anything.

    One vector at a time: memory is the sum and, for 16, 32 and 64 bits, nothing more.
    """
    total: NDArray[Any] = np.zeros(count, dtype=_PLAIN.get(modulus_bits, "<u8"))
    for data in vectors:
        if modulus_bits in _PLAIN:
            check_packed(data, count, modulus_bits)
            total += _plain(data, modulus_bits)
        else:
            total += unpack(data, count, modulus_bits)
    return total.astype(np.uint64)


def _plain(data: bytes, modulus_bits: int) -> NDArray[Any]:
    return np.frombuffer(data, dtype=_PLAIN[modulus_bits])
