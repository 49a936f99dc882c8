"""The normal quantile as a table of polynomials, the same on every platform.

A draw is a number `f` in `[2^-16, 2^63]` that stands for the tail probability `t = f / 2^64` in
`[2^-80, 1/2]`; its normal deviate is `z(t) = Phi^-1(1 - t) >= 0`. The octave of `f` (its exponent) and
the 6 leading bits of its mantissa choose a row; the other 46 bits, as a whole number `D`, the place in it:

    z = c0 + D (c1 + D (c2 + D (c3 + D (c4 + D c5)))).

The coefficients are made by `tools/build_normal_table.py` (interpolation at Chebyshev nodes in
50-digit arithmetic, rounded once) and shipped as float64, little-endian, six columns one after another.
The last row is the single point `f = 2^63`, where `z = 0`.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from niss.errors import DataError

FILE = "normal_table.f64le"
SHA256 = "5ade658e9f8223ab91e7e91346017201dbaf87e820268704ccb2ac093be15de5"

# Of `f`: tail probabilities from 2^-80 (10.22 deviations) to 1/2.
LOWEST_EXPONENT, HIGHEST_EXPONENT = -16, 63
# An octave of `f` is cut into 2^6 segments, each with a polynomial of its own.
SEGMENT_BITS = 6
PLACE_BITS = 52 - SEGMENT_BITS
COLUMNS = 6
ROWS = ((HIGHEST_EXPONENT - LOWEST_EXPONENT) << SEGMENT_BITS) + 1
# What a float64 with `LOWEST_EXPONENT` has in the bits above its place: row 0.
FIRST_ROW = (1023 + LOWEST_EXPONENT) << SEGMENT_BITS
# Of the bits of a float64, sign aside: those of its place, and those of its row once shifted.
PLACE_MASK = (1 << PLACE_BITS) - 1
ROW_MASK = (1 << (11 + SEGMENT_BITS)) - 1

Floats = NDArray[np.float64]
Int64s = NDArray[np.int64]


@cache
def normal_table() -> Floats:
    """The coefficients, `COLUMNS` x `ROWS`, read-only; verified against their SHA-256."""
    content = files(__package__).joinpath(FILE).read_bytes()
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise DataError(
            f"{FILE} is damaged: its SHA-256 is not the one of this version",
            hint="reinstall niss: this file is part of the package",
        )
    table = np.frombuffer(content, dtype="<f8").astype(np.float64).reshape(COLUMNS, ROWS)
    table.flags.writeable = False
    return table


def find_rows(uniform: Floats, out: Int64s) -> Int64s:
    """The table row of each `|f|`: its exponent and the leading bits of its mantissa."""
    np.right_shift(uniform.view(np.int64), PLACE_BITS, out=out)
    np.bitwise_and(out, np.int64(ROW_MASK), out=out)
    return np.subtract(out, FIRST_ROW, out=out)


def look_up(uniform: Floats, row: Int64s, spare: Int64s, work: Floats) -> Floats:
    """The deviate of each `|f|`, with the sign of `f`; in the last of three rows of `work`, `spare` overwritten.

    Each operation is its own pass, so that no compiler fuses two of them into one.
    """
    place, term = work[0], work[1]
    result: Floats = work[2]
    np.bitwise_and(uniform.view(np.int64), np.int64(PLACE_MASK), out=spare)
    place[:] = spare
    table = normal_table()
    table[-1].take(row, out=result, mode="clip")
    for coefficients in table[-2::-1]:
        np.multiply(result, place, out=result)
        coefficients.take(row, out=term, mode="clip")
        np.add(result, term, out=result)
    np.copysign(result, uniform, out=result)
    return result
