"""From the verified bytes of a dataset's files to its arrays: gzipped IDX, CIFAR records, tar archives.

Every reader is told the exact shape or size it must find and refuses anything else, so a damaged or hostile file ends
in a `DataError` and never in more memory than the dataset itself needs. Nothing is ever unpickled, and no archive
member is ever written to disk.
"""

from __future__ import annotations

import gzip
import io
import math
import struct
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from niss.data.catalog import (
    CifarLayout,
    DatasetSpec,
    EmbeddedLayout,
    IdxLayout,
    PlaysLayout,
)
from niss.data.dataset import Arrays, Images, Labels
from niss.data.plays import role_samples
from niss.errors import DataError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


def decode(spec: DatasetSpec, contents: Mapping[str, bytes]) -> Arrays:
    """The arrays in the files of one of the spec's file sets, given by name; all sizes must be the spec's.

    spec       the catalog entry: its layout says which reader, its sizes what must come out
    contents   verified bytes by file name

    Raises `DataError` for anything that is not exactly the published format and size.
    """
    match spec.layout:
        case IdxLayout():
            return _from_idx(spec, spec.layout, contents)
        case CifarLayout():
            return _from_records(spec, spec.layout, contents)
        case PlaysLayout():
            return _from_plays(spec, spec.layout, contents)
        case EmbeddedLayout():
            raise TypeError(f"{spec.name} is embedded and has no files to decode")


def _from_idx(spec: DatasetSpec, layout: IdxLayout, contents: Mapping[str, bytes]) -> Arrays:
    """The MNIST family: images and labels in four gzipped IDX files."""

    def array(name: str, shape: tuple[int, ...]) -> Images:
        return parse_idx(gunzip_exactly(contents[name], idx_size(shape), name=name), shape, name=name)

    def images(name: str, count: int) -> Images:
        return array(name, (count, *spec.image_shape[1:])).reshape(count, *spec.image_shape)

    return Arrays(
        train_inputs=images(layout.train_images, spec.train_size),
        train_labels=array(layout.train_labels, (spec.train_size,)).astype(np.int64),
        test_inputs=images(layout.test_images, spec.test_size),
        test_labels=array(layout.test_labels, (spec.test_size,)).astype(np.int64),
    )


def _from_records(spec: DatasetSpec, layout: CifarLayout, contents: Mapping[str, bytes]) -> Arrays:
    """The CIFAR family: records of label and pixels, loose or in the published archive."""
    counts = {name: spec.train_size // len(layout.train) for name in layout.train}
    counts |= {name: spec.test_size // len(layout.test) for name in layout.test}
    if layout.archive in contents:
        contents = _unpacked(spec, layout, contents[layout.archive], counts)

    parse = partial(parse_records, label_bytes=layout.label_bytes, image_shape=spec.image_shape)

    def joined(names: tuple[str, ...]) -> tuple[Images, Labels]:
        parts = [parse(contents[name], counts[name], name=name) for name in names]
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

    return Arrays(*joined(layout.train), *joined(layout.test))


def _from_plays(spec: DatasetSpec, layout: PlaysLayout, contents: Mapping[str, bytes]) -> Arrays:
    """Texts in a source archive, cut into samples by role."""
    members = read_tar_folder(contents[layout.archive], layout.folder, name=layout.archive)
    return role_samples(members, spec.shape[0])


def _unpacked(
    spec: DatasetSpec, layout: CifarLayout, archive: bytes, counts: Mapping[str, int]
) -> dict[str, bytes]:
    """The record files inside the archive, each checked against its own published checksum where there is one."""
    record = layout.label_bytes + math.prod(spec.image_shape)
    sizes = {f"{layout.folder_in_archive}/{name}": count * record for name, count in counts.items()}
    members = read_tar_members(archive, sizes, name=layout.archive)
    files = {name: members[f"{layout.folder_in_archive}/{name}"] for name in counts}
    for name, digest in layout.digests.items():
        fix = f"delete {layout.archive} and run `niss data get {spec.name}`"
        digest.check(f"{name} in {layout.archive}", digest.of_bytes(files[name]), fix=fix)
    return files


_IDX_UNSIGNED_BYTE = 0x08
# Room for the tar headers, the paddings and the few small text files beside the records.
_TAR_SLACK = 1 << 20
# An archive of which only a part is wanted may hold so much when decompressed.
_MOST_UNPACKED = 1 << 27


def gunzip_exactly(raw: bytes, size: int, *, name: str) -> bytes:
    """Decompress `raw`, which must hold exactly `size` bytes; stops as soon as there are more.

    A file that is cut off, is not gzip, or holds any other number of bytes is a `DataError` that calls it `name`.
    """
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
            content = file.read(size + 1)
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{name} is not a whole gzip file: {error}") from error
    if len(content) != size:
        number = "more" if len(content) > size else f"only {len(content)}"
        raise DataError(f"{name} should hold {size} bytes when decompressed, and holds {number}")
    return content


def idx_size(shape: tuple[int, ...]) -> int:
    """The length in bytes of an IDX file of unsigned bytes of that shape."""
    return 4 + 4 * len(shape) + math.prod(shape)


def parse_idx(raw: bytes, shape: tuple[int, ...], *, name: str) -> npt.NDArray[np.uint8]:
    """The array in an IDX file of unsigned bytes, which must have exactly this shape and no byte more.

    IDX: two zero bytes, a type code, the number of dimensions, each dimension as a big-endian 32-bit number, the data.
    """
    header = 4 + 4 * len(shape)
    if len(raw) < header:
        raise DataError(f"{name} ends inside its header: {len(raw)} of {header} bytes")
    magic = raw[:4]
    expected = bytes((0, 0, _IDX_UNSIGNED_BYTE, len(shape)))
    if magic != expected:
        raise DataError(f"{name} begins with {magic.hex()}, not with the IDX magic {expected.hex()}")
    dimensions = struct.unpack(f">{len(shape)}I", raw[4:header])
    if dimensions != shape:
        raise DataError(f"{name} says its shape is {dimensions}, but it must be {shape}")
    if len(raw) != idx_size(shape):
        raise DataError(f"{name} has {len(raw)} bytes, but its shape {shape} needs {idx_size(shape)}")
    return np.frombuffer(raw, dtype=np.uint8, offset=header).reshape(shape).copy()


def parse_records(
    raw: bytes, records: int, *, label_bytes: int, image_shape: tuple[int, int, int], name: str
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Images and labels of a file of exactly `records` CIFAR records.

    A record is `label_bytes` labels, the last of which is used, then the pixels, channel by channel and row by row.
    `name` is the file's, for the message of the `DataError` where the length is another.
    """
    length = label_bytes + math.prod(image_shape)
    if len(raw) != records * length:
        raise DataError(f"{name} has {len(raw)} bytes, but {records} records need {records * length}")
    table = np.frombuffer(raw, dtype=np.uint8).reshape(records, length)
    images = table[:, label_bytes:].reshape(records, *image_shape).copy()
    return images, table[:, label_bytes - 1].astype(np.int64)


class _CappedReader(io.RawIOBase):
    """A reader that refuses to give out more than `limit` bytes in all."""

    def __init__(self, source: gzip.GzipFile, limit: int, name: str) -> None:
        super().__init__()
        self._source = source
        self._left = limit
        self._name = name

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        count = self._source.readinto(buffer)
        self._left -= count
        if self._left < 0:
            raise DataError(f"{self._name} holds far more data than the dataset has")
        return count


def read_tar_members(raw: bytes, sizes: Mapping[str, int], *, name: str) -> dict[str, bytes]:
    """The contents of the members named in `sizes`, each a regular file of exactly that size.

    Members of other names are passed over, but a name that climbs out of the archive, or a link or device,
    condemns the whole archive, as does a wanted member that is missing or comes twice.
    """
    found: dict[str, bytes] = {}
    for archive, member in _members(raw, limit=sum(sizes.values()) + _TAR_SLACK, name=name):
        if member.name not in sizes:
            continue
        if member.name in found:
            raise DataError(f"{name} holds {member.name} twice")
        found[member.name] = _content(archive, member, sizes[member.name], name)
    missing = [wanted for wanted in sizes if wanted not in found]
    if missing:
        raise DataError(f"{name} lacks {', '.join(missing)}")
    return found


def read_tar_folder(raw: bytes, folder: str, *, name: str) -> dict[str, bytes]:
    """The contents of the regular files that lie directly in a folder of an archive, by their names in it.

    The archive is condemned for what `read_tar_members` would condemn, and where it holds far more than it should.
    """
    found: dict[str, bytes] = {}
    for archive, member in _members(raw, limit=_MOST_UNPACKED, name=name):
        path = PurePosixPath(member.name)
        if not member.isreg() or str(path.parent) != folder:
            continue
        if path.name in found:
            raise DataError(f"{name} holds {member.name} twice")
        found[path.name] = _content(archive, member, member.size, name)
    return found


def _members(raw: bytes, *, limit: int, name: str) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """The members of a tar.gz, in order, each with the archive to read it from before the next one is asked for."""
    try:
        with (
            gzip.GzipFile(fileobj=io.BytesIO(raw)) as plain,
            tarfile.open(fileobj=io.BufferedReader(_CappedReader(plain, limit, name)), mode="r|") as archive,
        ):
            for member in archive:
                _refuse_unsafe(member, name)
                yield archive, member
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DataError(f"{name} is not a whole tar.gz archive: {error}") from error


def _refuse_unsafe(member: tarfile.TarInfo, archive: str) -> None:
    """Refuse an archive with a member that points out of it, or that is neither file nor folder."""
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or "\\" in member.name:
        raise DataError(f"{archive} holds a member with the unsafe name {member.name!r}")
    if not (member.isreg() or member.isdir()):
        raise DataError(f"{archive} holds {member.name!r}, which is neither a file nor a folder")


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo, size: int, name: str) -> bytes:
    """The bytes of one wanted member, which must have exactly the size it should."""
    if not member.isreg() or member.size != size:
        raise DataError(f"{member.name} in {name} should be a file of {size} bytes, and has {member.size}")
    try:
        file = archive.extractfile(member)
        content = b"" if file is None else file.read(size)
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DataError(f"{name} is not a whole tar.gz archive: {error}") from error
    if len(content) != size:
        raise DataError(f"{member.name} in {name} ends after {len(content)} of {size} bytes")
    return content
