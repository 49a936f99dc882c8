"""Streams are named, typed, stateless, and never change their numbers."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niss.randomness import SimStream, normal_blocks
from niss.randomness.sim import BLOCK, normal_streams
from support.refusals import refuses

names = st.lists(st.one_of(st.text(max_size=4), st.integers(-(2**70), 2**70)), max_size=3)


@settings(deadline=None, max_examples=200)
@given(first=names, second=names)
def test_different_paths_are_different_streams(first: list[str | int], second: list[str | int]) -> None:
    root = SimStream(7)
    assert (root.child(*first) == root.child(*second)) == (first == second)


def test_names_are_typed_and_their_borders_count() -> None:
    root = SimStream(1)
    streams = [
        root,
        root.child(),
        root.child("ab"),
        root.child("a", "b"),
        root.child("b", "a"),
        root.child("a").child("b"),
        root.child(1),
        root.child("1"),
        root.child("\x01" + 15 * "\x00"),
        root.child(-1),
        root.child(1, 1),
        root.child(11),
        SimStream(2).child("ab"),
    ]
    assert len(set(streams)) == len(streams)
    assert len({stream.torch_seed() for stream in streams}) == len(streams)
    assert len({float(stream.generator().random()) for stream in streams}) == len(streams)


def test_a_stream_holds_no_position() -> None:
    stream = SimStream(3).child("round", 17)
    first = stream.generator()
    first.random(1000)
    np.testing.assert_array_equal(stream.generator().random(5), stream.generator().random(5))
    assert stream == SimStream(3).child("round", 17)
    assert hash(stream) == hash(SimStream(3).child("round", 17))
    assert stream == pickle.loads(pickle.dumps(stream))  # noqa: S301
    assert stream == copy.deepcopy(stream)
    assert stream != "round"


def test_the_numbers_never_change() -> None:
    """Golden values: a change here silently changes every recorded run."""
    stream = SimStream(1).child("x")
    np.testing.assert_array_equal(
        stream.generator().standard_normal(3),
        [-0.6619742844113955, 0.5000518798929684, -1.1995713391027678],
    )
    assert stream.torch_seed() == 134018185587885971


def test_the_repr_names_the_stream_without_its_key() -> None:
    assert len(repr(SimStream(1))) < 30


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, np.int64(5), np.uint32(5)])
def test_whole_numbers_are_seeds(seed: int) -> None:
    assert SimStream(seed) == SimStream(int(seed))
    assert 0 <= SimStream(seed).torch_seed() < 2**63


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, "1", None])
def test_anything_else_is_refused_by_name(seed: object) -> None:
    with refuses("seed"):
        SimStream(seed)  # type: ignore[arg-type]


def test_a_name_must_be_text_or_a_whole_number() -> None:
    with pytest.raises(TypeError):
        SimStream(1).child(1.5)  # type: ignore[arg-type]


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**63 - 1),
    streams=st.integers(0, 60),
    count=st.one_of(st.integers(1, 1_000), st.sampled_from([BLOCK // 2, BLOCK // 2 + 1, BLOCK, BLOCK + 3])),
    kind=st.sampled_from([np.float32, np.float64]),
)
def test_many_streams_give_the_numbers_of_each(seed: int, streams: int, count: int, kind: type) -> None:
    named = [SimStream(seed).child("one", number) for number in range(streams)]
    found = [
        (number, place, block.copy()) for number, place, block in normal_streams(iter(named), count, kind)
    ]
    wanted = [
        (number, place, block.copy())
        for number, one in enumerate(named)
        for place, block in normal_blocks(one, count, kind)
    ]
    assert [entry[:2] for entry in found] == [entry[:2] for entry in wanted]
    assert all(np.array_equal(one[2], other[2]) for one, other in zip(found, wanted, strict=True))


def test_a_key_that_ends_in_zeros_seeds_the_same_generator() -> None:
    """As a number it has a word less, and numpy's seeding leaves that word out."""
    streams = [SimStream(number) for number in range(4)]
    streams[2]._key = streams[2]._key[:28] + bytes(4)
    for number, _, block in normal_streams(streams, 10, np.float32):
        assert np.array_equal(block, next(normal_blocks(streams[number], 10, np.float32))[1])


def test_more_streams_than_are_seeded_at_once() -> None:
    streams = [SimStream(9).child(number) for number in range(2_100)]
    found = [(number, block.copy()) for number, _, block in normal_streams(streams, 3, np.float32)]
    assert [number for number, _ in found] == list(range(2_100))
    for number in (0, 1_023, 1_024, 2_047, 2_048, 2_099):
        assert np.array_equal(found[number][1], next(normal_blocks(streams[number], 3, np.float32))[1])
