"""Noise that protects a real client: a secret seed expanded into Gaussians on a grid, bit for bit.

    32-byte seed -> BLAKE2b, tagged with the version -> AES-256 in counter mode -> 64 bits a coordinate
    -> a sign and a tail probability -> normal quantile (see `normal_table`) -> times the deviation, rounded.

Both ends of a share must draw the same whole numbers, on any machine. So the only operations are those on
whole numbers, table look-ups, and the ones IEEE 754 rounds exactly (float64 `+` and `*`, conversion,
`rint`, comparison), each its own pass over a block, so that no compiler fuses two of them into one. With numba long
sums are added by a compiled loop instead, of the same operations and with the same result (`normal_table`).

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

**How far the draws are from the ideal** (`sampler_distance`, `sampler_factor`).

One draw. Let `T(y)` be the error of `P(noise > y s)`, `s` the deviation in steps and `y` one of the cell
borders `(k + 1/2) / s`. Half a step of the uniform and the error `E` of the deviate are all there is:

    T(y) <= a(y) + E(y) phi(y - E(y)),   a = 2^-64 (2^-80 in the refined tail),   E(y) = 2^-51 (1 + |y|),

so the total variation distance is at most the sum of `T` over the borders, about `8e-16 s + 7e-16`.

Many draws. Distances add up at most, but errors this even add up far slower. Cut at some `K`. Inside,
`KL <= chi^2 = sum_k (P'_k - P_k)^2 / P_k` adds over independent draws and Pinsker gives `sqrt(KL / 2)`;
outside, the sum of `T` counts for each draw. With `Q` = the sampler inside (scaled to the ideal's mass
there) and the ideal outside, the triangle inequality gives

    TV(N draws) <= N * 2 sum_{y >= K} T(y)  +  sqrt(N chi^2(K) / 2)          for every K; the best one is taken.

Inside, scaling to the right mass only lowers chi^2 but for a factor `1 + 1e-12`, put at 1.001 here.
Draws that depend on earlier rounds change nothing: the rounds are a function of one tape of noise.

What that is worth to an opponent. A distance `D` adds `(1 + e^epsilon) D` to delta, which says little where epsilon or
the model is large. But inside the cut the error is a *factor* on probabilities: `x = P' / P - 1` has mean 0 under `P`,
`E x^2 = chi^2` and `|x| <= r < 1`. So for every `b > 0`, with `g = (1 - r)^-(b + 2)`,

    E_P (1 + x)^(1 + b),  E_P (1 + x)^-b  <=  1 + b (b + 1) chi^2 g / 2,

and by Markov the factor of all draws together, either way, stays below `e^h` but for probability
`exp(N b (b + 1) chi^2 g / 2 - b h)`. With `h` such that this is `2^-80`, for all events A

    P'(A) <= e^h P(A) + rest,    P(A) <= e^h P'(A) + rest,    rest = 2^-80 + the distance outside.

Then noise that is (epsilon, delta)-private when ideal is, as it is drawn (`sampler_factor`), private with epsilon + 2 h
and `e^h delta + (1 + e^(epsilon + h)) rest`.
"""

from __future__ import annotations

import hashlib
import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NoReturn, final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import ArrayLike, NDArray

from niss.errors import ConfigError, PrivacyError
from niss.randomness.normal_table import (
    TAIL_ROW,
    WORTH_LOADING,
    Demand,
    Floats,
    Int64s,
    Loop,
    find_rows,
    load_loop,
    look_up,
)

SEED_BYTES = 32
BLOCK = 16384
# In grid steps. A float64 then still tells 2^19 values in each step apart, out to the last deviate; at 2^53 steps and
# beyond the noise would fall on multiples of a power of two, and leave what is added to it in the lowest bits.
LARGEST_DEVIATION = 2.0**30

_DOMAIN = b"niss.secret-stream.v1"
_WORD = 8  # bytes of keystream for a number
_CIPHER_BLOCK = 16
_ZEROS = memoryview(bytes(BLOCK * _WORD))
# A thread is worth starting for so many numbers, a few milliseconds of work.
_DRAWS_A_THREAD = 2**20
demand = Demand(WORTH_LOADING, load_loop)
# `|deviation * z computed - deviation * z exact| <= deviation * DEVIATE_ERROR * (1 + |z|)`.
DEVIATE_ERROR = 2.0**-51
_END = 10.25  # beyond the last deviate, 10.22
_NARROWEST = 0.01  # from here down every draw is 0
_REFINED = 4.77  # tail probability below 2^-20
_CUTS = np.arange(2.0, _END, 0.25)
_SLACK = 1.001
_ORDERS = 2.0 ** np.arange(4.0, 60.0, 0.25)  # b
_LOG_REST = 80.0 * math.log(2.0)

Residues = NDArray[np.int64] | NDArray[np.uint64]


def _refuse_copy(*_: Any) -> NoReturn:
    raise PrivacyError(
        "a SecretStream cannot be copied or pickled: the copy would repeat its noise",
        hint="keep the seed where secrets are kept and make a new stream of it",
    )


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
        self._keystream = _Keystream(algorithms.AES256(keys[:32]))
        self._tail_keystream = _Keystream(algorithms.AES256(keys[32:]))

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

    def add_gaussian(self, target: Residues, deviation_steps: float, sign: int = 1) -> None:
        """`target += sign * noise` modulo 2^64, in place, one draw of `gaussian_grid` an entry.

        `target` is a writable array of int64 or uint64 with one axis, `sign` 1 or -1; memory beyond it: a block.
        """
        add_gaussians(target, [(self, deviation_steps, sign)])

    def _blocks(self, count: int, deviation: float, block: int) -> Iterator[Int64s]:
        work = _Work(min(block, count))
        for start in range(0, count, block):
            words = self._keystream.words(min(block, count - start), "<i8")
            yield _to_grid(self._deviates(words, work), deviation)

    def _deviates(self, words: Int64s, work: _Work) -> Floats:
        """The standard normal deviates of the next words of the keystream, in `work`, until the next call."""
        size = words.size
        odd, row, uniform = work.odd[:size], work.row[:size], work.uniform[:size]
        np.bitwise_or(words, 1, out=odd)
        uniform[:] = odd
        find_rows(uniform, out=row)
        if int(row.min()) < TAIL_ROW:
            self._refine_tail(odd, row, uniform)
        return look_up(uniform, row, odd, work.floats[:, :size])

    def _refine_tail(self, odd: Int64s, row: Int64s, uniform: Floats) -> None:
        """Put the tail's `|v| - 1 + (2 e + 1) / 2^16`, `e` of 16 more bits, where there was `|v|`."""
        tail = np.flatnonzero(row < TAIL_ROW)
        extra = self._tail_keystream.words(tail.size, "<u2")
        whole = np.abs(odd[tail]) - 1
        fraction = 2 * extra.astype(np.int64) + 1
        refined = whole.astype(np.float64) + fraction.astype(np.float64) * 2.0**-16
        uniform[tail] = np.copysign(refined, uniform[tail])
        row[tail] = find_rows(refined, out=np.empty(tail.size, dtype=np.int64))

    def __repr__(self) -> str:
        return "SecretStream(secret)"

    __copy__ = __deepcopy__ = __getstate__ = __reduce__ = __reduce_ex__ = _refuse_copy


def add_gaussians(target: Residues, noises: Iterable[tuple[SecretStream, float, int]]) -> None:
    """`target += sign * noise` for each (stream, deviation in steps, sign): `add_gaussian` for all of them.

    With a compiled loop in one pass over `target`, in as many threads as the process has cores and `OMP_NUM_THREADS`
    allows; the sum does not depend on either. Nothing is drawn if any argument is refused.
    """
    terms = list(noises)
    for _, deviation, sign in terms:
        if sign not in (1, -1):
            raise ConfigError(f"must be 1 or -1, not {sign!r}", field="sign")
        _require_deviation(deviation)
    residues = _as_residues(target)
    loop = demand.compiled(target.size * len(terms)) if target.flags.carray else None
    if loop is not None:
        _add_in_blocks(residues, terms, loop)
        return
    for stream, deviation, sign in terms:
        change = np.add if sign == 1 else np.subtract
        start = 0
        for noise in stream._blocks(target.size, float(deviation), BLOCK):
            part = residues[start : start + noise.size]
            change(part, noise.view(np.uint64), out=part)
            start += noise.size


def _add_in_blocks(
    residues: NDArray[np.uint64], terms: Sequence[tuple[SecretStream, float, int]], loop: Loop
) -> None:
    """Add to each entry what `loop` makes of the next word of each stream."""
    size = residues.size
    # Each takes its part of its stream before anything is drawn: nothing is drawn twice, whatever happens.
    parts = [
        (stream._keystream.cut(size * _WORD), float(deviation), 0 if sign == 1 else -1)
        for stream, deviation, sign in terms
    ]
    threads = max(1, min(thread_limit(), size * len(parts) // _DRAWS_A_THREAD, -(-size // BLOCK)))
    borders = [size * number // threads // BLOCK * BLOCK for number in range(threads)] + [size]

    def add(number: int) -> list[list[tuple[Int64s, Int64s]]]:
        return _add_range(residues, parts, borders[number], borders[number + 1], loop)

    if threads == 1:
        found = [add(0)]
    else:
        with ThreadPoolExecutor(threads) as pool:
            found = list(pool.map(add, range(threads)))
    # The second keystream is used in the order of the first: only now is the place of a word in it known.
    for (stream, deviation, sign), *tails in zip(terms, *found, strict=True):
        for places, words in (tail for of_range in tails for tail in of_range):
            noise = _to_grid(stream._deviates(words, _Work(words.size)), float(deviation))
            residues[places] += (sign * noise).view(np.uint64)


def _add_range(
    residues: NDArray[np.uint64],
    parts: Sequence[tuple[_Keystream, float, int]],
    start: int,
    stop: int,
    loop: Loop,
) -> list[list[tuple[Int64s, Int64s]]]:
    """Add the noise of all words outside the tail to the entries from `start`; of each part, the others by place."""
    found: list[list[tuple[Int64s, Int64s]]] = [[] for _ in parts]
    ahead = [(keystream.ahead(start * _WORD), deviation, flip) for keystream, deviation, flip in parts]
    tail = np.empty(BLOCK, dtype=np.int64)
    buffer = bytearray(BLOCK * _WORD + _CIPHER_BLOCK)
    for first in range(start, stop, BLOCK):
        target = residues[first : min(first + BLOCK, stop)]
        for (keystream, deviation, flip), of_part in zip(ahead, found, strict=True):
            words = keystream.fill(buffer, target.size)
            count = loop(words, target, deviation, flip, tail)
            if count:
                of_part.append((first + tail[:count], words[tail[:count]]))
    return found


def thread_limit() -> int:
    """The cores that this process may use, or fewer if `OMP_NUM_THREADS` says so."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return min(cores, max(1, int(asked))) if asked.isdecimal() else cores


class _Keystream:
    """AES-256 in counter mode from zero, each key used for one stream alone."""

    __slots__ = ("_algorithm", "_encryptor", "_position")

    def __init__(self, algorithm: algorithms.AES256, position: int = 0) -> None:
        self._algorithm, self._position = algorithm, position
        self._encryptor: CipherContext | None = None

    def words(self, count: int, dtype: str) -> NDArray[Any]:
        """The next `count` words; read-only."""
        kind = np.dtype(dtype)
        size = count * kind.itemsize
        return np.frombuffer(self._next(size).update(bytes(size)), dtype=kind)

    def fill(self, buffer: bytearray, count: int) -> Int64s:
        """The next `count` words, at most a block, in a buffer that is a block of the cipher longer than they are."""
        size = count * _WORD
        self._next(size).update_into(_ZEROS[:size], buffer)
        return np.frombuffer(buffer, dtype="<i8", count=count).astype(np.int64, copy=False)

    def cut(self, count: int) -> _Keystream:
        """The next `count` bytes as a keystream of their own, which starts where this one stood; this one moves on."""
        part = self.ahead(0)
        self._position, self._encryptor = self._position + count, None
        return part

    def ahead(self, count: int) -> _Keystream:
        """A keystream of the same key that starts `count` bytes from here."""
        return _Keystream(self._algorithm, self._position + count)

    def _next(self, count: int) -> CipherContext:
        """What encrypts the next `count` bytes."""
        if self._encryptor is None:
            blocks, within = divmod(self._position, _CIPHER_BLOCK)
            counter = modes.CTR(blocks.to_bytes(_CIPHER_BLOCK, "big"))
            self._encryptor = Cipher(self._algorithm, counter).encryptor()
            self._encryptor.update(bytes(within))
        self._position += count
        return self._encryptor

    __copy__ = __deepcopy__ = __getstate__ = __reduce__ = __reduce_ex__ = _refuse_copy


class _Work:
    """The arrays of one block, used again for the next."""

    __slots__ = ("floats", "odd", "row", "uniform")

    def __init__(self, size: int) -> None:
        self.odd, self.row = np.empty((2, size), dtype=np.int64)
        self.uniform = np.empty(size)
        self.floats = np.empty((3, size))


def _to_grid(deviates: Floats, deviation: float) -> Int64s:
    """`rint(deviation * z)`; `deviates` is overwritten."""
    deviates *= deviation
    np.rint(deviates, out=deviates)
    return deviates.astype(np.int64)


def _whole(value: int, field: str, *, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ConfigError(f"must be a whole number, not {value!r}", field=field) from None
    if number < least:
        raise ConfigError(f"must be at least {least}, not {number}", field=field)
    return number


def _as_residues(target: Residues) -> NDArray[np.uint64]:
    """The array, if noise can be added to it in place.

    Whole numbers modulo 2^64 add alike, signed or not; unsigned is where C defines it.
    """
    array = isinstance(target, np.ndarray) and target.ndim == 1
    if not array or target.dtype not in (np.int64, np.uint64):
        raise ConfigError("must be an array of int64 or uint64 with one axis", field="target")
    if not target.flags.writeable:
        raise ConfigError("must be writable", field="target")
    return target.view(np.uint64)


def _require_deviation(steps: float) -> None:
    if not 0.0 <= steps <= LARGEST_DEVIATION:  # refuses NaN as well
        raise ConfigError(
            f"must be between 0 and 2^30 grid steps, not {steps!r}",
            field="deviation_steps",
            hint="use fewer grid bits",
        )


def sampler_distance(deviation_steps: ArrayLike, draws: ArrayLike = 1) -> float:
    """A bound on the total variation distance between all the draws and ideal rounded Gaussians.

    `deviation_steps` and `draws` are numbers or arrays of the same length: so many draws of each deviation.
    """
    outside, inside, _ = _profile_of_all(deviation_steps, draws)
    return min(1.0, float(np.min(outside + np.sqrt(_SLACK * inside / 2.0))))


def sampler_factor(deviation_steps: ArrayLike, draws: ArrayLike = 1, *, rest: float) -> float:
    """The least `h` with `P'(A) <= e^h P(A) + rest` and `P(A) <= e^h P'(A) + rest` for all events `A`.

    `P'` is the law of all the draws, `P` that of ideal rounded Gaussians; the arguments are those of
    `sampler_distance`. Infinite where the part that is not a factor already exceeds `rest`.
    """
    outside, inside, ratio = _profile_of_all(deviation_steps, draws)
    within = (outside + 2.0**-80 <= rest) & (ratio < 0.5)
    if not within.any():
        return math.inf
    # Cuts as rows, orders as columns; an exponent beyond 700 is no bound at all.
    exponent = -np.log1p(-ratio[within, None]) * (_ORDERS + 2.0)
    growth = np.where(exponent < 700.0, np.exp(np.minimum(exponent, 700.0)), math.inf)
    squares = _SLACK * inside[within, None]
    return float(
        np.min(_LOG_REST / _ORDERS + np.where(squares > 0.0, (_ORDERS + 1.0) / 2.0 * squares * growth, 0.0))
    )


def _profile_of_all(deviation_steps: ArrayLike, draws: ArrayLike) -> tuple[Floats, Floats, Floats]:
    """`_profile` summed over all draws (the last: its largest)."""
    steps = np.atleast_1d(np.asarray(deviation_steps, dtype=np.float64))
    counts = np.atleast_1d(np.asarray(draws, dtype=np.float64))
    if steps.ndim != 1 or not np.all(np.isfinite(steps)) or np.any(steps < 0.0):
        raise ConfigError("must be finite and not negative", field="deviation_steps")
    if counts.shape not in ((1,), steps.shape) or not np.all(np.isfinite(counts)) or np.any(counts < 0.0):
        raise ConfigError("must be finite, not negative, one or as many as deviations", field="draws")
    deviations, kind = np.unique(steps, return_inverse=True)
    total = np.bincount(kind, weights=np.broadcast_to(counts, steps.shape), minlength=deviations.size)
    outside, inside, ratio = np.zeros((3, _CUTS.size + 1))
    for deviation, number in zip(deviations, total, strict=True):
        if deviation > 0.0 and number > 0.0:
            tail, chi2, worst = _profile(float(deviation))
            outside += number * tail
            inside += number * chi2
            ratio = np.maximum(ratio, worst)
    return outside, inside, ratio


@lru_cache(maxsize=4096)
def _profile(steps: float) -> tuple[Floats, Floats, Floats]:
    """For no inside at all, then for each cut: the distance outside, chi^2 inside, largest |x| inside; per draw.

    Cells come in bins of `width`; a bin's `T` is taken at its worst end, its cells' probability as well.
    """
    steps = max(steps, _NARROWEST)
    width = max(1.0, math.ceil(steps / 64.0))
    bins = math.ceil(_END * steps / width) + 1
    low = (np.arange(bins) * width + 0.5) / steps
    high = low + width / steps
    error = np.where(low < _REFINED, 2.0**-64, 2.0**-80)
    error += _SLACK * DEVIATE_ERROR * (1.0 + high) * _density(low)
    # Both sides; 2^-78 for the last border and for what lies beyond.
    outside = 2.0 * width * np.append(np.cumsum(error[::-1])[::-1], 0.0) + 2.0**-78
    if steps < 0.5:
        nothing = np.zeros(_CUTS.size + 1)
        return np.full(_CUTS.size + 1, outside[0]), nothing, nothing
    middle_error = 2.0**-64 + _SLACK * DEVIATE_ERROR * (1.0 + low[0]) * _density(np.zeros(1))
    middle = (2.0 * middle_error) ** 2 * steps / _density(low[:1])
    per_bin = 2.0 * width * (2.0 * error) ** 2 * steps / _density(high)
    inside = np.cumsum(np.append(middle, per_bin))
    ratios = np.append(2.0 * middle_error * steps / _density(low[:1]), 2.0 * error * steps / _density(high))
    worst = np.maximum.accumulate(ratios)
    cut = np.minimum(np.ceil(_CUTS * steps / width).astype(np.int64), bins)
    return (
        np.append(outside[0], outside[cut]),
        np.append(0.0, inside[cut]),
        np.append(0.0, _SLACK * worst[cut]),
    )


def _density(z: NDArray[np.floating[Any]]) -> Floats:
    return np.asarray(np.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi))
