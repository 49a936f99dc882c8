"""Packed vectors: exact, with one form each, and as small as they can be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.protocol.agreement import pack, packed_size, unpack

WIDTHS = range(16, 65)


def plainly_packed(values: list[int], bits: int) -> bytes:
    """The definition, in one large number."""
    whole = sum((value % 2**bits) << place * bits for place, value in enumerate(values))
    return whole.to_bytes((len(values) * bits + 7) // 8, "little")


@given(st.integers(16, 64), st.lists(st.integers(0, 2**64 - 1), max_size=150))
def test_packing_follows_its_definition_and_comes_back(bits: int, values: list[int]) -> None:
    packed = pack(np.array(values, dtype=np.uint64), bits)
    assert packed == plainly_packed(values, bits)
    back = unpack(packed, len(values), bits)
    assert back.dtype == np.uint64
    assert back.tolist() == [value % 2**bits for value in values]


@given(st.integers(16, 64), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=80))
def test_signed_values_wrap_around(bits: int, values: list[int]) -> None:
    packed = pack(np.array(values, dtype=np.int64), bits)
    assert unpack(packed, len(values), bits).tolist() == [value % 2**bits for value in values]


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("count", [0, 1, 2, 63, 64, 65, 129])
def test_every_width_keeps_the_extremes(bits: int, count: int) -> None:
    top = np.full(count, 2**bits - 1, dtype=np.uint64)
    packed = pack(top, bits)
    assert len(packed) == packed_size(count, bits) == -(-count * bits // 8)
    np.testing.assert_array_equal(unpack(packed, count, bits), top)
    assert pack(np.zeros(count, dtype=np.int64), bits) == bytes(len(packed))


@given(st.integers(16, 64), st.integers(0, 70), st.data())
def test_whatever_is_unpacked_packs_to_the_same_bytes(bits: int, count: int, data: st.DataObject) -> None:
    size = packed_size(count, bits)
    packed = data.draw(st.binary(min_size=size, max_size=size))
    try:
        values = unpack(packed, count, bits)
    except RemoteProtocolError:
        assert 8 * size != count * bits
    else:
        assert pack(values, bits) == packed


def test_32_and_64_bits_are_plain_little_endian_arrays() -> None:
    values = np.arange(1, 1000, dtype=np.uint64) * np.uint64(0x0123_4567_89AB)
    assert pack(values, 64) == values.astype("<u8").tobytes()
    assert pack(values, 32) == (values % np.uint64(2**32)).astype("<u4").tobytes()


def test_strided_input_and_the_result_is_free_to_change() -> None:
    values = np.arange(40, dtype=np.int64)[::-2]
    for bits in (17, 32, 64):
        back = unpack(pack(values, bits), values.size, bits)
        assert back.tolist() == values.tolist()
        back += np.uint64(1)
    assert values[0] == 39


@pytest.mark.parametrize("bits", [16, 17, 31, 32, 33, 64])
def test_a_wrong_length_is_refused_by_numbers_only(bits: int) -> None:
    packed = pack(np.arange(10, dtype=np.uint64), bits)
    for wrong in (packed[:-1], packed + b"\0", b""):
        with pytest.raises(RemoteProtocolError, match="vector"):
            unpack(wrong, 10, bits)
    with pytest.raises(RemoteProtocolError, match="vector"):
        unpack(packed, 2**60, bits)  # before any memory is taken


def test_bits_after_the_last_value_must_be_zero() -> None:
    packed = bytearray(pack(np.zeros(3, dtype=np.uint64), 17))  # 51 bits, 5 to spare
    packed[-1] = 0b1000
    with pytest.raises(RemoteProtocolError, match="bits after the last value"):
        unpack(bytes(packed), 3, 17)


@pytest.mark.parametrize("bits", [15, 65, 0, -32, 32.0, True])
def test_a_width_out_of_range_is_our_own_fault(bits: int) -> None:
    with pytest.raises(LocalProtocolError, match="modulus_bits"):
        pack(np.zeros(1, dtype=np.uint64), bits)
    with pytest.raises(LocalProtocolError, match="modulus_bits"):
        unpack(b"", 0, bits)


@pytest.mark.parametrize("values", [np.zeros(3), np.zeros((2, 2), dtype=np.int64), [1, 2]])
def test_only_flat_arrays_of_64_bit_numbers_are_packed(values: object) -> None:
    with pytest.raises(LocalProtocolError, match="values"):
        pack(values, 32)  # type: ignore[arg-type]


def test_a_negative_count_is_our_own_fault() -> None:
    with pytest.raises(LocalProtocolError, match="count"):
        unpack(b"", -1, 32)
