"""Packed vectors: exact, with one form each, and as small as they can be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from niss.errors import RemoteProtocolError
from niss.protocol.agreement import add_packed, pack, unpack

widths = st.sampled_from([32, 64])


@given(widths, st.lists(st.integers(0, 2**64 - 1), max_size=150))
def test_packing_follows_its_definition_and_comes_back(bits: int, values: list[int]) -> None:
    packed = pack(np.array(values, dtype=np.uint64), bits)
    whole = sum((value % 2**bits) << place * bits for place, value in enumerate(values))
    assert packed == whole.to_bytes(len(values) * bits // 8, "little")
    back = unpack(packed, len(values), bits)
    assert back.dtype == np.uint64
    assert back.tolist() == [value % 2**bits for value in values]


@given(widths, st.lists(st.lists(st.integers(0, 2**64 - 1), min_size=5, max_size=5), max_size=9))
def test_sums_wrap_around(bits: int, rows: list[list[int]]) -> None:
    found = None
    for row in rows:
        packed = pack(np.array(row, dtype=np.uint64), bits)
        before, found = found, add_packed(found, packed, 5, bits)
        assert before is None or found is before  # In place, in words as wide as the modulus.
        assert found.dtype.itemsize == bits // 8
    assert found is None or found.tolist() == [sum(column) % 2**bits for column in zip(*rows, strict=True)]


def test_strided_input_and_the_result_is_free_to_change() -> None:
    values = np.arange(40, dtype=np.uint64)[::-2]
    for bits in (32, 64):
        packed = pack(values, bits)
        back = unpack(packed, values.size, bits)
        assert back.tolist() == values.tolist()
        back += np.uint64(1)
        assert unpack(packed, values.size, bits).tolist() == values.tolist()


@pytest.mark.parametrize("bits", [32, 64])
def test_a_wrong_length_is_refused_by_numbers_only(bits: int) -> None:
    packed = pack(np.arange(10, dtype=np.uint64), bits)
    for wrong in (packed[:-1], packed + b"\0", b""):
        with pytest.raises(RemoteProtocolError, match="vector"):
            unpack(wrong, 10, bits)
    with pytest.raises(RemoteProtocolError, match="vector"):
        unpack(packed, 2**60, bits)  # before any memory is taken
