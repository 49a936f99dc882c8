"""The normal quantile as a table of polynomials, the same on every platform.

A draw is a number `f` in `[2^-16, 2^63]` that stands for the tail probability `t = f / 2^64` in
`[2^-80, 1/2]`; its normal deviate is `z(t) = Phi^-1(1 - t) >= 0`. The octave of `f` (its exponent) and
the 6 leading bits of its mantissa choose a row; the other 46 bits, as a whole number `D`, the place in it:

    z = c0 + D (c1 + D (c2 + D (c3 + D (c4 + D c5)))).

The coefficients are made by `tools/build_normal_table.py` (interpolation at Chebyshev nodes in
50-digit arithmetic, rounded once) and shipped as float64, little-endian, six columns one after another.
The last row is the single point `f = 2^63`, where `z = 0`.

**A compiled loop** over it is used by `SecretStream` where numba is installed: `pip install 'niss[fast]'`.
For every word outside the tail it does what the reference, `SecretStream` itself, does in numpy: the same operations,
all rounded exactly by IEEE 754, in the same order, so the same bits come out. LLVM fuses no product with a sum unless
told to; a loop that did, or that differed from the reference in any other way on words from every row of the table, is
not used. Its time and its memory accesses depend on what the reference's depend on: which rows of the table are looked
up, and which words lie in the tail, one in 2^19.

Loading numba and compiling take about a second, and nothing is kept on disk. So a process does both once it has drawn
`WORTH_LOADING` numbers, which take the reference about as long: at worst, loading doubles the time spent so far.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Generic, TypeVar

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

WORTH_LOADING = 2**26
# Below this row lies the tail, `|v| < 2^44`, where the stream adds bits of a second keystream.
TAIL_ROW = (44 - LOWEST_EXPONENT) << SEGMENT_BITS
_CHUNK = 128

Compiled = TypeVar("Compiled")
Floats = NDArray[np.float64]
Int64s = NDArray[np.int64]
# (words, target, deviation, flip, tail), all contiguous: adds the noise of the words outside the tail to `target`, or
# subtracts it if `flip` is -1 and not 0; writes the places of the other words to `tail`, returns how many there are.
Loop = Callable[[Int64s, NDArray[np.uint64], float, int, Int64s], int]


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


class Demand(Generic[Compiled]):
    """How much of something a process has done, and whether that much is worth what `load` compiles for it."""

    def __init__(self, worth: int, load: Callable[[], Compiled | None]) -> None:
        self.worth, self.load, self.done = worth, load, 0

    def compiled(self, amount: int) -> Compiled | None:
        """What does so much more of it; None where the reference is to be used."""
        self.done += amount
        return self.load() if self.done >= self.worth else None


@cache
def load_loop() -> Loop | None:
    """The compiled loop, or None: without a numba that compiles it here, or if it does not agree with the reference."""
    try:
        loop = _compile()
    except (
        Exception
    ):  # numba absent, too old, or at odds with numpy or the processor: the reference does without
        return None
    return loop if loop is not None and _agrees(loop) else None


def _compile() -> Loop | None:
    import numba

    if numba.config.DISABLE_JIT:
        return None
    signature = "int64(int64[::1], float64[:, ::1], uint64[::1], float64, int64, int64[::1])"
    compiled = numba.njit(signature, nogil=True, boundscheck=False)(_add_bulk)
    table = _rows_of_table()

    def loop(words: Int64s, target: NDArray[np.uint64], deviation: float, flip: int, tail: Int64s) -> int:
        return int(compiled(words, table, target, deviation, flip, tail))

    return loop


def _rows_of_table() -> Floats:
    """The table row by row, each in a cache line of its own."""
    table = normal_table()
    width = 8
    memory = np.zeros((table.shape[1] + 1) * width)
    start = (-memory.ctypes.data // memory.itemsize) % width
    rows = memory[start : start + table.shape[1] * width].reshape(-1, width)
    rows[:, :COLUMNS] = table.T
    return rows


def _agrees(loop: Loop) -> bool:
    """Whether the loop gives what the reference gives, with every bit of the deviates shown, added and subtracted.

    20,480 words, evenly spread over both signs and all octaves outside the tail, and a few within it.
    """
    spread = (np.arange(1024, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)
    words = np.concatenate([spread >> shift for shift in range(20)])
    uniform = (words | 1).astype(np.float64)
    row = find_rows(uniform, out=np.empty_like(words))
    expected = look_up(uniform, row, np.empty_like(words), np.empty((3, words.size)))
    outside = row >= TAIL_ROW
    noise = np.where(outside, np.rint(expected * 2.0**40), 0.0).astype(np.int64).view(np.uint64)
    for flip in (0, -1):
        target = np.arange(words.size, dtype=np.uint64)
        wanted = target - noise if flip else target + noise
        tail = np.empty_like(words)
        found = loop(words, target, 2.0**40, flip, tail)
        if not np.array_equal(target, wanted) or tail[:found].tolist() != np.flatnonzero(~outside).tolist():
            return False
    return True


def _add_bulk(
    words: Int64s,
    table: Floats,
    target: NDArray[np.uint64],
    deviation: float,
    flip: int,
    tail: Int64s,
) -> int:
    # Only the look-up goes word by word; the loops before and after it are ones that compilers turn into vector
    # instructions. Coefficients are kept two by two because a processor moves two as fast as one.
    rows = np.empty(_CHUNK, dtype=np.int64)
    pairs = np.empty((3, 2 * _CHUNK))
    found = 0
    for start in range(0, words.size, _CHUNK):
        size = min(_CHUNK, words.size - start)
        part, sums = words[start : start + size], target[start : start + size]
        lowest = np.int64(TAIL_ROW)
        for at in range(size):
            bits = np.float64(part[at] | 1).view(np.int64)
            rows[at] = ((bits >> PLACE_BITS) & ROW_MASK) - FIRST_ROW
            lowest = min(lowest, rows[at])
        for at in range(size):
            row = np.uint64(rows[at])
            c0, c1, c2, c3, c4, c5 = (
                table[row, 0],
                table[row, 1],
                table[row, 2],
                table[row, 3],
                table[row, 4],
                table[row, 5],
            )
            pairs[0, 2 * at], pairs[0, 2 * at + 1] = c0, c1
            pairs[1, 2 * at], pairs[1, 2 * at + 1] = c2, c3
            pairs[2, 2 * at], pairs[2, 2 * at + 1] = c4, c5
        if lowest < TAIL_ROW:
            for at in range(size):
                if rows[at] < TAIL_ROW:
                    tail[found] = start + at
                    found += 1
                    pairs[:, 2 * at : 2 * at + 2] = 0.0
        for at in range(size):
            bits = np.float64(part[at] | 1).view(np.int64)
            place = np.float64(bits & PLACE_MASK)
            deviate = pairs[2, 2 * at + 1]
            deviate = deviate * place
            deviate = deviate + pairs[2, 2 * at]
            deviate = deviate * place
            deviate = deviate + pairs[1, 2 * at + 1]
            deviate = deviate * place
            deviate = deviate + pairs[1, 2 * at]
            deviate = deviate * place
            deviate = deviate + pairs[0, 2 * at + 1]
            deviate = deviate * place
            deviate = deviate + pairs[0, 2 * at]
            steps = np.int64(np.rint(deviate * deviation))
            negative = (bits ^ flip) >> 63
            sums[at] += np.uint64((steps ^ negative) - negative)
    return found
