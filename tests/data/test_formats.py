"""The strict readers: what they give back, and everything they refuse."""

from __future__ import annotations

import gzip
import struct
import tarfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niss.data.formats import gunzip_exactly, idx_size, parse_idx, parse_records, read_tar
from niss.errors import DataError
from tests.data.conftest import tar_gz

SHAPE = (3, 2, 4)


def numbered(*cases: tuple[bytes, str]) -> list[object]:
    """Cases named by place and complaint: names made of gzip bytes would change with the clock."""
    return [pytest.param(*case, id=f"{place}-{case[1]}") for place, case in enumerate(cases)]


def idx_bytes(shape: tuple[int, ...] = SHAPE, kind: int = 8) -> bytes:
    body = bytes(i % 256 for i in range(int(np.prod(shape))))
    return bytes((0, 0, kind, len(shape))) + struct.pack(f">{len(shape)}I", *shape) + body


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=4).map(tuple))
def test_idx_gives_back_what_was_written(shape):
    raw = idx_bytes(shape)
    array = parse_idx(raw, shape, name="x")
    assert array.shape == shape
    assert array.dtype == np.uint8
    assert array.tobytes() == raw[4 + 4 * len(shape) :]
    assert array.flags.writeable
    assert len(raw) == idx_size(shape)


@pytest.mark.parametrize(
    ("raw", "complaint"),
    numbered(
        (b"", "ends inside its header"),
        (idx_bytes()[:15], "ends inside its header"),
        (idx_bytes(kind=9), "magic"),
        (b"\x01" + idx_bytes()[1:], "magic"),
        (idx_bytes((6, 4)) + b"\0" * 8, "magic"),
        (idx_bytes((2, 3, 4)), "shape"),
        (idx_bytes()[:-1], "bytes"),
        (idx_bytes() + b"\0", "bytes"),
    ),
)
def test_idx_refuses_all_but_the_expected(raw, complaint):
    with pytest.raises(DataError, match=complaint) as caught:
        parse_idx(raw, SHAPE, name="some-file")
    assert "some-file" in str(caught.value)


def test_gunzip_gives_exactly_the_content():
    assert gunzip_exactly(gzip.compress(b"abc"), 3, name="x") == b"abc"


@pytest.mark.parametrize(
    ("raw", "complaint"),
    numbered(
        (gzip.compress(b"abcd"), "holds more"),
        (gzip.compress(b"ab"), "only 2"),
        (gzip.compress(b"abc")[:-3], "not a whole gzip"),
        (gzip.compress(b"abc")[:-8] + b"\0" * 8, "not a whole gzip"),
        (b"plain text", "not a whole gzip"),
        (gzip.compress(b"abc")[:10] + b"\xff\xff\xff" + gzip.compress(b"abc")[13:], "not a whole gzip"),
    ),
)
def test_gunzip_refuses_other_sizes_and_damage(raw, complaint):
    with pytest.raises(DataError, match=complaint):
        gunzip_exactly(raw, 3, name="x")


def test_gunzip_does_not_unfold_a_bomb(monkeypatch):
    """Whatever a file would expand to, no more is asked of it than one byte beyond the expected size."""
    asked = []
    read = gzip.GzipFile.read
    monkeypatch.setattr(gzip.GzipFile, "read", lambda self, size=-1: asked.append(size) or read(self, size))
    with pytest.raises(DataError, match="holds more"):
        gunzip_exactly(gzip.compress(bytes(1 << 22)), 100, name="x")
    assert asked == [101]


def test_records_use_the_last_label_byte_and_keep_channel_order():
    pixels = np.arange(12, dtype=np.uint8)
    raw = bytes((7, 42)) + pixels.tobytes() + bytes((8, 43)) + pixels[::-1].tobytes()
    images, labels = parse_records(raw, 2, 2, (3, 2, 2), name="x")
    assert labels.tolist() == [42, 43]
    assert labels.dtype == np.int64
    assert images[0].tolist() == pixels.reshape(3, 2, 2).tolist()
    assert images[1, 2, 1, 1] == 0


@pytest.mark.parametrize("length", [0, 25, 27])
def test_records_refuse_another_length(length):
    with pytest.raises(DataError, match="2 records need 26"):
        parse_records(bytes(length), 2, 1, (3, 2, 2), name="x")


def test_tar_gives_the_wanted_members_and_passes_over_others():
    raw = tar_gz(("d/readme", b"hello"), ("d/a.bin", b"123"), ("d/b.bin", b"45"))
    wanted = {"a.bin": b"123", "b.bin": b"45"}
    assert read_tar(raw, "d", {"a.bin": 3, "b.bin": 2}, name="x") == wanted
    assert read_tar(raw, "d", name="x") == wanted | {"readme": b"hello"}
    assert read_tar(raw, "elsewhere", name="x") == {}


def _special(kind: bytes, name: str = "d/a.bin", target: str = "/etc/passwd") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = target
    return info


@pytest.mark.parametrize(
    ("raw", "complaint"),
    numbered(
        (tar_gz(("../evil", b"x"), ("d/a.bin", b"123")), "unsafe name"),
        (tar_gz(("d/../../evil", b"x"), ("d/a.bin", b"123")), "unsafe name"),
        (tar_gz(("/etc/evil", b"x"), ("d/a.bin", b"123")), "unsafe name"),
        (tar_gz(("..\\evil", b"x"), ("d/a.bin", b"123")), "unsafe name"),
        (tar_gz(_special(tarfile.SYMTYPE)), "neither a file nor a folder"),
        (tar_gz(_special(tarfile.LNKTYPE)), "neither a file nor a folder"),
        (tar_gz(_special(tarfile.CHRTYPE, "d/tty"), ("d/a.bin", b"123")), "neither a file nor a folder"),
        (tar_gz(_special(tarfile.DIRTYPE)), "should be a file"),
        (tar_gz(("d/a.bin", b"123"), ("d/a.bin", b"456")), "twice"),
        (tar_gz(("d/a.bin", b"12")), "should be a file of 3 bytes"),
        (tar_gz(("d/a.bin", b"1234")), "should be a file of 3 bytes"),
        (tar_gz(("elsewhere/a.bin", b"123")), "lacks d/a.bin"),
        (tar_gz(("d/padding", bytes(1 << 22)), ("d/a.bin", b"123")), "far more data"),
        (tar_gz(("d/a.bin", b"123"))[:-20], "not a whole tar.gz"),
        (gzip.compress(b"no archive at all" * 100), "not a whole tar.gz"),
        (b"", "not a whole tar.gz"),
        (b"not even gzip", "not a whole tar.gz"),
    ),
)
def test_tar_refuses_the_unsafe_the_damaged_and_the_unexpected(raw, complaint):
    with pytest.raises(DataError, match=complaint):
        read_tar(raw, "d", {"a.bin": 3}, name="x")
