"""The readers: what they give back. What is damaged is refused by its checksum, before any of them sees it."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niss.data.formats import read_idx, read_records, read_tar
from tests.data.conftest import idx, tar_gz


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=4).map(tuple))
def test_idx_gives_back_what_was_written(shape):
    written = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    array = read_idx(gzip.compress(idx(written)))
    assert array.dtype == np.uint8
    assert np.array_equal(array, written)
    assert array.flags.writeable


def test_records_use_the_last_label_byte_and_keep_channel_order():
    pixels = np.arange(12, dtype=np.uint8)
    raw = bytes((7, 42)) + pixels.tobytes() + bytes((8, 43)) + pixels[::-1].tobytes()
    images, labels = read_records(raw, 2, (3, 2, 2))
    assert labels.tolist() == [42, 43]
    assert labels.dtype == np.int64
    assert images[0].tolist() == pixels.reshape(3, 2, 2).tolist()
    assert images[1, 2, 1, 1] == 0


@pytest.mark.parametrize(
    ("folder", "held"), [("d", {"a.bin": b"123", "readme": b"hello"}), ("elsewhere", {})]
)
def test_tar_gives_the_files_of_one_folder(folder, held):
    raw = tar_gz(("d/readme", b"hello"), ("d/a.bin", b"123"), ("d/e/b.bin", b"45"), ("c.bin", b"6"))
    assert read_tar(raw, folder) == held
