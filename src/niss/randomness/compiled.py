"""The inner loop of `SecretStream`, compiled by numba where that is installed: `pip install 'niss[fast]'`.

For every word outside the tail it does what the reference, `SecretStream` itself, does in numpy: the same operations,
all rounded exactly by IEEE 754, in the same order, so the same bits come out. LLVM fuses no product with a sum unless
told to; a loop that did, or that differed from the reference in any other way on words from every row of the table, is
not used. Its time and its memory accesses depend on what the reference's depend on: which rows of the table are looked
up, and which words lie in the tail, one in 2^19.

Loading numba and compiling take about a second, and nothing is kept on disk. So a process does both once it has drawn
`WORTH_LOADING` numbers, which take the reference about as long: at worst, loading doubles the time spent so far.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from niss.randomness.normal_table import (
    COLUMNS,
    FIRST_ROW,
    LOWEST_EXPONENT,
    PLACE_BITS,
    PLACE_MASK,
    ROW_MASK,
    SEGMENT_BITS,
    find_rows,
    look_up,
    normal_table,
)

WORTH_LOADING = 2**26
# Below this row lies the tail, `|v| < 2^44`, where the stream adds bits of a second keystream.
TAIL_ROW = (44 - LOWEST_EXPONENT) << SEGMENT_BITS
_CHUNK = 128

Words = NDArray[np.int64]
# (words, target, deviation, flip, tail), all contiguous: adds the noise of the words outside the tail to `target`, or
# subtracts it if `flip` is -1 and not 0; writes the places of the other words to `tail`, returns how many there are.
Loop = Callable[[Words, NDArray[np.uint64], float, int, Words], int]


class Demand:
    """How many numbers a process has drawn, and whether that many are worth a compiled loop."""

    def __init__(self, worth: int = WORTH_LOADING) -> None:
        self.worth, self.drawn = worth, 0

    def loop(self, draws: int) -> Loop | None:
        """The loop for so many draws; None where the reference is to be used."""
        self.drawn += draws
        return load_loop() if self.drawn >= self.worth else None


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

    def loop(words: Words, target: NDArray[np.uint64], deviation: float, flip: int, tail: Words) -> int:
        return int(compiled(words, table, target, deviation, flip, tail))

    return loop


def _rows_of_table() -> NDArray[np.float64]:
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
    words: Words,
    table: NDArray[np.float64],
    target: NDArray[np.uint64],
    deviation: float,
    flip: int,
    tail: Words,
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
