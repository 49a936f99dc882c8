"""Vectors of residues modulo 2^bits as bytes, without a spare bit: what an upload carries.

The values lie one after another, lowest bit first, and the last byte is filled up with zeros: for 32 and 64 bits
that is a plain little-endian array. Every vector has exactly one packed form, and only that is unpacked. For other
widths 64 / gcd(bits, 64) values fill whole 64-bit words, and numpy shifts a column of such blocks at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd
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
    """The values modulo 2^modulus_bits (negative ones wrap around, as in two's complement), packed."""
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype not in (np.uint64, np.int64):
        raise LocalProtocolError("values: must be a one-dimensional array of uint64 or int64")
    size = packed_size(values.size, modulus_bits)
    residues = values.view(np.uint64)  # negative numbers wrap modulo 2^64
    if modulus_bits in _PLAIN:
        return residues.astype(_PLAIN[modulus_bits]).tobytes()  # keeps the low bits
    residues = residues & np.uint64((1 << modulus_bits) - 1)
    period, width = _block(modulus_bits)
    blocks = -(-residues.size // period)
    columns: NDArray[np.uint64] = np.zeros((blocks, period), dtype=np.uint64)
    columns.reshape(-1)[: residues.size] = residues
    words: NDArray[np.uint64] = np.zeros((blocks, width), dtype=np.uint64)
    for column in range(period):
        word, shift = divmod(column * modulus_bits, 64)
        words[:, word] |= columns[:, column] << np.uint64(shift)
        if shift + modulus_bits > 64:
            words[:, word + 1] |= columns[:, column] >> np.uint64(64 - shift)
    return words.astype("<u8").tobytes()[:size]


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
    """The `count` values that were packed, in an array of their own; refuses what `pack` cannot have made."""
    check_packed(data, count, modulus_bits)
    if count == 0:
        return np.zeros(0, dtype=np.uint64)
    if modulus_bits in _PLAIN:
        return _plain(data, modulus_bits).astype(np.uint64)
    size = packed_size(count, modulus_bits)
    period, width = _block(modulus_bits)
    blocks = -(-count // period)
    padded = np.zeros(blocks * width * 8, dtype=np.uint8)
    padded[:size] = np.frombuffer(data, dtype=np.uint8)
    words = padded.view("<u8").astype(np.uint64, copy=False).reshape(blocks, width)
    columns: NDArray[np.uint64] = np.empty((blocks, period), dtype=np.uint64)
    for column in range(period):
        word, shift = divmod(column * modulus_bits, 64)
        columns[:, column] = words[:, word] >> np.uint64(shift)
        if shift + modulus_bits > 64:
            columns[:, column] |= words[:, word + 1] << np.uint64(64 - shift)
    columns &= np.uint64((1 << modulus_bits) - 1)
    return columns.reshape(-1)[:count].copy()


def sum_packed(vectors: Iterable[bytes], count: int, modulus_bits: int) -> NDArray[np.uint64]:
    """The sum of packed vectors; only its residue modulo 2^modulus_bits means anything."""
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


def _block(modulus_bits: int) -> tuple[int, int]:
    """The fewest values that fill whole 64-bit words, and how many words those are."""
    common = gcd(modulus_bits, 64)
    return 64 // common, modulus_bits // common
