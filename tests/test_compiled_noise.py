"""The compiled loop gives the noise of the reference to the last bit, or is not used."""

from __future__ import annotations

import copy
import hashlib
import os
import pickle
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from niss.errors import ConfigError, PrivacyError
from niss.randomness import SecretStream, SimStream, add_gaussians, normal_table, secret
from niss.randomness.normal_table import TAIL_ROW, Demand, find_rows, load_loop
from niss.randomness.secret import BLOCK, _Work, thread_limit
from test_secret_stream import GOLDEN, SEEDS, draw

NEVER = 2**63


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> normal_table.Loop:
    """From the first draw on, the compiled loop is used."""
    pytest.importorskip("numba", reason="the extra `fast` is not installed")
    found = load_loop()
    assert found is not None, "the compiled loop does not agree with the reference on this machine"
    monkeypatch.setattr(secret.demand, "worth", 0)
    monkeypatch.setattr(secret, "_DRAWS_A_THREAD", 1)
    return found


@pytest.fixture
def counted(loop: normal_table.Loop, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The lengths that the compiled loop is called with; a test that has none of them tests nothing."""
    sizes: list[int] = []

    def counting(words: Any, *rest: Any) -> int:
        sizes.append(words.size)
        return loop(words, *rest)

    monkeypatch.setattr(secret.demand, "load", lambda: counting)
    yield sizes
    assert sizes


def reference(target: NDArray[Any], noises: list[tuple[SecretStream, float, int]]) -> NDArray[Any]:
    """What `add_gaussians` leaves without numba."""
    result = target.copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secret.demand, "worth", NEVER)
        add_gaussians(result, noises)
    return result


@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize(("seed", "first", "digest"), GOLDEN)
def test_golden_values(
    seed: bytes,
    first: list[int],
    digest: str,
    threads: str,
    counted: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    noise = np.zeros(100_000, dtype=np.int64)
    SecretStream(seed).add_gaussian(noise, 1000.0)
    assert noise[:6].tolist() == first
    assert hashlib.sha256(noise.astype("<i8").tobytes()).hexdigest() == digest
    assert sum(counted) == 100_000


@pytest.mark.parametrize("cores", [1, 2, 5])
def test_long_streams_with_draws_from_the_tail(
    cores: int, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 million words of each of two streams, about 8 of them in the tail, in threads that meet in any order."""
    monkeypatch.setattr(secret, "thread_limit", lambda: cores)
    size = 2_000_003
    noise = np.zeros(size, dtype=np.int64)
    add_gaussians(noise, [(SecretStream(SEEDS[0]), 2.0**30, 1), (SecretStream(SEEDS[1]), 2.0**20, -1)])
    expected = draw(SEEDS[0], size, 2.0**30) - draw(SEEDS[1], size, 2.0**20)
    np.testing.assert_array_equal(noise, expected)
    assert np.abs(draw(SEEDS[0], size, 2.0**30)).max() > 4.8 * 2**30, "no draw from the tail"
    assert len(counted) >= 2 * size // BLOCK


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
@pytest.mark.parametrize("size", [1, 127, 128, 129, BLOCK - 1, BLOCK, 3 * BLOCK + 5])
def test_every_length_and_place_in_a_stream(size: int, dtype: Any, counted: list[int]) -> None:
    """Streams that have given any number of words before, the same stream twice among them, go on as the reference."""
    del counted
    rng = SimStream(1).generator()
    before = rng.integers(0, 2**64, size, dtype=np.uint64).view(dtype)
    ends = []
    for add in (add_gaussians, None):
        streams = [SecretStream(seed) for seed in SEEDS]
        for skipped, stream in enumerate(streams):
            list(stream.uniforms(skipped))
        noises = [(streams[0], 2.0**30, 1), (streams[1], 1e4, -1), (streams[2], 0.0, 1), (streams[1], 7.5, 1)]
        if add is None:
            sums = reference(before, noises)
        else:
            sums = before.copy()
            add(sums, noises)
        ends.append((sums, *(next(stream.uniforms(3)) for stream in streams)))
    for one, other in zip(*ends, strict=True):
        np.testing.assert_array_equal(one, other)


def test_words_of_every_row(loop: normal_table.Loop) -> None:
    """Both ends of every segment, either sign, and the ends of the range; the tail is named and left alone."""
    starts = [(64 + part) << (octave - 6) for octave in range(40, 63) for part in range(64)]
    sizes = [word for start in starts for word in (start - 1, start, start + 1)] + [0, 1, 2**63 - 1]
    words = np.array([sign * size for size in sizes for sign in (1, -1)] + [-(2**63)], dtype=np.int64)
    stream: Any = SecretStream(bytes(32))
    deviates = stream._deviates(words, _Work(words.size))
    expected = np.rint(deviates * 2.0**40).astype(np.int64)
    in_tail = find_rows((words | 1).astype(np.float64), out=np.empty_like(words)) < TAIL_ROW
    np.testing.assert_array_equal(in_tail, [abs(word | 1) < 2**44 for word in words.tolist()])
    for flip, sign in ((0, 1), (-1, -1)):
        target, tail = np.zeros(words.size, dtype=np.uint64), np.empty_like(words)
        found = loop(words, target, 2.0**40, flip, tail)
        np.testing.assert_array_equal(tail[:found], np.flatnonzero(in_tail))
        np.testing.assert_array_equal(target.view(np.int64), np.where(in_tail, 0, sign * expected))


def test_targets_with_gaps_or_at_odd_addresses_are_left_to_the_reference(
    loop: normal_table.Loop,
) -> None:
    del loop
    strided = np.zeros(2 * 1000, dtype=np.int64)
    unaligned = np.zeros(8 * 1000 + 1, dtype=np.uint8)[1:].view(np.int64)
    for target in (strided[::2], unaligned):
        SecretStream(SEEDS[1]).add_gaussian(target, 100.0)
        np.testing.assert_array_equal(target, draw(SEEDS[1], 1000, 100.0))
    assert not strided[1::2].any()


@pytest.mark.parametrize("compiled_from", [0, NEVER])
def test_nothing_is_drawn_if_any_argument_is_refused(
    compiled_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secret.demand, "worth", compiled_from)
    good, target = SecretStream(SEEDS[0]), np.zeros(10, dtype=np.int64)
    for bad in ((SecretStream(SEEDS[1]), -1.0, 1), (SecretStream(SEEDS[1]), 1.0, 0)):
        with pytest.raises(ConfigError):
            add_gaussians(target, [(good, 1000.0, 1), bad])
    assert not target.any()
    add_gaussians(target, [])
    assert not target.any()
    add_gaussians(np.zeros(0, dtype=np.int64), [(good, 1000.0, 1)])
    np.testing.assert_array_equal(next(good.gaussian_grid(10, 1000.0)), draw(SEEDS[0], 10, 1000.0))


class Numba:
    """Stands in for numba: "compiles" into what it is given."""

    def __init__(self, function: Any, *, disabled: bool = False) -> None:
        self.config = SimpleNamespace(DISABLE_JIT=disabled)
        self.njit = lambda *_, **__: lambda _: function


def reference_loop(words: Any, _: Any, target: Any, deviation: float, flip: int, tail: Any) -> int:
    """What a right loop does, in numpy."""
    stream: Any = SecretStream(bytes(32))
    in_tail = np.flatnonzero(np.abs(words | 1) < 2**44)
    tail[: in_tail.size] = in_tail
    noise = np.rint(stream._deviates(words, _Work(words.size)) * deviation).astype(np.int64)
    noise[in_tail] = 0
    target += (-noise if flip else noise).view(np.uint64)
    return int(in_tail.size)


def one_bit_off(words: Any, table: Any, target: Any, *rest: Any) -> int:
    found = reference_loop(words, table, target, *rest)
    target[-1] ^= 1
    return found


def never_subtracts(words: Any, table: Any, target: Any, deviation: float, _: int, tail: Any) -> int:
    return reference_loop(words, table, target, deviation, 0, tail)


def blind_to_the_tail(*arguments: Any) -> int:
    return 0 * reference_loop(*arguments)


def test_a_loop_is_used_only_if_it_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(numba: Any) -> Any:
        monkeypatch.setitem(sys.modules, "numba", numba)
        return load_loop.__wrapped__()

    assert loaded(Numba(reference_loop)) is not None
    for wrong in (one_bit_off, never_subtracts, blind_to_the_tail):
        assert loaded(Numba(wrong)) is None
    assert loaded(Numba(reference_loop, disabled=True)) is None, "a loop in plain Python is slower than numpy"
    assert loaded(None) is None, "numba is not installed"
    assert loaded(SimpleNamespace(config=SimpleNamespace(DISABLE_JIT=False))) is None, "it cannot compile"


def test_what_is_compiled_is_loaded_once_it_is_worth_it() -> None:
    demand = Demand(1000, lambda: one_bit_off)
    assert [demand.compiled(400) for _ in range(4)] == [None, None, one_bit_off, one_bit_off]
    assert Demand(1000, lambda: one_bit_off).compiled(1000) is one_bit_off


def test_threads_are_those_of_the_process_and_of_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    found = []
    for value in ("", "4", "4,2", "16", "0", "many"):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        found.append(thread_limit())
    assert found == [8, 4, 4, 8, 1, 8]


def test_keystreams_hold_a_key_and_cannot_be_copied() -> None:
    stream: Any = SecretStream(SEEDS[1])
    for copying in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(PrivacyError):
            copying(stream._keystream)
