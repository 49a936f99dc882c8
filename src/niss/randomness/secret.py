"""Noise that protects a real client: a secret seed expanded into Gaussians on a grid, bit for bit.

    32-byte seed -> BLAKE2b, tagged with the version -> AES-256 in counter mode -> 64 bits a coordinate
    -> a sign and a tail probability -> normal quantile (see `normal_table`) -> times the deviation, rounded.

Both ends of a share must draw the same whole numbers, on any machine. So the only operations are those on
whole numbers, table look-ups, and the ones IEEE 754 rounds exactly (float64 `+` and `*`, conversion,
`rint`, comparison), each its own pass over a block, so that no compiler fuses two of them into one.

A word `w` gives `v = w | 1`, an odd number in (-2^63, 2^63), symmetric: its sign, and `t = |v| / 2^64`. In the
tail (`t < 2^-20`, beyond 4.76 sigma) 16 more bits of a second keystream divide the step between two `v`.

Distance from the ideal, the rounded `N(0, s^2)` with `s = deviation_steps`, tested against mpmath:

- `s z` differs from `s` times the exact quantile of its `t` by at most `2^-51 (1 + |z|) s`, all rounding
  included; the largest error of `z` found is 2e-15;
- tail probabilities are right to a relative 1e-13 up to 6 sigma and 2e-9 up to 8;
- nothing lies beyond 10.22 sigma, where the ideal has probability 2^-79;
- one rounded draw is within total variation `8e-16 s + 7e-16` of the ideal; `sampler_distance` bounds many
  draws, far below the sum: 2e-9 for 3e7 draws at s = 256.

All of it assumes that AES-256 in counter mode cannot be told from random bits.
"""

from __future__ import annotations

import hashlib
import operator
import os
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from niss.errors import ConfigError, PrivacyError
from niss.randomness.normal_table import FIRST_ROW, LOWEST_EXPONENT, PLACE_BITS, SEGMENT_BITS, normal_table

SEED_BYTES = 32
BLOCK = 16384
# In grid steps. A float64 then still tells 2^19 values in each step apart, out to the last deviate; at 2^53 steps and
# beyond the noise would fall on multiples of a power of two, and leave what is added to it in the lowest bits.
LARGEST_DEVIATION = 2.0**30

_DOMAIN = b"niss.secret-stream.v1"
_TAIL_EXPONENT = 44
_TAIL_ROW = (_TAIL_EXPONENT - LOWEST_EXPONENT) << SEGMENT_BITS
_PLACE = np.int64((1 << PLACE_BITS) - 1)
_ROW = np.int64((1 << (11 + SEGMENT_BITS)) - 1)

Int64s = NDArray[np.int64]


@final
class SecretStream:
    """The Gaussians, or the coins, of one secret seed, drawn once, from the first to the last.

    The stream moves on: no call ever sees numbers an earlier call has seen, however the calls cut it. Who
    needs the same numbers again (the other end of a share, a repair) makes a new stream of the same seed.
    It cannot be copied, pickled or compared by content, and shows nothing of its seed. It is no `SimStream`
    and shares no method with one. One thread at a time.

    >>> SecretStream(bytes(32))  # a seed is never written into code; this one is an example
    SecretStream(secret)
    """

    __slots__ = ("_keystream", "_tail_keystream")

    def __init__(self, seed: bytes) -> None:
        if not isinstance(seed, bytes) or len(seed) != SEED_BYTES:
            description = f"{len(seed)} bytes" if isinstance(seed, bytes) else type(seed).__name__
            del seed  # a report that prints local variables must not show it
            raise ConfigError(f"must be {SEED_BYTES} bytes, not {description}", field="seed")
        keys = hashlib.blake2b(seed, key=_DOMAIN, digest_size=64).digest()
        self._keystream = _Keystream(keys[:32])
        self._tail_keystream = _Keystream(keys[32:])

    @classmethod
    def fresh(cls, entropy: Callable[[int], bytes] = os.urandom) -> SecretStream:
        """A stream whose seed nobody has seen: by default from the operating system."""
        return cls(entropy(SEED_BYTES))

    def gaussian_grid(self, count: int, deviation_steps: float, *, block: int = BLOCK) -> Iterator[Int64s]:
        """`count` draws of `rint(deviation_steps * z)`, `z` standard normal, in arrays of at most `block`.

        The numbers do not depend on `block`. Bad arguments are refused by the call, before the first draw.
        """
        number, size = _whole(count, "count", least=0), _whole(block, "block", least=1)
        _require_deviation(deviation_steps)
        return self._blocks(number, float(deviation_steps), size)

    def uniforms(self, count: int, *, block: int = BLOCK) -> Iterator[NDArray[np.float64]]:
        """`count` numbers `k / 2^53`, `k` uniform on `0 .. 2^53 - 1`, in arrays of at most `block`.

        The numbers do not depend on `block`. Bad arguments are refused by the call, before the first draw.
        """
        number, size = _whole(count, "count", least=0), _whole(block, "block", least=1)
        return self._uniform_blocks(number, size)

    def _uniform_blocks(self, count: int, block: int) -> Iterator[NDArray[np.float64]]:
        for start in range(0, count, block):
            words = self._keystream.words(min(block, count - start), "<u8")
            yield (words >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def add_gaussian(
        self, target: NDArray[np.int64] | NDArray[np.uint64], deviation_steps: float, sign: int = 1
    ) -> None:
        """`target += sign * noise` modulo 2^64, in place, one draw of `gaussian_grid` an entry.

        `target` is a writable array of int64 or uint64 with one axis, `sign` 1 or -1; memory beyond it: a block.
        """
        array = isinstance(target, np.ndarray) and target.ndim == 1
        if not array or target.dtype not in (np.int64, np.uint64):
            raise ConfigError("must be an array of int64 or uint64 with one axis", field="target")
        if not target.flags.writeable:
            raise ConfigError("must be writable", field="target")
        if sign not in (1, -1):
            raise ConfigError(f"must be 1 or -1, not {sign!r}", field="sign")
        _require_deviation(deviation_steps)
        # Whole numbers modulo 2^64 add alike, signed or not; unsigned is where C defines it.
        residues = target.view(np.uint64)
        change = np.add if sign == 1 else np.subtract
        start = 0
        for noise in self._blocks(target.size, float(deviation_steps), BLOCK):
            part = residues[start : start + noise.size]
            change(part, noise.view(np.uint64), out=part)
            start += noise.size

    def _blocks(self, count: int, deviation: float, block: int) -> Iterator[Int64s]:
        work = _Work(min(block, count))
        for start in range(0, count, block):
            deviates = self._deviates(min(block, count - start), work)
            deviates *= deviation
            np.rint(deviates, out=deviates)
            yield deviates.astype(np.int64)

    def _deviates(self, size: int, work: _Work) -> NDArray[np.float64]:
        """The next `size` standard normal deviates, in `work`, until the next call."""
        odd, row = work.odd[:size], work.row[:size]
        uniform, place, term, result = (array[:size] for array in work.floats)
        np.bitwise_or(self._keystream.words(size, "<i8"), 1, out=odd)
        uniform[:] = odd
        _find_rows(uniform, out=row)
        if int(row.min()) < _TAIL_ROW:
            self._refine_tail(odd, row, uniform)
        np.bitwise_and(uniform.view(np.int64), _PLACE, out=odd)
        place[:] = odd
        table = normal_table()
        table[-1].take(row, out=result, mode="clip")
        for coefficients in table[-2::-1]:
            np.multiply(result, place, out=result)
            coefficients.take(row, out=term, mode="clip")
            np.add(result, term, out=result)
        return np.copysign(result, uniform, out=result)

    def _refine_tail(self, odd: Int64s, row: Int64s, uniform: NDArray[np.float64]) -> None:
        """Put the tail's `|v| - 1 + (2 e + 1) / 2^16`, `e` of 16 more bits, where there was `|v|`."""
        tail = np.flatnonzero(row < _TAIL_ROW)
        extra = self._tail_keystream.words(tail.size, "<u2")
        whole = np.abs(odd[tail]) - 1
        fraction = 2 * extra.astype(np.int64) + 1
        refined = whole.astype(np.float64) + fraction.astype(np.float64) * 2.0**-16
        uniform[tail] = np.copysign(refined, uniform[tail])
        row[tail] = _find_rows(refined, out=np.empty(tail.size, dtype=np.int64))

    def __repr__(self) -> str:
        return "SecretStream(secret)"

    def _refuse_copy(self, *_: Any) -> NoReturn:
        raise PrivacyError(
            "a SecretStream cannot be copied or pickled: the copy would repeat its noise",
            hint="keep the seed where secrets are kept and make a new stream of it",
        )

    __copy__ = __deepcopy__ = __getstate__ = __reduce__ = __reduce_ex__ = _refuse_copy


class _Keystream:
    """AES-256 in counter mode from zero, each key used for one stream alone."""

    __slots__ = ("_encryptor",)

    def __init__(self, key: bytes) -> None:
        self._encryptor = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()

    def words(self, count: int, dtype: str) -> NDArray[Any]:
        """The next `count` words; read-only."""
        kind = np.dtype(dtype)
        return np.frombuffer(self._encryptor.update(bytes(count * kind.itemsize)), dtype=kind)


class _Work:
    """The arrays of one block, used again for the next."""

    __slots__ = ("floats", "odd", "row")

    def __init__(self, size: int) -> None:
        self.odd, self.row = np.empty((2, size), dtype=np.int64)
        self.floats = np.empty((4, size), dtype=np.float64)


def _find_rows(uniform: NDArray[np.float64], out: Int64s) -> Int64s:
    """The table row of each `|f|`: its exponent and the leading bits of its mantissa."""
    np.right_shift(uniform.view(np.int64), PLACE_BITS, out=out)
    np.bitwise_and(out, _ROW, out=out)
    return np.subtract(out, FIRST_ROW, out=out)


def _whole(value: int, field: str, *, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ConfigError(f"must be a whole number, not {value!r}", field=field) from None
    if number < least:
        raise ConfigError(f"must be at least {least}, not {number}", field=field)
    return number


def _require_deviation(steps: float) -> None:
    if not 0.0 <= steps <= LARGEST_DEVIATION:  # refuses NaN as well
        raise ConfigError(
            f"must be between 0 and 2^30 grid steps, not {steps!r}",
            field="deviation_steps",
            hint="use fewer grid bits",
        )
