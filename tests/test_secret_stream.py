"""Secret noise: the same bits everywhere, the right law, and nothing of the seed to be seen."""

from __future__ import annotations

import copy
import hashlib
import os
import pickle
import traceback
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray
from scipy import special, stats

from niss.errors import ConfigError, PrivacyError
from niss.mechanism import add_gaussian, add_shares
from niss.randomness import SecretStream, SimStream
from niss.randomness.secret import BLOCK
from support.refusals import refuses

SEEDS = [bytes(32), bytes(range(32)), b"\xff" * 32]
FALSE_ALARM = 1e-7  # of every single p-value below; no test looks at more than ten


def draw(seed: bytes, count: int, deviation: float, **block: int) -> NDArray[np.int64]:
    return np.concatenate(list(SecretStream(seed).gaussian_grid(count, deviation, **block)))


def keystream(words: int) -> bytes:
    """Of the second seed, written again from the words of the docstring."""
    key = hashlib.blake2b(SEEDS[1], key=b"niss.secret-stream.v1", digest_size=64).digest()[:32]
    return Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor().update(bytes(8 * words))


GOLDEN = [
    (
        SEEDS[0],
        [20, -566, 957, 836, 2201, -2017],
        "ef4740387acc214f16a16179b214ab37d2419c27c827903a26b0188584707d39",
    ),
    (
        SEEDS[1],
        [-232, 804, 2279, 862, 680, -1094],
        "ee615802853a1443b51f43059c174a6806ee973464e07d5735b4da04a00b4c6d",
    ),
    (
        SEEDS[2],
        [-203, 1797, 556, 500, -163, 2540],
        "9b7b3efdde6bab0ff361c7f86633d779eee138b561304917cd63a631d2148a86",
    ),
]


@pytest.mark.parametrize(("seed", "first", "digest"), GOLDEN)
def test_the_numbers_never_change(seed: bytes, first: list[int], digest: str) -> None:
    """Golden values: a change here means that two versions of niss no longer cancel."""
    noise = draw(seed, 100_000, 1000.0)
    assert noise.dtype == np.int64
    assert noise[:6].tolist() == first
    assert hashlib.sha256(noise.astype("<i8").tobytes()).hexdigest() == digest


def test_a_large_deviation_shows_every_bit() -> None:
    """Wider than any stream may be asked for, so that the digest depends on all bits of the deviates."""
    noise = np.concatenate(list(SecretStream(SEEDS[0])._blocks(3_000_000, 2.0**40, BLOCK)))
    digest = "be55896727587f32a6d099fcc86fa020124daa432149a5f2261146d5e75da952"
    assert hashlib.sha256(noise.astype("<i8").tobytes()).hexdigest() == digest


def test_the_stream_is_what_it_is_documented_to_be() -> None:
    """Written again from the words of the docstring, with scipy's quantile: the same whole numbers."""
    odd = np.frombuffer(keystream(20_000), dtype="<i8") | 1
    assert np.abs(odd).min() > 2**44, "a draw from the tail needs the second keystream"
    expected = np.rint(-1000.0 * np.sign(odd) * special.ndtri(np.abs(odd) / 2.0**64)).astype(np.int64)
    np.testing.assert_array_equal(draw(SEEDS[1], 20_000, 1000.0), expected)


@pytest.mark.parametrize("block", [1, 7, 4096, 20_001, 10**6])
def test_the_numbers_do_not_depend_on_the_block(block: int) -> None:
    count = 20_000 if block < 100 else 2_000_000  # the longer one has draws from the tail
    np.testing.assert_array_equal(draw(SEEDS[1], count, 2.0**30, block=block), draw(SEEDS[1], count, 2.0**30))


def test_a_stream_moves_on_however_it_is_cut() -> None:
    stream = SecretStream(SEEDS[1])
    parts = [part for count in (0, 3, 50_000, 1) for part in stream.gaussian_grid(count, 2.0**30)]
    np.testing.assert_array_equal(np.concatenate(parts), draw(SEEDS[1], 50_004, 2.0**30))
    assert list(stream.gaussian_grid(0, 1.0)) == []


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_added_noise_is_the_stream_and_cancels_to_the_last_bit(dtype: Any) -> None:
    rng = SimStream(1).generator()
    before = rng.integers(0, 2**64, 50_001, dtype=np.uint64).view(dtype)
    target = before.copy()
    SecretStream(SEEDS[1]).add_gaussian(target, 2.0**30)  # wraps around many times
    noise = draw(SEEDS[1], target.size, 2.0**30)
    np.testing.assert_array_equal((target.view(np.uint64) - before.view(np.uint64)).view(np.int64), noise)
    SecretStream(SEEDS[1]).add_gaussian(target, 2.0**30, sign=-1)
    np.testing.assert_array_equal(target, before)
    strided = np.zeros(2 * 1000, dtype=dtype)
    SecretStream(SEEDS[1]).add_gaussian(strided[::2], 100.0)
    np.testing.assert_array_equal(strided[::2].view(np.int64), draw(SEEDS[1], 1000, 100.0))
    assert not strided[1::2].any()


def test_coins_are_the_leading_bits_of_the_keystream_however_they_are_cut() -> None:
    expected = [(word >> 11) / 2**53 for word in np.frombuffer(keystream(20_000), dtype="<u8").tolist()]
    for block in (1, 7, 4096, 10**6):
        whole = np.concatenate(list(SecretStream(SEEDS[1]).uniforms(20_000, block=block)))
        assert whole.tolist() == expected
    assert list(SecretStream(SEEDS[1]).uniforms(0)) == []


def test_coins_are_uniform_and_never_those_of_noise_drawn_before() -> None:
    """Kolmogorov and Smirnov on a million; and a stream used for both moves on."""
    uniform = np.concatenate(list(SecretStream(SEEDS[0]).uniforms(1_000_000)))
    assert 0.0 <= uniform.min() <= uniform.max() < 1.0
    assert stats.kstest(uniform, "uniform").pvalue > FALSE_ALARM
    both = SecretStream(SEEDS[0])
    both.add_gaussian(np.zeros(100, dtype=np.int64), 1.0)
    np.testing.assert_array_equal(next(both.uniforms(50)), uniform[100:150])


def test_moments() -> None:
    """Mean, variance, skewness and kurtosis of 4 million draws, normal limits; false alarms 4e-7."""
    count = 4_000_000
    z = draw(SEEDS[1], count, 2.0**30) / 2.0**30
    errors = [z.mean(), (z**2).mean() - 1, (z**3).mean(), (z**4).mean() - 3]
    scores = np.array(errors) / np.sqrt(np.array([1, 2, 15, 96]) / count)
    assert np.all(2 * special.ndtr(-np.abs(scores)) > FALSE_ALARM), scores


def test_kolmogorov_smirnov() -> None:
    """A million nearly continuous draws; false alarms 1e-7 for each of two seeds."""
    for seed in SEEDS[:2]:
        assert stats.kstest(draw(seed, 1_000_000, 2.0**30) / 2.0**30, "norm").pvalue > FALSE_ALARM


@pytest.mark.parametrize("deviation", [0.3, 1.0, 3.7])
def test_the_cells_of_the_grid_have_their_probabilities(deviation: float) -> None:
    """Chi-square over the cells, those below 20 expected draws put together; false alarms 1e-7."""
    count = 2_000_000
    noise = draw(SEEDS[2], count, deviation)
    reach = int(4 * deviation) + 1
    borders = np.arange(-reach, reach + 2) - 0.5
    upper = special.ndtr(np.concatenate([borders / deviation, [np.inf]]))
    expected = count * np.diff(np.concatenate([[0.0], upper]))
    observed = np.bincount(np.searchsorted(borders, noise), minlength=expected.size)
    large = expected >= 20
    expected = np.append(expected[large], expected[~large].sum())
    observed = np.append(observed[large], observed[~large].sum())
    if expected[-1] < 20:
        expected, observed = (np.append(array[1:-1], array[0] + array[-1]) for array in (expected, observed))
    assert stats.chisquare(observed, expected).pvalue > FALSE_ALARM


def test_tails_to_five_sigma() -> None:
    """20 million draws, exact binomial counts beyond 1 to 5 sigma on both sides; false alarms 1e-6."""
    count, scale = 20_000_000, 2.0**30
    beyond = np.zeros((2, 5), dtype=np.int64)
    for noise in SecretStream(SEEDS[1]).gaussian_grid(count, scale, block=2**18):
        for sigma in range(1, 6):
            beyond[0, sigma - 1] += np.count_nonzero(noise > sigma * scale)
            beyond[1, sigma - 1] += np.count_nonzero(noise < -sigma * scale)
    for side in beyond:
        for sigma, number in enumerate(side, start=1):
            law = stats.binom(count, special.ndtr(-sigma))
            assert min(law.cdf(number), law.sf(number - 1)) > FALSE_ALARM / 2, (sigma, number)


def test_streams_and_neighbours_are_uncorrelated() -> None:
    """Two seeds one bit apart, and a stream against itself one draw later; values and squares: 4e-7."""
    count = 2_000_000
    first, second = (draw(seed, count, 2.0**30) / 2.0**30 for seed in (bytes(32), bytes(31) + b"\x01"))
    for a, b in ((first, second), (first[1:], first[:-1])):
        for power in (1, 2):
            score = np.corrcoef(a**power, b**power)[0, 1] * np.sqrt(a.size)
            assert 2 * special.ndtr(-abs(score)) > FALSE_ALARM


def test_a_fresh_stream_asks_for_entropy_once() -> None:
    asked: list[int] = []

    def entropy(count: int) -> bytes:
        asked.append(count)
        return SEEDS[1][:count]

    (noise,) = SecretStream.fresh(entropy).gaussian_grid(100, 50.0)
    assert asked == [32]
    np.testing.assert_array_equal(noise, draw(SEEDS[1], 100, 50.0))
    first, second = (next(SecretStream.fresh().gaussian_grid(100, 50.0)) for _ in range(2))
    assert not np.array_equal(first, second)
    with pytest.raises(ConfigError, match="32 bytes"):
        SecretStream.fresh(lambda _: b"too short")


SECRET = b"a secret that must never be seen"


def test_nothing_of_the_seed_can_be_seen() -> None:
    stream = SecretStream(SECRET)
    shown = [repr(stream), str(stream), f"{stream}", f"{[stream]}"]
    assert all("SecretStream(secret)" in text for text in shown)
    assert not hasattr(stream, "__dict__")
    # Not even in memory under a name: only the ciphers are kept.
    for name in SecretStream.__slots__:
        assert SECRET.decode() not in repr(getattr(stream, name))


@pytest.mark.parametrize(
    "take",
    [copy.copy, copy.deepcopy, pickle.dumps, lambda s: s.__getstate__(), lambda s: copy.deepcopy({"a": [s]})]
    + [lambda s, p=p: pickle.dumps(s, protocol=p) for p in range(pickle.HIGHEST_PROTOCOL + 1)],
)
def test_a_stream_cannot_be_copied_or_pickled(take: Any) -> None:
    with pytest.raises(PrivacyError, match="cannot be copied or pickled") as caught:
        take(SecretStream(SECRET))
    assert SECRET.decode() not in str(caught.value)


def test_streams_are_equal_only_to_themselves() -> None:
    stream = SecretStream(SECRET)
    assert stream == stream
    assert stream != SecretStream(SECRET)
    assert len({stream, SecretStream(SECRET)}) == 2


def test_there_is_no_seed_by_default() -> None:
    with pytest.raises(TypeError):
        SecretStream()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "seed", [SECRET + b"!", SECRET[:-1], b"", SECRET.decode(), bytearray(SECRET), 5, None, SimStream(1)]
)
def test_a_wrong_seed_is_refused_and_not_repeated(seed: Any) -> None:
    with refuses("seed", "seed") as caught:
        SecretStream(seed)
    assert "secret that" not in str(caught.value) + repr(caught.value)
    frame = traceback.TracebackException.from_exception(caught.value, capture_locals=True).stack[-1]
    assert "secret that" not in str(frame.locals)


@pytest.mark.parametrize("seed", [SECRET, bytearray(SECRET), memoryview(SECRET)])
def test_a_secret_seed_given_to_a_simulation_is_not_repeated(seed: Any) -> None:
    with pytest.raises(ConfigError, match="whole number") as caught:
        SimStream(seed)
    assert "secret that" not in str(caught.value)


def test_the_two_kinds_of_stream_cannot_stand_in_for_one_another() -> None:
    public = [{name for name in dir(kind) if name[0] != "_"} for kind in (SimStream, SecretStream)]
    assert not public[0] & public[1]
    assert not issubclass(SecretStream, SimStream)
    assert not issubclass(SimStream, SecretStream)
    vector = np.zeros(3)
    with pytest.raises(AttributeError, match="SecretStream"):
        add_gaussian(vector, 1.0, SecretStream(SECRET))  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="SimStream"):
        SecretStream.add_gaussian(SimStream(1), np.zeros(3, dtype=np.int64), 1.0)  # type: ignore[arg-type]
    assert not vector.any()
    assert add_shares.__annotations__["stream"] == "SimStream"


@pytest.mark.parametrize("deviation", [-1.0, np.nan, np.inf, 2.0**30 + 1.0, 2.0**59])
def test_a_bad_deviation_is_refused_before_the_first_draw(deviation: float) -> None:
    stream = SecretStream(SEEDS[1])
    target = np.zeros(5, dtype=np.int64)
    for call in (
        lambda: stream.gaussian_grid(5, deviation),
        lambda: stream.add_gaussian(target, deviation),
    ):
        with refuses("deviation_steps"):
            call()
    np.testing.assert_array_equal(next(stream.gaussian_grid(5, 9.0)), draw(SEEDS[1], 5, 9.0))


def test_other_bad_arguments_are_refused_by_name() -> None:
    stream, target = SecretStream(os.urandom(32)), np.zeros(5, dtype=np.int64)
    frozen = target.copy()
    frozen.flags.writeable = False
    calls: list[tuple[str, Any]] = [
        ("count", lambda: stream.gaussian_grid(-1, 1.0)),
        ("count", lambda: stream.gaussian_grid(1.5, 1.0)),  # type: ignore[arg-type]
        ("block", lambda: stream.gaussian_grid(1, 1.0, block=0)),
        ("count", lambda: stream.uniforms(-1)),
        ("count", lambda: stream.uniforms(1.5)),  # type: ignore[arg-type]
        ("block", lambda: stream.uniforms(1, block=0)),
        ("target", lambda: stream.add_gaussian(np.zeros(5), 1.0)),  # type: ignore[arg-type]
        ("target", lambda: stream.add_gaussian(target.astype(">i8"), 1.0)),
        ("target", lambda: stream.add_gaussian(target.reshape(1, 5), 1.0)),
        ("target", lambda: stream.add_gaussian(frozen, 1.0)),
        ("sign", lambda: stream.add_gaussian(target, 1.0, sign=0)),
    ]
    for field, call in calls:
        with refuses(field):
            call()
    assert not next(stream.gaussian_grid(10, 0.0)).any()
