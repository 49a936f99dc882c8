"""Long vectors that are made a block at a time, as often as they are read, and never held as a whole.

An update is the difference of two models, clipped, divided and rounded. Every one of these steps makes an entry of an
entry, so none needs a vector of its own: a client of a large model has no room for copies of it in float64.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from niss.errors import LocalProtocolError

BLOCK = 16384
Floats = NDArray[np.floating[Any]]


class Blocks:
    """A vector of floating-point numbers, read from an array or made anew by each reading.

    size    how many numbers there are
    dtype   of the blocks
    read    the entries from `start` up to `stop`; not to be written to
    """

    def __init__(
        self,
        size: int,
        read: Callable[[int, int], Floats],
        dtype: DTypeLike = np.float64,
        sources: Sequence[Blocks] = (),
    ) -> None:
        self.size, self.read, self._sources = size, read, sources
        self.dtype: np.dtype[Any] = np.dtype(dtype)

    @classmethod
    def of(cls, vector: Floats | Blocks) -> Blocks:
        """The entries of an array, in its order; blocks are what they are."""
        if isinstance(vector, Blocks):
            return vector
        flat = vector.reshape(-1)
        return cls(flat.size, lambda start, stop: flat[start:stop], flat.dtype)

    @classmethod
    def joined(cls, parts: Sequence[Blocks]) -> Blocks:
        """Parts one after another."""
        ends = list(accumulate(part.size for part in parts))

        def read(start: int, stop: int) -> Floats:
            found, at = [], start
            while at < stop:
                number = bisect_right(ends, at)
                part, before = parts[number], ends[number] - parts[number].size
                last = min(stop, ends[number])
                found.append(part.read(at - before, last - before))
                at = last
            return found[0] if len(found) == 1 else np.concatenate(found or [np.empty(0)])

        return cls(ends[-1] if ends else 0, read, np.result_type(*(part.dtype for part in parts)), parts)

    def map(self, change: Callable[[Floats], Floats], dtype: DTypeLike | None = None) -> Blocks:
        """The vector of what `change`, which makes each entry of one entry, makes of each block."""

        def read(start: int, stop: int) -> Floats:
            return change(self.read(start, stop))

        return Blocks(self.size, read, self.dtype if dtype is None else dtype, (self,))

    def part(self, start: int, stop: int) -> Blocks:
        """The entries from `start` up to `stop`."""
        return Blocks(
            stop - start, lambda low, high: self.read(start + low, start + high), self.dtype, (self,)
        )

    def release(self) -> None:
        """Nobody reads it any more: let go of the arrays that it, and what it was made of, is read from."""

        def released(start: int, stop: int) -> Floats:
            raise LocalProtocolError(f"entries {start} to {stop} of a vector that was released")

        self.read = released
        for source in self._sources:
            source.release()

    def __iter__(self) -> Iterator[Floats]:
        for start in range(0, self.size, BLOCK):
            yield self.read(start, min(start + BLOCK, self.size))

    def array(self) -> Floats:
        """All of it, in an array of its own."""
        whole, start = np.empty(self.size, dtype=self.dtype), 0
        for block in self:
            whole[start : start + block.size] = block
            start += block.size
        return whole

    @cached_property
    def largest(self) -> float:
        """The largest size of an entry; 0 where there is none, NaN where an entry is."""
        ends = [(np.max(block), np.min(block)) for block in self]
        if not ends:
            return 0.0
        high, low = np.array(ends, dtype=self.dtype).T
        return max(float(np.max(high)), -float(np.min(low)))

    @cached_property
    def norm(self) -> float:
        """The L2 norm in float64, safe against overflow of the squares."""
        largest = self.largest
        if largest == 0.0 or not math.isfinite(largest):
            return largest
        return largest * math.sqrt(self._scaled_squares(0, self.size, largest))

    def _scaled_squares(self, start: int, stop: int, scale: float) -> float:
        """`sum (x / scale)^2`, halved as numpy halves the sum of a whole array: the same to the last bit."""
        size = stop - start
        if size > BLOCK:
            middle = start + size // 2 - size // 2 % 8
            return self._scaled_squares(start, middle, scale) + self._scaled_squares(middle, stop, scale)
        scaled = self.read(start, stop).astype(np.float64, copy=False) / scale
        # Not numpy's norm: its BLAS threads collapse on a busy machine.
        return float(np.sum(np.square(scaled, out=scaled)))
